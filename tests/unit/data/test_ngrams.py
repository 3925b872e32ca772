"""The n-gram models: proper distributions, a case by hand, and known figures on text8."""

import itertools

import numpy as np
import pytest

from md4_jax.data.ngrams import ladder, probabilities
from md4_jax.data.sources.text8 import Text8
from md4_jax.data.tokenizers import Text8Symbols


def test_by_hand():
    """Train 0 0 1 of 3 symbols. p_1(w) = (c(w) + 2 / 3) / (3 + 2); p_2(w | 0) = (c + 2 p_1) / 4."""
    one, two = probabilities([0, 0, 1], [0, 1, 2, 0], 3, 2)
    p1 = [(2 + 2 / 3) / 5, (1 + 2 / 3) / 5, (2 / 3) / 5]
    np.testing.assert_allclose(one, [p1[0], p1[1], p1[2], p1[0]])
    # 1 is followed by nothing in train and 2 never seen: both leave p_1.
    np.testing.assert_allclose(two, [p1[0], (1 + 2 * p1[1]) / 4, p1[2], p1[0]])


@pytest.mark.parametrize("vocab_size", [4, 60_000])
def test_each_context_gives_a_distribution(vocab_size):
    """For 60,000 symbols five tokens do not fit in 64 bits; the four that occur are summed."""
    random = np.random.default_rng(0)
    train = random.choice(4, 200, p=[0.6, 0.2, 0.15, 0.05])
    for context in ([0, 0, 0, 0], [3, 3, 3, 3], [1, 0, 2, 0], list(train[-4:])):
        total = 0
        for token in range(4):
            orders = list(probabilities(train, [*context, token], vocab_size, 5))
            total += np.array([order[-1] for order in orders])
        if vocab_size > 4:
            unseen = [o[-1] for o in probabilities(train, [*context, 5], vocab_size, 5)]
            total += np.array(unseen) * (vocab_size - 4)
        np.testing.assert_allclose(total, 1, rtol=1e-12)


def test_naive_counting_agrees():
    """Against the definition, written with tuples and loops."""
    random = np.random.default_rng(1)
    train, test = random.integers(0, 3, 80), random.integers(0, 3, 30)

    def naive(context, token):
        below = 1 / 3 if not context else 0
        lower = naive(context[1:], token) if context else below
        size = len(context) + 1
        windows = [tuple(train[i : i + size]) for i in range(len(train) - size + 1)]
        after = [w[-1] for w in windows if w[:-1] == context]
        lower = lower if context else 1 / 3
        kinds = len(set(after))
        return (after.count(token) + kinds * lower) / (len(after) + kinds) if after else lower

    for order, p in enumerate(probabilities(train, test, 3, 4), 1):
        expected = [
            naive(tuple(test[max(0, i - order + 1) : i]), token) for i, token in enumerate(test)
        ]
        np.testing.assert_allclose(p, expected)


def test_large_vocabularies_give_the_same_figures_by_ranks():
    """Spreading 5 symbols over the ids of GPT-2 changes p_0 alone; from order 5 on no code fits."""
    random = np.random.default_rng(2)
    train, test = random.integers(0, 5, 5000), random.integers(0, 5, 500)
    small = ladder(train, test, 5, 6)
    large = ladder(train * 12_564, test * 12_564, 50_257, 6)
    np.testing.assert_allclose(small, large, atol=0.01)


def test_a_text_of_one_symbol_takes_no_bits():
    """Which are printed as 0.0000 and not as -0.0000."""
    assert [f"{bits:.4f}" for bits in ladder([0] * 50, [0] * 9, 1, 2)] == ["0.0000", "0.0000"]


def test_higher_orders_find_structure():
    period = np.tile([0, 1, 2, 1], 500)
    bits = ladder(period, period, 3, 3)
    assert bits[0] == pytest.approx(1.5, abs=0.01)
    assert bits[1] == pytest.approx(0.5, abs=0.02) and bits[2] < 0.02


def test_texts_shorter_than_the_order():
    assert len(ladder([0, 1], [1], 2, 5)) == 5
    assert all(itertools.starmap(np.isfinite, zip(ladder([0, 1], [1], 2, 5), strict=True)))


@pytest.mark.slow
def test_text8(shared):
    source = Text8(str(shared("text8/text8.first10M")))
    train, test = (
        Text8Symbols().encode(next(source.documents(split))) for split in ("train", "test")
    )
    np.testing.assert_allclose(ladder(train, test, 27), [4.12, 3.43, 2.87, 2.33, 2.03], atol=0.02)
