"""Command line: flags, assignments to config keys, and the command that repeats a run."""

import argparse
import difflib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import md4_jax
from md4_jax.config.load import unknown
from md4_jax.options.parts import words
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place

USAGE = (
    "python -m md4_jax [MODE [DIR]] [--config FILE] [--workdir DIR] [--mode MODE] "
    "[--config.KEY=VALUE]"
)
KEYS = (
    "Keys of the config are set by --config.SECTION.KEY=VALUE; configs/base.py lists them, and "
    "docs/use.md says what each mode does."
)
MODES = (
    "train", "eval", "sample", "serve", "bench", "plan", "prepare", "import", "audit", "ls", "sweep"
)  # fmt: skip
# The mode may be the first word. A second word is then --workdir, except for these modes.
SECOND = {"serve": "--from", "import": "--from"}
# Words for what --mode train does with an existing run.
RESUME = ("resume", "continue")
# Modes that need the directory of a run.
OF_A_RUN = ("eval", "sample")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Returns (flags, {'section.key': text}); UserError for an assignment without a value."""
    plain, assignments, rest = [], {}, list(arguments)
    if rest and rest[0] in MODES:
        more = [SECOND.get(rest[0], "--workdir")] if rest[1:] and rest[1][:1] != "-" else []
        rest = ["--mode", rest[0], *more, *rest[1:]]
    elif rest and re.fullmatch(r"[a-z_]+", rest[0]):
        raise _unknown_mode("mode", rest[0])
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--config."):
            plain.append(argument)
            continue
        key, equals, value = argument.removeprefix("--config.").partition("=")
        if not equals:
            if not rest:
                raise UserError(f"{argument} needs a value: {argument}=VALUE")
            value = rest.pop(0)
        assignments[key] = value
    parser = _parser()
    flags, others = parser.parse_known_args(plain)
    if others:
        _refuse(parser, flags, others)
    if flags.mode not in MODES:
        raise _unknown_mode("--mode", flags.mode)
    for name in ("config", "workdir", "distributed", "host"):
        # An empty path would mean the current directory, no address a process of its own, and no
        # host all networks of this machine.
        if getattr(flags, name) == "":
            raise UserError(
                f"--{name} is empty, perhaps because a shell variable is not set: give a value, "
                f"or leave --{name} out"
            )
    _check_mode(flags, assignments)
    _check_source(flags)
    flags.evals, flags.trust = _distinct(flags.evals), _distinct(flags.trust)
    assignments |= {"plan.topology": flags.topology} if flags.topology else {}
    return flags, assignments


def _unknown_mode(what: str, name: str) -> UserError:
    if name in RESUME:
        return UserError(f"unknown {what} {name!r}: to resume a run give --workdir DIR alone")
    return unknown(what, name, list(MODES))


def _check_mode(flags: argparse.Namespace, assignments: Mapping[str, str]) -> None:
    """Raises UserError for a flag that the mode does not accept, or a required one missing."""
    for name, mode in (("evals", "eval"), ("topology", "plan")):
        if getattr(flags, name) and flags.mode != mode:
            given = f"--{name}={getattr(flags, name)}"
            raise UserError(f"{given} is for --mode {mode}, not --mode {flags.mode}")
    if (flags.workdir or "").startswith("hf:"):
        raise UserError(
            f"--workdir={flags.workdir} must be a folder: md4_jax import {flags.workdir} "
            f"--workdir DIR makes a run of the published model, and md4_jax serve {flags.workdir} "
            "serves it on a web page"
        )
    if flags.mode == "ls" and (flags.config or assignments):
        given = f"--config={flags.config}" if flags.config else f"--config.{min(assignments)}"
        raise UserError(f"{given} is not for --mode ls, which lists the runs in --workdir")
    if flags.back and (flags.mode != "train" or not flags.workdir):
        raise UserError(f"--back={flags.back} is for --mode train and needs --workdir")
    if flags.back not in ("", "best") and not flags.back.isdecimal():
        raise UserError(f"--back must be a step or best, not {flags.back!r}")
    if bool(flags.vary) != (flags.mode == "sweep"):
        raise UserError("--mode sweep and --vary SECTION.KEY=VALUE,VALUE,... need each other")
    for key in (axis.partition("=")[0] for axis in flags.vary):
        if key in assignments:
            raise UserError(f"{key} is given by --vary and --config.{key}: leave one of them out")
    if flags.mode == "sweep" and not (flags.config and flags.workdir):
        raise UserError("--mode sweep needs --config FILE, and --workdir DIR for its runs")


def _distinct(text: str) -> tuple[str, ...]:
    """Splits 'a, b, a' into ('a', 'b'), without repetitions."""
    return tuple(dict.fromkeys(words(text)))


def _check_source(flags: argparse.Namespace) -> None:
    """Raises UserError if --from is missing, or given to a mode that does not accept it."""
    if flags.adapters and not (flags.source and flags.mode in ("import", "serve")):
        raise UserError(
            f"--adapters={flags.adapters} is for --mode import and --mode serve, and needs --from "
            "FOLDER, the published model to which the adapters belong"
        )
    if flags.mode == "serve":
        if bool(flags.source) == bool(flags.workdir) or flags.config or flags.distributed:
            raise UserError(
                "--mode serve needs either --workdir RUN or --from FOLDER (or --from "
                "hf:USER/NAME), without --config and --distributed"
            )
        return
    if bool(flags.source) != (flags.mode == "import"):
        raise UserError("--mode import and --from FOLDER (or --from hf:USER/NAME) need each other")
    if flags.source and (flags.config or not flags.workdir):
        raise UserError(
            "--mode import makes the config itself and writes a run: leave out --config and give "
            "--workdir"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("md4_jax", usage=USAGE, epilog=KEYS, allow_abbrev=False)
    parser.add_argument(
        "--config",
        help="config file: configs/owt.py, its name owt, or families.py:md4; default: the config "
        "of the run in --workdir",
    )
    parser.add_argument("--workdir", help="directory of the run; default: a new one in runs/")
    parser.add_argument(
        "--distributed", help="several processes: auto, or HOST:PORT,PROCESSES,INDEX"
    )
    parser.add_argument("--evals", default="", help="evaluators for --mode eval: a,b")
    parser.add_argument(
        "--trust", default="", help="packages that the config in --workdir may import: a,b"
    )
    parser.add_argument(
        "--from", dest="source", default="",
        help="model for --mode import and serve: a folder, hf:USER/NAME",
    )  # fmt: skip
    parser.add_argument(
        "--adapters", default="",
        help="LoRA adapters in PEFT's layout for the published model of --from: a folder, "
        "hf:USER/NAME",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address for --mode serve")
    parser.add_argument("--port", default=8000, type=int, help="port for --mode serve; 0: any")
    parser.add_argument(
        "--back", default="", help="return to a checkpoint: a step, or best; later ones are kept"
    )
    parser.add_argument(
        "--vary", action="append", default=[], help="for --mode sweep: SECTION.KEY=V1,V2,..."
    )
    parser.add_argument("--version", action="version", version=f"md4_jax {md4_jax.__version__}")
    parser.add_argument("--topology", help="devices for --mode plan: v5e:16x16, h100:8, cpu:8")
    parser.add_argument(
        "--mode",
        default="train",
        help="train (default), eval, sample; bench: time the parts; plan: compile for a pod; "
        "prepare: download and tokenise data; import: make a run from another project's "
        "checkpoint; audit: check that a loss is a bound; serve: a web page for samples; ls: list "
        "runs; sweep: train with several values",
    )
    return parser


def _refuse(parser: argparse.ArgumentParser, given: argparse.Namespace, others: list[str]) -> None:
    """Raises UserError for the first unknown argument, with a suggestion."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for argument in others:
        name, equals, value = argument.partition("=")
        key = re.sub("^-*", "", name)
        if name in MODES:
            raise UserError(
                f"unknown argument {name}: the mode must be the first argument, or be given as "
                f"--mode {name}"
            )
        if Path(name).suffix == ".py":
            raise UserError(f"unknown argument {name}: did you mean --config {name}?")
        if near := difflib.get_close_matches(name, flags, n=1, cutoff=0.75):
            raise UserError(f"unknown flag {name}: did you mean {near[0]}?")
        if re.match(r"\w+\.\w", key) and (name.startswith("-") or equals):
            first, _, rest = key.partition(".")
            key = rest if difflib.get_close_matches(first, ["config"], cutoff=0.75) else key
            meant = f"--config.{key}{equals}{value}"
            raise UserError(f"unknown flag {argument}: did you mean {meant}?")
    place, is_flag = others[0], any(argument[:1] == "-" for argument in others)
    if not (is_flag or given.workdir or given.source):
        raise UserError(f"unknown argument {place}: {_with_mode(place, given.config)}")
    parser.error(
        f"unknown arguments: {' '.join(others)}; keys are set by --config.SECTION.KEY=VALUE"
    )


