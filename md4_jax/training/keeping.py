"""Rules for keeping checkpoints, and the choice of the best evaluated one."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from md4_jax.experiment import Experiment
from md4_jax.options import CheckpointOptions
from md4_jax.protocols import UserError


class Best(NamedTuple):
    """Checkpoint with the lowest evaluation: its step, the value and its standard error."""

    step: int
    value: float
    error: float


def surplus(steps: Sequence[int], options: CheckpointOptions, best: int | None) -> list[int]:
    """Returns those of the ascending steps that no option keeps.

    best: step of the best checkpoint, which is kept; None if there is none.
    """
    kept = {*steps[-options.keep :], best}
    if options.keep_every:
        kept |= {step for step in steps if step % options.keep_every == 0}
    return [step for step in steps if step not in kept]


def without_best(key: str, steps: list[int]) -> UserError:
    """Makes the error for `best` in a run without an evaluator for it; key: what names `best`."""
    return UserError(
        f"{key} best needs checkpoint.best, the name of the evaluator that decides which "
        "checkpoint is best, but this run has none: set --config.checkpoint.best=validation, "
        "also in training, so that the best checkpoint is kept. Or give one of the steps "
        f"{steps}, such as {key} {steps[-1]}"
    )


def check_best(experiment: Experiment) -> None:
    """Raises UserError if checkpoint.best is not an evaluator that can compare checkpoints."""
    name, evals = experiment.checkpoint.best, experiment.evals
    if not name:
        if experiment.eval.checkpoint == "best":
            raise UserError(
                "eval.checkpoint='best' needs checkpoint.best, the name of the evaluator that "
                "decides which checkpoint is best, such as 'validation'"
            )
        return
    if name not in evals:
        raise UserError(
            f"checkpoint.best={name!r} is not an evaluator of the section evals, which has "
            f"{', '.join(sorted(evals))}"
        )
    if not getattr(evals[name], "main_figure", ""):
        kind = experiment.config["evals"][name]["name"]
        raise UserError(
            f"checkpoint.best={name!r} needs an evaluator with a number to compare checkpoints by, "
            f"such as a likelihood; evals.{name}.name={kind!r} has none"
        )
    if not evals[name].every:
        raise UserError(
            f"checkpoint.best={name!r} compares evaluations during training, but "
            f"evals.{name}.every=0: set evals.{name}.every to a number of steps"
        )


def figure_of(experiment: Experiment) -> str:
    """Returns the name of the metric in metrics.jsonl that compares checkpoints, '' for none."""
    name = experiment.checkpoint.best
    return f"{name}/{experiment.evals[name].main_figure}" if name else ""


def best_of(rows: Iterable[Mapping[str, Any]], figure: str, steps: Container[int]) -> Best | None:
    """Returns the checkpoint with the lowest figure, the first of equal ones; None if none.

    rows: rows of metrics.jsonl. steps: existing checkpoints. Figures that are not finite are
    ignored.
    """
    found = [
        Best(row["step"], row[figure], float(row.get(f"{figure}_se", math.nan)))
        for row in rows
        if row["step"] in steps and _is_finite(row.get(figure))
    ]
    return min(found, key=lambda one: (one.value, one.step), default=None)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
