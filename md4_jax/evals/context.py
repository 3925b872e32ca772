"""Inputs of an evaluator other than the model, and functions that evaluators share."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.experiment import Experiment
from md4_jax.options import check_seed, check_whole
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.sharding import batch_shards

SPLITS = ("train", "validation", "test", "all")


class RunOf(Protocol):
    """Reads other models by (key, source), with any tokenizer; the key is for errors."""

    def __call__(self, key: str, asked: str) -> tuple[Experiment, Params, bool]:
        """Returns (experiment, params, whether this package trained it)."""

    def is_causal(self, key: str, asked: str) -> bool:
        """Returns whether the network in a directory is causal, without reading its parameters."""


class Context(NamedTuple):
    """Inputs of one evaluation.

    name      name of the evaluator in the config
    step      number of training steps of the parameters
    workdir   directory of the run
    corpus    (changes of the `data` section) -> the corpus, tokenised when first read
    judge     params -> (experiment, params) of the judge of samples; None: no judge
    run_of    reads other models
    programs  cache of compiled functions, shared by all evaluators for the whole run
    earlier   {name: result} of the evaluators that already ran on the same parameters
    say       prints text, in the first process only
    """

    name: str
    step: int
    workdir: Place
    corpus: Callable[[Mapping[str, Any]], Corpus]
    judge: Callable[[Params], tuple[Experiment, Params]] | None
    run_of: RunOf | None
    programs: dict[Any, Any]
    earlier: Mapping[str, Mapping[str, Any]]
    say: Callable[[str], None]


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """Marks errors of work that the first process does alone, while no other waits for it."""
    try:
        yield
    except Exception as error:
        error.of_first_alone = True
        raise


@contextlib.contextmanager
def warned(context: Context, what: str) -> Iterator[None]:
    """Prints a warning if the system fails to write a file beside a result, and goes on.

    what: name of the file, for the warning. The result may have taken hours, and is kept.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        context.say(f"warning: {what} was not saved in {context.workdir}: {why}")


def of_first_alone(error: Exception) -> bool:
    """Returns whether an error was raised within `first_alone`."""
    return getattr(error, "of_first_alone", False)


def check_least(evaluator: Any, **least: int) -> None:
    """Raises UserError for an option below its minimum or between whole numbers.

    least: {option: minimum}
    """
    for name, value in least.items():
        check_whole(name, getattr(evaluator, name))
        if getattr(evaluator, name) < value:
            limit = f"be at least {value}" if value else "not be negative"
            raise UserError(f"{name} must {limit}, not {getattr(evaluator, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnSplit:
    """Options of evaluators that read a split of data; `likelihood` documents them."""

    every: int = 0
    final: bool = False
    split: str = "test"
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    needs_data: ClassVar[bool] = True

    def __post_init__(self):
        if self.split not in SPLITS:
            raise UserError(f"split must be {', '.join(SPLITS[:-1])} or all, not {self.split!r}")
        check_least(self, every=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnBatches(OnSplit):
    """Options of evaluators that estimate a mean over the sequences of a split."""

    draws: int = 1
    batch_size: int = 0
    limit: int = 0
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_seed("seed", self.seed)
        check_least(self, draws=1, batch_size=0, limit=0)


def data_length(evaluator: Any, experiment: Experiment) -> tuple[str, int]:
    """Returns (key, tokens) of an evaluator's sequences; the key is '' for those of training."""
    if "length" not in evaluator.data:
        return "", experiment.data.length
    return "data.length", evaluator.data["length"]


def check_sizes(evaluator: Any, experiment: Experiment, key: str, length: int = 0) -> None:
    """Raises UserError if batch_size does not fit the mesh, or stride exceeds the length.

    length: tokens of a sequence; 0: those of the evaluator's data
    """
    size, shards = (
        evaluator.batch_size or experiment.train.batch_size,
        batch_shards(experiment.mesh),
    )
    if size % shards:
        raise UserError(f"{key}.batch_size={size} must be divisible by the {shards} batch shards")
    length = length or data_length(evaluator, experiment)[1]
    if getattr(evaluator, "stride", 0) > length:
        raise UserError(
            f"{key}.stride={evaluator.stride} must be at most {length}, the number of tokens of a "
            "sequence"
        )


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numeric results, for plotting."""
    return {k: v for k, v in result.items() if isinstance(v, int | float | np.number)}
