"""Evaluators of an experiment, to run on its parameters."""

import functools
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from md4_jax.data.corpus import Corpus
from md4_jax.data.sequences import SplitSize
from md4_jax.evals import guides
from md4_jax.evals.context import Context, OnBatches, RunOf, of_first_alone
from md4_jax.experiment import Experiment, drawn_classes
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.distributed import agreed, of_all
from md4_jax.runtime.errors import cause, name_sizes
from md4_jax.runtime.paths import Place
from md4_jax.runtime.stopping import stop_if_asked

Judge = Callable[[Params], tuple[Experiment, Params]]


class Failures:
    """Evaluators that failed during training: {name: (how often, last step, why)} as `found`."""

    def __init__(self):
        self.found: dict[str, tuple[int, int, str]] = {}

    def add(self, name: str, step: int, why: str) -> None:
        """Counts a failure at a step; why: the failure in words, for the user."""
        self.found[name] = (self.found.get(name, (0,))[0] + 1, step, why)

    def lines(self, workdir: Place) -> str:
        """Returns a warning for each evaluator, with the command that runs it again."""
        again = f"python -m md4_jax --workdir {shlex.quote(str(workdir))} --mode eval --evals"
        return "".join(
            f"\nwarning: {why}\n  Evaluations that failed: {times}, the last at step {step}. When "
            f"the cause is removed, evaluate the newest checkpoint:\n  {again} {name}"
            for name, (times, step, why) in self.found.items()
        )


def sizes_of(
    name: str, evaluator: Any, corpus_of: Callable[[Mapping[str, Any]], Corpus]
) -> dict[tuple[str, str], SplitSize]:
    """Tokenises the data of an evaluator: {(name, split): size}; UserError if that fails.

    corpus_of: (changes of the `data` section) -> the corpus
    """
    if hasattr(evaluator, "opened"):
        evaluator.opened(f"evals.{name}", corpus_of)
    if not evaluator.needs_data:
        return {}
    try:
        corpus = corpus_of(evaluator.data)
        corpus.check_stride(getattr(evaluator, "stride", 0))
        sizes = corpus.sizes([evaluator.split])
    except UserError as error:
        raise UserError(f"evals.{name}: {error}") from error
    if hasattr(evaluator, "check_size"):
        evaluator.check_size(f"evals.{name}", sizes[evaluator.split])
    return {(name, split): size for split, size in sizes.items()}


