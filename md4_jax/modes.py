"""Modes of the command line: train, eval, sample, plan, bench, prepare and audit."""

import contextlib
import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from md4_jax.config import audits, beginnings, build, foreign, inputs, judging, runs, unused
from md4_jax.config import load as config
from md4_jax.config.command import OF_A_RUN
from md4_jax.config.ending import evaluated, evaluated_at_end
from md4_jax.config.evaluators import readers, sizes_of_all, unknown_evaluator, with_kinds
from md4_jax.config.schema import options_from
from md4_jax.config.starting import checked, experiment_of, planned
from md4_jax.data import units
from md4_jax.data.domains import keep_domain, stored_domain
from md4_jax.data.mixtures import Corpus, corpus_of
from md4_jax.evals.samples import DrawnSamples
from md4_jax.evals.suite import Suite, sizes_of
from md4_jax.experiment import Experiment
from md4_jax.options.data import DataOptions
from md4_jax.perf import aot as plans
from md4_jax.perf import chips
from md4_jax.perf.bench import bench
from md4_jax.perf.bench_table import table
from md4_jax.protocols import UserError
from md4_jax.runtime import devices, errors
from md4_jax.runtime.commit import commit
from md4_jax.runtime.compiling import keep_programs
from md4_jax.runtime.distributed import is_first
from md4_jax.runtime.locks import exclusive
from md4_jax.runtime.paths import Place, check_links, check_writable
from md4_jax.runtime.sharding import max_over_processes
from md4_jax.runtime.streams import printable
from md4_jax.training import back, report
from md4_jax.training.loop import train

# What to do with a run of somebody else.
ELSEWHERE = ". Copy the run to a directory of your own"


class Call(NamedTuple):
    """Arguments of a mode.

    config   the config, checked by `schema.load_config`
    workdir  directory of the run
    command  command line that repeats this one
    evals    names of evaluators; empty: the default of the mode
    run      directory of the run with this stored config; None if a config file was given
    back     checkpoint to return to, a step or "best"; "": the newest
    others   reads models that are not runs, for evaluators; None: not supported
    one_budget  whether train.seconds limits all calls on the run together, as in a sweep
    assigned  keys that the command line sets
    """

    config: dict[str, Any]
    workdir: Place
    command: str
    evals: tuple[str, ...] = ()
    run: Place | None = None
    back: str = ""
    others: judging.Foreign | None = None
    one_budget: bool = False
    assigned: tuple[str, ...] = ()


def train_mode(call: Call) -> int:
    """Trains (or resumes), evaluates and draws the loss curve; returns the exit code."""
    workdir = call.workdir
    experiment, corpus, kept = checked(call.config, workdir, call.back)
    suite = _suite(experiment, call, corpus)
    old, new = inputs.evaluators_by_age(kept, call.config)
    with inputs.as_before(kept, workdir):
        sizes = dict(corpus.sizes(["train"])) | _sizes(experiment, suite, old)
    sizes |= _sizes(experiment, suite, new)
    begin = beginnings.beginning(experiment, workdir, _say)
    with _open_workdir(experiment, call, workdir, kept):
        for warning in inputs.warnings(corpus):
            _say(f"warning: {warning}")
        for name, size in sizes.items():
            _say(f"data        {name}: {units.split_size(experiment.domain.unit, *size)}")
        step, signalled = train(experiment, corpus, workdir, suite, begin, call.one_budget)
        if signalled is not None:
            name = signal.Signals(signalled).name
            _say(f"{name}: step {step} is saved in {workdir}. To resume:\n  {call.command}")
            return 128 + signalled
        again = f"python -m md4_jax --mode eval --workdir {shlex.quote(str(workdir))}"
        evaluated_at_end(experiment, suite, workdir, again, _say)
    return 0


def eval_mode(call: Call) -> int:
    """Runs evaluators and prints their results, then each as a line of JSON, likelihoods last.

    Each result is stored immediately, and is printed as JSON even if a later evaluator fails.
    """
    kept = runs.config_of_run(call.workdir, call.config)
    asked = with_kinds(call.config, call.evals)
    experiment, corpus = experiment_of(asked, call.workdir)
    if config.moved(kept, call.config):
        runs.check_text(experiment, corpus, call.workdir)
    suite = _suite(experiment, call, corpus)
    names = call.evals or tuple(
        name for name in suite.final() if not isinstance(experiment.evals[name], DrawnSamples)
    )
    for name in names:
        if name not in experiment.evals:
            raise unknown_evaluator(name, list(experiment.evals))
    if not names:
        raise UserError(f"no evaluator is final: give --evals, of {', '.join(experiment.evals)}")
    unused.check("eval", kept, asked, call.assigned, names)
    sizes_of_all(suite, names)
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        report.keep_also(call.workdir, row, call.command, _say)

    try:
        averaged = runs.averaged(experiment, call.workdir)
        evaluated(experiment, suite, names, averaged, keep, _say)
    finally:
        for line in report.lines(rows, is_named=len(set(names)) > 1):
            _say(line)
    return 0


