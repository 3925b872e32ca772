"""End of a training run: its final evaluators, without those whose results it has recorded."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from md4_jax.config import runs
from md4_jax.config.unused import OF_DATA
from md4_jax.evals import report as eval_report
from md4_jax.evals.suite import Suite
from md4_jax.experiment import Experiment
from md4_jax.protocols import Params
from md4_jax.runtime.distributed import is_first
from md4_jax.runtime.paths import Place, exists, place
from md4_jax.runtime.sharding import max_over_processes
from md4_jax.training import report

Row = dict[str, Any]
FILES = ("texts", "picture")  # keys of a result that name a file
WHEN = ("every", "final")  # keys of an evaluator that do not change its result


def evaluated_at_end(
    experiment: Experiment, suite: Suite, workdir: Place, again: str, say: Callable[[str], None]
) -> None:
    """Runs the final evaluators; prints a summary even if one of them fails.

    Evaluators whose results are recorded for the same checkpoint and the same settings do not run.
    again: command that runs evaluators, without their names
    """
    step, params, host = runs.averaged_and_host(experiment, workdir)
    marks = {name: _mark(experiment, name, host) for name in suite.final()}
    results = _recorded(workdir, step, marks)
    if results:
        say(_said(results, step, workdir, again))

    def keep(row: Row) -> None:
        row_of_run = row | {"settings": marks[row["eval"]]}
        report.keep(workdir, row_of_run, experiment.checkpoint.retries)
        results[row["eval"]] = row

    missing = [name for name in marks if name not in results]
    before = {name: row for name, row in results.items() if row}
    try:
        if missing:
            evaluated(experiment, suite, missing, (step, params), keep, say, before)
    finally:
        best = runs.best_line(experiment, workdir) + suite.failures.lines(workdir)
        if is_first():
            in_order = {name: results[name] for name in marks if name in results}
            say(report.summary(experiment, workdir, step, in_order) + best)


def evaluated(
    experiment: Experiment,
    suite: Suite,
    names: Iterable[str],
    averaged: tuple[int, Params],
    keep: Callable[[Row], None],
    say: Callable[[str], None],
    earlier: Mapping[str, Row] | None = None,
) -> None:
    """Evaluates the parameters of a step and prints the results.

    keep     called with each result, with its name as `eval` and the step, before the next
             evaluator runs
    earlier  results of other evaluators on these parameters, by name
    """
    step, params = averaged
    say(f"\nevaluating step {step}: {', '.join(suite.in_order(names))} ...")
    lines = eval_report.learned(params["process"], experiment.domain)
    if lines:
        say(lines)
    for name, result in suite.run(names, params, step, say, earlier=earlier):
        keep({"eval": name, "step": step, **result})


def _mark(experiment: Experiment, name: str, host: Mapping[str, Any]) -> str:
    """Returns a hash of what may change the result of an evaluator while a run keeps its data.

    These are its section, the section `sample` if it draws samples, and the seconds of training of
    the checkpoint, which are others whenever a step is trained again.
    """
    section = experiment.config["evals"][name]
    own = {key: value for key, value in section.items() if key not in WHEN}
    sample = {} if section["name"] in OF_DATA else experiment.config["sample"]
    told = json.dumps([own, sample, host.get("elapsed", 0.0)], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def _recorded(workdir: Place, step: int, marks: Mapping[str, str]) -> dict[str, Row]:
    """Returns the recorded results of a step by evaluator, the newest of each.

    A result is left out if its settings were others, or if a file that it names is gone. Files are
    looked for in the run directory first, which may have been moved or copied.
    """
    rows = report.kept(workdir) if is_first() else []
    found = {}
    for row in rows:
        is_same = row.get("settings") == marks.get(row["eval"], "") and row.get("step") == step
        files = {key: _moved(place(row[key]), workdir) for key in FILES if key in row}
        if is_same and all(map(exists, files.values())):
            # JSON has no nan.
            plain = {k: math.nan if v is None else v for k, v in row.items()}
            found[row["eval"]] = plain | {key: str(file) for key, file in files.items()}
    # Only the first process is sure to see the file.
    there = {name: max_over_processes(int(name in found)) for name in marks}
    return {name: found.get(name, {}) for name, is_there in there.items() if is_there}


def _moved(file: Place, workdir: Place) -> Place:
    """Returns the file of this name among the samples of a run; `file` if there is none."""
    own = workdir / "samples" / file.name
    return own if exists(own) else file


def _said(results: Mapping[str, Row], step: int, workdir: Place, again: str) -> str:
    """Describes the recorded results, and how to compute them again."""
    others = [
        f"  {row['eval']}: {report.as_json({k: v for k, v in row.items() if k != 'settings'})}"
        for row in results.values()
        if row and "bits_per_token" not in row  # the summary has the likelihoods
    ]
    return "\n".join(
        [
            f"\nstep {step} was evaluated before, with the same settings: {', '.join(results)}, "
            f"in {workdir / report.EVALUATIONS}",
            *others,
            f"to evaluate it again: {again} --evals {','.join(results)}",
        ]
    )