class Suite:
    """Runs evaluators of experiment.evals by name, in the order of the config.

    corpus  (changes of the `data` section) -> the corpus
    judge   params -> (experiment, params) of the judge of samples; None: no judge
    run_of  reads other models

    The attribute `rewarded` is that of the experiment, with the models of its reward loaded.
    `failures` are those during training.
    """

    def __init__(
        self,
        experiment: Experiment,
        workdir: Place,
        corpus: Callable[[Mapping[str, Any]], Corpus],
        judge: Judge | None = None,
        run_of: RunOf | None = None,
    ):
        self._workdir = workdir
        self._corpus, self._judge, self._run_of = corpus, judge, run_of
        self._programs: dict[Any, Any] = {}
        self.failures = Failures()
        self.rewarded = experiment.rewarded
        if run_of is not None:
            if experiment.rewarded is not None:
                self.rewarded = experiment.rewarded.opened(run_of, self._programs)
            experiment = guides.opened(experiment, run_of, self._programs)
        self._experiment = experiment

    def due(self, step: int) -> list[str]:
        """Returns the names of the evaluators that run after this training step."""
        evals = self._experiment.evals.items()
        return [name for name, e in evals if e.every and step and step % e.every == 0]

    def final(self) -> list[str]:
        """Returns the names of the evaluators that run when training ends."""
        return [name for name, e in self._experiment.evals.items() if e.final]

    def sizes(self, names: Iterable[str]) -> dict[tuple[str, str], SplitSize]:
        """Tokenises the data of evaluators: {(name, split): size}.

        UserError if the data is too short or cannot be read, if a judge or labels are missing, or
        if guidance does not suit the samples.
        """
        found = {}
        for name in names:
            evaluator = self._experiment.evals[name]
            if hasattr(evaluator, "check_source"):
                evaluator.check_source(f"evals.{name}", self._run_of.is_causal)
            found |= sizes_of(name, evaluator, self._corpus)
            if hasattr(evaluator, "check_corpus"):
                evaluator.check_corpus(f"evals.{name}", self._corpus(evaluator.data))
            self._check_labels(name, evaluator)
            if hasattr(evaluator, "check_samples"):
                evaluator.check_samples(self._experiment, f"evals.{name}")
        return found

    def _check_labels(self, name: str, evaluator: Any) -> None:
        """Raises UserError for data without labels if the network always needs a class."""
        if not drawn_classes(self._experiment):
            return
        others = hasattr(evaluator, "opened")  # sets of texts, which have no labels
        if isinstance(evaluator, OnBatches):
            others = not self._corpus(evaluator.data).has_labels(evaluator.split)
        if not others:
            return
        said = f"evals.{name} reads data without labels, but"
        off = f"remove the evaluator, or set evals.{name}.every=0 and evals.{name}.final=False"
        if self._experiment.network.classifies:
            raise UserError(f"{said} a classifier is compared with them: {off}")
        raise UserError(
            f"{said} this network was trained with network.label_dropout=0 and predicts only "
            f"sequences of which it is given the class: {off}. Networks that are trained with "
            "network.label_dropout above 0, such as 0.1, need no class"
        )

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Sorts names of evaluators into the order in which they run."""
        return [name for name in self._experiment.evals if name in set(names)]

    def run(
        self,
        names: Iterable[str],
        params: Params,
        step: int,
        say: Callable[[str], None],
        forgive: Callable[[str, Exception], None] | None = None,
        earlier: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Runs evaluators and yields (name, result) for each; `say` prints text.

        If one fails, the others still run; then the error is raised, or one error for all of them:
        a UserError, unless one of them is a fault of the program.
        With several processes an error ends everything immediately: only one process may have
        failed, and the others would wait for it in a collective program. Work that the first
        process does alone, such as writing samples, may fail as in a single process: after each
        evaluator the others learn of it, and get an error too.

        forgive: called with (name, error) instead, if the error is no fault of the program
        earlier: results of other evaluators on these parameters
        """
        done = dict(earlier or {})
        failed: dict[str, Exception] = {}
        order = self.in_order(names)
        for number, name in enumerate(order, 1):
            context = Context(
                name=name,
                step=step,
                workdir=self._workdir,
                corpus=self._corpus,
                judge=self._judge,
                run_of=self._run_of,
                programs=self._programs,
                earlier=done,
                say=say,
            )
            result, error = self._result(name, params, context, forgive)
            if error is not None:
                if len(order) == 1:
                    raise error
                failed[name] = error
                if number < len(order):
                    say(f"failed, and {order[number]} is next: {failure_text(name, error)}")
            elif result is not None:
                done[name] = result
                yield name, result
        if failed:
            raise of_all(_joined(failed))

    def _result(
        self,
        name: str,
        params: Params,
        context: Context,
        forgive: Callable[[str, Exception], None] | None,
    ) -> tuple[dict[str, Any] | None, Exception | None]:
        """Runs an evaluator: (its result or None, an error that is not forgiven or None)."""
        result, failed = None, None
        try:
            result = self._experiment.evals[name].run(self._experiment, params, context)
        except Exception as error:
            name_sizes(error, functools.partial(_sizes, name, self._experiment))
            if jax.process_count() > 1 and not of_first_alone(error):
                raise
            if forgive is not None and cause(error) is not None:
                forgive(name, error)
            else:
                failed = error
        failed = agreed(failed, f"evals.{name}")
        if failed is None:
            stop_if_asked()
        return result, failed


def _sizes(name: str, experiment: Experiment) -> list[str]:
    """Returns the keys of an evaluator that determine its memory, with their values."""
    evaluator, found = experiment.evals[name], []
    if hasattr(evaluator, "length_of"):
        key, length = evaluator.length_of(experiment)
        found += [f"evals.{name}.{key}={length}"] if key else []
    if hasattr(evaluator, "batch_size"):
        size = evaluator.batch_size or experiment.train.batch_size
        found += [f"evals.{name}.batch_size={size}"] if size > 1 else []
    return found


def _joined(failed: Mapping[str, Exception]) -> Exception:
    """Returns one UserError with the name and the error of each evaluator.

    A fault of the program is returned unchanged, with this text as a note.
    """
    reasons = [failure_text(*item) for item in failed.items()]
    text = f"{len(reasons)} evaluators failed:\n" * (len(reasons) > 1) + "\n".join(reasons)
    for error in failed.values():
        if cause(error) is None:
            error.add_note(text)
            return error
    return UserError(text)


def failure_text(name: str, error: Exception) -> str:
    """Describes why an evaluator failed, after its name."""
    said = cause(error) or f"{type(error).__name__}: {error}"
    return said if said.startswith(f"evals.{name}") else f"evals.{name}: {said}"
