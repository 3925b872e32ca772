"""N-gram models of the same text, beside the bound of the model."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from md4_jax.data import ngrams
from md4_jax.evals import report
from md4_jax.evals.context import Context, check_data
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.experiment import Experiment
from md4_jax.protocols import Params, UserError

# The models count in memory: text beyond this many tokens is not looked at.
MOST_TOKENS = 20_000_000


@dataclasses.dataclass(frozen=True)
class NGramModels:
    """Evaluates n-gram models, fitted to the run's training split, on a split.

    every, final, split, data  as of `likelihood`
    order                      the models of order 1 to this one
    """

    every: int = 0
    final: bool = False
    split: str = "test"
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    order: int = 5

    needs_data: ClassVar[bool] = True

    def __post_init__(self):
        check_data(self)
        if self.order < 1:
            raise UserError(f"order must be at least 1, not {self.order}")
        if self.every < 0:
            raise UserError(f"every must not be negative, not {self.every}")

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns bits per token of each order; says them beside a bound of the same text."""
        del params
        if jax.process_index() != 0:
            return {}
        found = ngrams.ladder(
            context.corpus({}).stream("train")[:MOST_TOKENS],
            context.corpus(self.data).stream(self.split)[:MOST_TOKENS],
            experiment.domain.vocab_size,
            self.order,
        )
        context.say(report.ladder(found, self._bound(experiment, context)))
        return {"split": self.split, **{key(n): level for n, level in enumerate(found, start=1)}}

    def _bound(self, experiment: Experiment, context: Context) -> Mapping[str, Any] | None:
        """The result of an evaluator that ran before on all of the same split."""
        for name, result in context.earlier.items():
            other = experiment.evals[name]
            same = isinstance(other, LikelihoodBound) and not other.limit
            if same and (other.split, other.data) == (self.split, self.data):
                return result
        return None


def key(order: int) -> str:
    """The name of the number of the model of that order."""
    return f"{order}_gram_bits_per_token"


def levels(result: Mapping[str, Any]) -> list[float]:
    """Bits per token by order, from the result of an evaluator; empty if it is of another kind."""
    found: list[float] = []
    while key(len(found) + 1) in result:
        found.append(result[key(len(found) + 1)])
    return found
