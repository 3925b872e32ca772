"""Which cases of a test are run where not all are."""

import collections


def covering(cases, number):
    """Returns the numbers of so many cases that have as many values of each parameter as possible.

    cases: the values of each. One after another, the case is taken whose values are rarest among
    those taken before; of several, the one nearest to an even spread.
    """
    kept, taken, share = set(), collections.Counter(), len(cases) / number
    for step in range(min(number, len(cases))):

        def rank(case, middle=(step + 0.5) * share):
            rarity = sum(0.5 ** taken[value] for value in enumerate(cases[case]))
            return -rarity, abs(case + 0.5 - middle), case

        best = min(set(range(len(cases))) - kept, key=rank)
        kept.add(best)
        taken.update(enumerate(cases[best]))
    return kept
