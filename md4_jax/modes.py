"""What each --mode does, from a checked config to the last line printed."""

import errno
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from md4_jax import corpus
from md4_jax.config import build, inputs, runs
from md4_jax.config import load as config
from md4_jax.data import ngrams
from md4_jax.evals import report as eval_report
from md4_jax.evals.likelihood import Evaluator
from md4_jax.experiment import Experiment, sample_window, templates
from md4_jax.generate import writers
from md4_jax.generate.writers import write_samples
from md4_jax.perf import aot as plans
from md4_jax.perf.bench import RandomTokens, bench, table
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.commit import commit
from md4_jax.runtime.compiling import keep_programs
from md4_jax.runtime.paths import Place, check_name, check_writable, place
from md4_jax.samplers.batches import draw_samples, make_sampler
from md4_jax.training import report
from md4_jax.training.loop import abstract_state, train

# n-gram models count in memory; text beyond this many tokens is not looked at.
NGRAM_TOKENS = 20_000_000


def train_mode(asked: dict[str, Any], workdir: Place, command: str) -> int:
    """Trains (or resumes), evaluates, samples and draws the loss curve; returns the exit code."""
    check_name(workdir)
    kept = config.stored(workdir)
    if kept is not None:
        config.check_same(kept, asked, workdir)
    experiment, source = _experiment(asked, workdir)
    sizes = corpus.data_sizes(experiment, source)
    # Refuse what will not do before anything is written.
    abstract_state(experiment)
    runs.judge_of(experiment)
    begin = runs.beginning(experiment, workdir, _say)
    if jax.process_index() == 0:
        _open_workdir(experiment, asked, workdir)
    for warning in source.warnings:
        _say(f"warning: {warning}")
    for split, size in sizes.items():
        _say(f"data        {split}: {size.tokens:,} tokens, {size.sequences:,} whole sequences")
    evaluator = build.evaluator(experiment)  # one for the whole run, so that it is compiled once
    step, signalled = train(experiment, source, workdir, evaluator, begin)
    if signalled is not None:
        name = signal.Signals(signalled).name
        _say(f"{name}: step {step} is saved in {workdir}. To resume:\n  {command}")
        return 128 + signalled
    result, levels = _evaluate(experiment, source, workdir, evaluator)
    _sample(experiment, workdir)
    if jax.process_index() == 0:
        report.keep(workdir, result)
        picture = report.picture(workdir, levels)
        _say(
            f"\ntrained to step {step}; {experiment.eval.split}: {eval_report.line(result)}\n"
            f"  loss curve    {picture}\n"
            f"  samples       {workdir / 'samples'}\n"
            f"  metrics       {workdir / report.METRICS} (and TensorBoard: {workdir})\n"
            f"  checkpoints   {workdir / 'checkpoints'}"
        )
    return 0


def eval_mode(asked: dict[str, Any], workdir: Place, command: str) -> int:
    """Prints the bound of the whole split as the last line, in JSON."""
    del command
    experiment, source = _experiment(_same(asked, workdir), workdir)
    result, _ = _evaluate(experiment, source, workdir, build.evaluator(experiment))
    _say(report.as_json(result))
    return 0


def sample_mode(asked: dict[str, Any], workdir: Place, command: str) -> int:
    """Writes and prints samples of the newest checkpoint."""
    del command
    asked = _same(asked, workdir)
    tokenizer = corpus.stored_tokenizer(workdir)
    _sample(build.experiment(asked, tokenizer), workdir)
    return 0


def plan_mode(asked: dict[str, Any], workdir: Place, command: str) -> int:
    """Compiles for a topology and prints bytes, FLOPs and collectives of a chip, last in JSON."""
    del workdir
    devices = plans.devices_of(asked["plan"]["topology"])
    size = asked["plan"]["random_tokens"]
    tokenizer = RandomTokens(size) if size else inputs.tokenizer_and_source(asked, None)[0]
    experiment = build.experiment(asked, tokenizer, devices)
    made = plans.plan(experiment)
    chip = plans.CHIPS.get(devices[0].device_kind)
    _say(f"{command}\n{plans.table(made, chip)}")
    facts = {"commit": commit(), "devices": len(devices), "kind": devices[0].device_kind}
    facts |= plans.sizes(experiment)
    _say(report.as_json({**facts, **{name: p._asdict() for name, p in made.items()}}))
    if chip is not None:
        plans.check_fits(made, chip, experiment)
    return 0


def bench_mode(asked: dict[str, Any], workdir: Place, command: str) -> int:
    """Prints a table of times and, as the last line, the numbers in JSON; writes nothing."""
    del workdir
    size = asked["bench"]["random_tokens"]
    if size:
        experiment, source = build.experiment(asked, RandomTokens(size)), None
    else:
        experiment, source = _experiment(asked, None)
    result = bench(experiment, source)
    _say(f"{command}\n{table(result)}")
    _say(report.as_json({"commit": commit(), **result}))
    return 0


MODES = {
    "train": train_mode,
    "eval": eval_mode,
    "sample": sample_mode,
    "bench": bench_mode,
    "plan": plan_mode,
}
# Those that need the directory of a run.
OF_A_RUN = ("eval", "sample")