def _with_mode(place: str, config: str | None) -> str:
    """Describes how to give a run, or a published model, to a mode."""
    if config:
        return f"to name the directory of a run type --workdir {place}"
    if place.startswith("hf:"):
        return (
            f"the mode must be the first argument: type md4_jax serve {place}, or md4_jax import "
            f"{place} --workdir DIR"
        )
    modes = "train, eval, bench, plan, prepare, audit and serve"
    return (
        "the mode must be the first argument. To draw samples from the run in that directory "
        f"type md4_jax sample {place}. Other modes for a directory are {modes}"
    )


def again(
    flags: argparse.Namespace, workdir: Place, assignments: Mapping[str, str], mode: str = ""
) -> str:
    """Returns the command line that repeats this one, or that runs `mode` instead."""
    mode = mode or flags.mode
    said = [f"--config={flags.config}"] if flags.config else []
    said += [f"--mode={mode}"]
    said += [f"--from={flags.source}"] if flags.source else []
    said += [f"--evals={','.join(flags.evals)}"] if flags.evals else []
    said += [f"--trust={','.join(flags.trust)}"] if flags.trust else []
    said += [f"--distributed={flags.distributed}"] if flags.distributed else []
    writes = mode in ("train", *OF_A_RUN)
    said += [f"--workdir={workdir}"] if writes or not flags.config else []
    said += [f"--config.{key}={value}" for key, value in assignments.items()]
    return "python -m md4_jax " + shlex.join(said)