def sample_mode(call: Call) -> int:
    """Writes and prints samples from a checkpoint, then their statistics as JSON."""
    kept, asked = runs.config_of_run(call.workdir, call.config), call.config
    unused.check("sample", kept, asked, call.assigned)
    domain = stored_domain(call.workdir, asked["data"]["length"], foreign.load)
    experiment = build.experiment(asked, domain, workdir=call.workdir)
    experiment = experiment._replace(evals={**experiment.evals, "samples": DrawnSamples()})
    step, params = runs.averaged(experiment, call.workdir)
    if is_first():  # before hours of drawing
        remedy = f"{ELSEWHERE}, or draw samples in Python, which writes no files (docs/python.md)"
        check_writable(call.workdir / "samples", "", remedy)
    [(_, result)] = _suite(experiment, call).run(["samples"], params, step, _say)
    _say(report.as_json({"step": step, **result}))
    return 0


def plan_mode(call: Call) -> int:
    """Compiles for a topology; prints bytes, FLOPs and collectives per chip, then as JSON."""
    asked = call.config
    devices = chips.devices_of(asked["plan"]["topology"])
    experiment = planned(asked, call.run, devices, call.others)
    made = plans.plan(experiment)
    chip = chips.CHIPS.get(devices[0].device_kind)
    _say(f"{call.command}\n{plans.table(made, chip)}")
    facts = {"commit": commit(), "devices": len(devices), "kind": devices[0].device_kind}
    facts |= plans.sizes(experiment)
    _say(report.as_json({**facts, **{name: p._asdict() for name, p in made.items()}}))
    if chip is not None:
        plans.check_fits(made, chip, experiment)
    return 0


def bench_mode(call: Call) -> int:
    """Prints a table of times, then the same as a line of JSON; writes no file."""
    asked = call.config
    domain = inputs.random_tokens(asked, "bench")
    if domain:
        experiment, corpus = build.experiment(asked, domain), None
    else:
        experiment, corpus = experiment_of(asked, call.run)
        experiment = judging.with_guide(experiment, call.others)
    result = bench(experiment, corpus)
    _say(f"{call.command}\n{table(result)}")
    _say(report.as_json({"commit": commit(), **result}))
    return 0


def prepare_mode(call: Call) -> int:
    """Downloads and tokenises the data of a config; prints sizes, then the same as JSON."""
    asked = call.config
    domain, source = inputs.domain_and_source(asked, call.run)
    corpus = corpus_of(source, domain, options_from(DataOptions, asked["data"]))
    for warning in inputs.warnings(corpus):
        _say(f"warning: {warning}")
    changed, evals = inputs.corpora(asked, domain, corpus), readers(asked)
    sizes = {"train": corpus.sizes(["train"])["train"]}
    for name, evaluator in evals.items():
        sizes |= _labelled(evals, sizes_of(name, evaluator, changed))
    for name, size in sizes.items():
        _say(f"data        {name}: {units.split_size(domain.unit, *size)}")
    if corpus.shards():
        _say(f"shards      {corpus.shards()}")
    facts = {name: size._asdict() for name, size in sizes.items()}
    _say(report.as_json({"sizes": facts, **corpus.fingerprint()}))
    return 0


MODES = {
    "train": train_mode,
    "eval": eval_mode,
    "sample": sample_mode,
    "bench": bench_mode,
    "plan": plan_mode,
    "prepare": prepare_mode,
    "audit": lambda call: audits.run(call.config, _say),
}


def run(mode: str, call: Call) -> int:
    """Runs a mode and returns the exit code; UserError if a disk or the memory fails."""
    if mode in ("train", *OF_A_RUN):  # plan and bench measure compilation
        keep_programs()
    if mode not in ("plan", "prepare"):  # these need no device
        for line in devices.remarks(call.config["network"] if mode == "train" else {}):
            _say(line)
    with errors.said(call.workdir, resumes=mode == "train"):
        return MODES[mode](call)


@contextlib.contextmanager
def _open_workdir(
    experiment: Experiment, call: Call, workdir: Place, kept: Mapping[str, Any] | None
) -> Iterator[None]:
    """Locks the run directory, writes config and domain, and returns to the requested checkpoint.

    UserError if it is not writable, if another process uses it, or if it lost its checkpoints.

    kept: the config that the run has so far; None for a new run
    """
    with contextlib.ExitStack() as held:
        if is_first():
            check_links(workdir)
            check_writable(workdir, remedy=ELSEWHERE if kept else "")
            held.enter_context(exclusive(workdir, _say))
            runs.check_not_lost(workdir, kept)
        if call.back:
            runs.decide_back(experiment, workdir, call.back)
        if is_first():
            config.store(workdir, call.config)
            keep_domain(experiment.domain, workdir)
            back.finish(workdir, _say)
        if call.back:
            max_over_processes(0)  # other processes wait until the checkpoints are moved
        yield


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(printable(text), flush=True)


def _suite(experiment: Experiment, call: Call, corpus: Corpus | None = None) -> Suite:
    """Returns the evaluators, ready to run; UserError if sample.judge is not a run."""
    corpora = inputs.corpora(experiment.config, experiment.domain, corpus)
    judge, run_of = judging.judge_of(experiment), judging.Others(experiment, call.others)
    return Suite(experiment, call.workdir, corpora, judge, run_of)


def _sizes(experiment: Experiment, suite: Suite, among: Iterable[str]) -> dict[str, Any]:
    """Returns the sizes of the splits that these evaluators read, by the names to print."""
    names = [name for name in among if (e := experiment.evals[name]).every or e.final]
    return _labelled(experiment.evals, sizes_of_all(suite, names))


def _labelled(evals: Mapping[str, Any], sizes: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    return {
        f"{split} of evals.{name}" if evals[name].data else split: size
        for (name, split), size in sizes.items()
    }