def run(mode: str, asked: dict[str, Any], workdir: Place, command: str) -> int:
    """Runs a mode and returns the exit code; UserError too where a disk is full."""
    if mode in ("train", *OF_A_RUN):  # the others time the compiler
        keep_programs()
    try:
        return MODES[mode](asked, workdir, command)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{error.strerror} while writing to {workdir}: free some, then start the same "
            "command again, which resumes from the last whole checkpoint"
        ) from error


def _open_workdir(experiment: Experiment, asked: dict[str, Any], workdir: Place) -> None:
    """Makes the directory of the run and what describes it; UserError if that is not possible."""
    check_writable(workdir)
    config.store(workdir, asked)
    corpus.keep_tokenizer(experiment.tokenizer, workdir)


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def _same(asked: dict[str, Any], workdir: Place) -> dict[str, Any]:
    """The config, if it is that of the run; UserError if there is no run or it differs."""
    kept = config.stored(workdir)
    if kept is None:
        raise UserError(f"{workdir} holds no run: train one first with --workdir {workdir}")
    config.check_same(kept, asked, workdir)
    return asked


def _experiment(asked: dict[str, Any], workdir: Place | None) -> tuple[Experiment, Any]:
    tokenizer, source = inputs.tokenizer_and_source(asked, workdir)
    return build.experiment(asked, tokenizer), source


def _evaluate(
    experiment: Experiment, source, workdir: Place, evaluator: Evaluator
) -> tuple[dict[str, Any], list[float]]:
    """The held-out bound (printed, and beside it n-gram models) and those models' levels."""
    step, params = runs.averaged(experiment, workdir)
    _say(f"\nevaluating step {step} on the whole {experiment.eval.split} split ...")
    result = evaluator(params, corpus.eval_batches(experiment, source, experiment.eval.split))
    result = {"step": step, "split": experiment.eval.split, **result}
    _say(eval_report.line(result))
    told = eval_report.learned(params["process"], experiment.tokenizer)
    if told:
        _say(told)
    levels: list[float] = []
    if experiment.eval.ngram_order and jax.process_index() == 0:
        levels = ngrams.ladder(
            corpus.stream(source, experiment.tokenizer, "train")[:NGRAM_TOKENS],
            corpus.stream(source, experiment.tokenizer, experiment.eval.split)[:NGRAM_TOKENS],
            experiment.tokenizer.vocab_size,
            experiment.eval.ngram_order,
        )
        _say(eval_report.ladder(levels, result))
    return result, levels


def _sample(experiment: Experiment, workdir: Place) -> None:
    """Writes and prints samples, then their numbers as a line of JSON."""
    step, params = runs.averaged(experiment, workdir)
    judge = _judge(experiment, params)
    prompts, window = templates(experiment), sample_window(experiment)
    sampler = make_sampler(
        experiment.network,
        experiment.loop,
        experiment.grid,
        experiment.mesh,
        trace=experiment.sample.trace,
    )
    drawn = draw_samples(
        sampler,
        params,
        experiment.sampler_step,
        experiment.sample,
        prompts,
        window=window,
    )
    judged = judge(drawn.tokens)
    if jax.process_index() != 0:
        return
    rows = [row[:end] for row, end in zip(drawn.tokens, drawn.lengths, strict=True)]
    texts = [experiment.tokenizer.decode(row) for row in rows]
    path = write_samples(workdir / "samples", step, texts, drawn, {"seed": experiment.sample.seed})
    _say("\n" + path.read_text(encoding="utf-8"))
    if drawn.frames is not None:
        for picture in writers.trace(path, drawn, experiment, params):
            _say(f"trace: {picture}")
    least, most = drawn.lengths.min(), drawn.lengths.max()
    size = f"{most}" if least == most else f"{least} to {most}"
    _say(f"{len(texts)} samples of {size} tokens from step {step}: {path}")
    facts = {"sampler": experiment.config["sample"]["name"], "step": step}
    _say(report.as_json({**facts, **writers.of_samples(drawn), **judged}))


def _judge(experiment: Experiment, params: Params) -> Callable[[np.ndarray], dict[str, Any]]:
    """tokens -> the bound on -log p of them under sample.judge, whose parameters are read here."""
    judge = runs.judge_of(experiment)
    if judge is None:
        return lambda tokens: {}
    if judge is not experiment:
        _, params = runs.averaged(judge, place(experiment.sample.judge))

    def judged(tokens: np.ndarray) -> dict[str, Any]:
        result = build.evaluator(judge)(params, corpus.batches_of(judge, tokens))
        return {"judge": experiment.sample.judge, **{f"judge_{k}": v for k, v in result.items()}}

    return judged


def print_user_error(error: UserError) -> int:
    """Prints a user's mistake without a traceback; returns the exit code 2."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 2


def silence_libraries() -> None:
    """Silences libraries; what goes wrong with a run, the run says itself."""
    for name in ("absl", "asyncio"):  # Orbax logs pages of tracebacks and then raises besides
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # A read that fails leaves Orbax's other reads behind, which complain when they are collected.
    others = sys.unraisablehook

    def hook(event) -> None:
        text = str(event.exc_value)
        if "Event loop is closed" not in text and "TensorStore" not in text:
            others(event)

    sys.unraisablehook = hook
