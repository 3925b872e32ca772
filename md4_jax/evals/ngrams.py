"""N-gram models, as a baseline for the bound on the same text."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from md4_jax.data import ngrams
from md4_jax.evals import report
from md4_jax.evals.context import Context, OnSplit, check_least, first_alone
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.experiment import Experiment
from md4_jax.protocols import Params

# The counts are kept in memory, so only this many tokens of a split are used.
MOST_TOKENS = 20_000_000


@dataclasses.dataclass(frozen=True)
class NGramModels(OnSplit):
    """Evaluates n-gram models, fitted to the run's training split, on a split.

    Of each split the first MOST_TOKENS tokens are read.

    every, final, split, data  as in `likelihood`
    order                      largest order; the others are 1 to order - 1
    """

    order: int = 5

    def __post_init__(self):
        super().__post_init__()
        check_least(self, order=1)

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns the bits per token of each order; prints them beside a bound on the same text."""
        del params
        if jax.process_index() != 0:
            return {}
        with first_alone():
            return self._counted(experiment, context)

    def _counted(self, experiment: Experiment, context: Context) -> dict[str, Any]:
        """Counts the n-grams of the training split, prints and returns the bits of the split."""
        train, tokens = (
            context.corpus(changes).stream(split)
            for changes, split in (({}, "train"), (self.data, self.split))
        )
        read = tokens[:MOST_TOKENS]
        symbols = experiment.domain.vocab_size
        found = ngrams.ladder(train[:MOST_TOKENS], read, symbols, self.order)
        bound = self._bound(experiment, context)
        unit, size = experiment.domain.unit, len(tokens)
        whole = self._text(size, size, unit) if size > MOST_TOKENS else ""
        part = self._text(len(read), size, unit)
        context.say(report.ladder(found, bound, part, whole, unit=unit))
        if len(train) > MOST_TOKENS:
            context.say(
                f"the n-gram models count the first {MOST_TOKENS:,} of {len(train):,} {unit}s of "
                "the training split"
            )
        return {"split": self.split, **{key(n): level for n, level in enumerate(found, start=1)}}

    def _text(self, read: int, size: int, unit: str) -> str:
        """Describes the part of a split that is read: 'the test split, all 55,770 tokens'."""
        split = "all splits" if self.split == "all" else f"the {self.split} split"
        own = " of its own data" if self.data else ""
        part = f"all {size:,}" if read == size else f"the first {read:,} of {size:,}"
        return f"{split}{own}, {part} {unit}s"

    def _bound(self, experiment: Experiment, context: Context) -> Mapping[str, Any] | None:
        """Returns the result of an earlier likelihood on the same whole split, or None."""
        for name, result in context.earlier.items():
            other = experiment.evals[name]
            same = isinstance(other, LikelihoodBound) and not other.limit
            if same and (other.split, other.data) == (self.split, self.data):
                return result
        return None


def key(order: int) -> str:
    """Returns the key of an order in the result."""
    return f"{order}_gram_bits_per_token"


def levels(result: Mapping[str, Any]) -> list[float]:
    """Returns the bits per token by order; empty for a result of another kind of evaluator."""
    found: list[float] = []
    while key(len(found) + 1) in result:
        found.append(result[key(len(found) + 1)])
    return found
