"""What an evaluator is told besides the model, and what evaluators have in common."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.experiment import Experiment
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.paths import Place

SPLITS = ("train", "validation", "test", "all")


class Context(NamedTuple):
    """The surroundings of one evaluation.

    name      of the evaluator in the config
    step      training steps behind the parameters
    workdir   directory of the run
    corpus    (overrides of the `data` section) -> the corpus, tokenised when it is first read
    judge     params -> the (experiment, params) under which samples are judged; None: nobody
    programs  compiled functions by what they were made of, kept for the whole run: an evaluator
              that is due again, and another one like it, find theirs here
    earlier   {name: numbers} of the evaluators that already ran on the same parameters
    say       prints lines for people, in the first process alone
    """

    name: str
    step: int
    workdir: Place
    corpus: Callable[[Mapping[str, Any]], Corpus]
    judge: Callable[[Params], tuple[Experiment, Params]] | None
    programs: dict[Any, Any]
    earlier: Mapping[str, Mapping[str, Any]]
    say: Callable[[str], None]


def check_data(evaluator: Any) -> None:
    """UserError for an evaluator whose `split` does not exist."""
    if evaluator.split not in SPLITS:
        raise UserError(f"split must be {', '.join(SPLITS[:-1])} or all, not {evaluator.split!r}")


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of the results that a curve can be drawn of."""
    return {k: v for k, v in result.items() if isinstance(v, int | float | np.number)}
