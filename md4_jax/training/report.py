"""Reports of a run: a description before training, and a summary with a plot after it."""

import json
import math
from collections.abc import Callable
from typing import Any

import jax

import md4_jax
from md4_jax.data import units
from md4_jax.evals import report as evaluations
from md4_jax.evals.ngrams import levels
from md4_jax.experiment import Experiment
from md4_jax.generate import figures
from md4_jax.options.parts import words
from md4_jax.protocols.phrases import amount
from md4_jax.runtime import sharding
from md4_jax.runtime.commit import commit
from md4_jax.runtime.paths import Place, append
from md4_jax.runtime.retries import patiently
from md4_jax.training.microbatches import resolved
from md4_jax.training.writers import objects, read_rows

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"


def start(experiment: Any, state: Any, workdir: Place, step: int) -> str:
    """Describes parameter count, mesh, batch, memory and directory, before the first step."""
    params, leaves = state.whole, jax.tree.leaves(state)
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves) / 2**20
    network = experiment.network.size(params["network"])
    learned = sum(math.prod(x.shape) for x in jax.tree.leaves(params["process"]))
    beside = sum(math.prod(x.shape) for x in jax.tree.leaves(state.ema.get("companion", ())))
    trained = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
    devices = experiment.mesh.devices
    axes = ", ".join(f"{axis}={size}" for axis, size in experiment.mesh.shape.items())
    train = resolved(experiment)
    batch = units.batch_size(experiment.domain.unit, train.batch_size, experiment.data.length)
    lines = [
        f"md4_jax {md4_jax.__version__} ({commit()[:12]}), jax {jax.__version__}",
        f"parameters  {network:,} in the network, {learned} in the process"
        + (f"; {trained:,} of them are trained" if state.frozen else "")
        + (f", {beside:,} in its tables" if beside else ""),
        f"mesh        {axes} ({devices.size} of {jax.device_count()} "
        f"{devices.flat[0].platform} devices, {amount(jax.process_count(), 'process')})",
        f"batch       {batch}, {amount(train.microbatches, 'microbatch')}, "
        f"{amount(train.num_steps, 'step')}",
        f"memory      {held:,.1f} MiB on a device: parameters, optimizer"
        f"{', teacher' if state.teacher else ''}"
        f"{', the model that drew' if state.behaviour else ''} and moving average, "
        "without the activations and temporaries of a step (--mode plan counts them)",
        f"workdir     {workdir}",
    ]
    if devices.size > 1:
        lines += ["parameters on a device:", sharding.table(params, experiment.mesh)]
    if step:
        lines.append(f"resuming from step {step}")
    return "\n".join(lines)


def picture(workdir: Place, levels: list[float], unit: str) -> str:
    """Draws figures/loss.png from metrics.jsonl; returns its path, or the reason for failure."""
    path, log = workdir / "figures" / "loss.png", workdir / METRICS
    if not log.exists():
        return "none: nothing was logged, because there were fewer steps than log.every"
    try:
        figures.loss_curve(read_rows(log), path, levels, unit=unit)
    except OSError as error:  # the results of the run are more important
        return f"none: {path} could not be written: {error.strerror or error}"
    return str(path)


def early(experiment: Experiment, step: int, workdir: Place, one_budget: bool) -> str:
    """Explains why a run ended early and how to resume it; one_budget: see `train`."""
    after = "repeat the command to continue"
    if one_budget:
        after = f"to continue: md4_jax train {workdir}"
    if experiment.learning_rate.follows_seconds:
        after = "the learning rate has reached its end too (optim.clock='seconds')"
    train = experiment.train
    return (
        f"stopped at step {step} of {train.num_steps}: the budget of train.seconds="
        f"{train.seconds:g} is spent; {after}"
    )


def summary(experiment: Experiment, workdir: Place, step: int, results: dict[str, dict]) -> str:
    """Describes the results and the files that there are of a run, and draws the loss."""
    found = next(filter(None, map(levels, results.values())), [])
    bounds = [
        f"; {evaluations.label(name, result['split'])}: {evaluations.line(result)}"
        for name, result in results.items()
        if "bits_per_token" in result
    ]
    events = f" (and TensorBoard: {workdir})" * ("tensorboard" in words(experiment.log.trackers))
    files = {"samples": "samples", "metrics": METRICS, "checkpoints": "checkpoints"}
    kept = [
        f"  {label:13} {workdir / name}{events if name == METRICS else ''}"
        for label, name in files.items()
        if (workdir / name).exists()  # an interrupted evaluation has drawn no samples
    ]
    curve = picture(workdir, found, experiment.domain.unit)
    return "\n".join(
        [f"\ntrained to step {step}{''.join(bounds)}", f"  loss curve    {curve}", *kept]
    )


def lines(rows: list[dict[str, Any]], *, is_named: bool) -> list[str]:
    """Returns results as lines of JSON, likelihoods last; is_named: whether to include `eval`."""
    return [
        as_json({key: value for key, value in row.items() if is_named or key != "eval"})
        for row in sorted(rows, key=lambda row: "bits_per_token" in row)
    ]


def keep(workdir: Place, result: dict[str, Any], retries: int = 0) -> None:
    """Appends a result, with the commit, to evaluations.jsonl, in the first process only."""
    if jax.process_index():
        return
    line = as_json({**result, "commit": commit()}) + "\n"
    patiently(lambda: append(workdir / EVALUATIONS, line), retries)


def keep_also(
    workdir: Place, result: dict[str, Any], command: str, say: Callable[[str], None]
) -> None:
    """Appends a result of --mode eval with its command; prints a warning if writing fails."""
    try:
        keep(workdir, {**result, "command": command})
    except OSError as error:
        say(f"warning: the result was not saved in {workdir}: {error.strerror or error}")


def kept(workdir: Place) -> list[dict[str, Any]]:
    """Returns the results of evaluations.jsonl in order; [] if there is no such file.

    Skips lines that are not results, such as a last line truncated by a crash.
    """
    path = workdir / EVALUATIONS
    return [row for row in objects(path) if "eval" in row] if path.exists() else []


def as_json(numbers: dict[str, Any]) -> str:
    """Formats one line of JSON; numbers that are not finite become null."""
    return json.dumps(evaluations.finite(numbers))
