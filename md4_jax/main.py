"""The front door: flags, overrides, and on to a mode."""

import argparse
import datetime
import shlex
import sys
from pathlib import Path

from md4_jax import modes
from md4_jax.config import schema as sections
from md4_jax.protocols import UserError
from md4_jax.runtime import distributed
from md4_jax.runtime.paths import place

USAGE = "python -m md4_jax.main [--config FILE] [--workdir DIR] [--mode MODE] [--config.KEY=VALUE]"


def parse(arguments: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """(flags, {'section.key': text}); UserError for an argument that is neither."""
    parser = argparse.ArgumentParser(prog="md4_jax", usage=USAGE, allow_abbrev=False)
    parser.add_argument(
        "--config", help="a file of configs/; default: that of the run in --workdir"
    )
    parser.add_argument("--workdir", help="directory of the run; made up and printed if not given")
    parser.add_argument("--distributed", default="", help="auto, or HOST:PORT,PROCESSES,INDEX")
    parser.add_argument("--topology", help="of --mode plan: v5e:16x16, cpu:8")
    parser.add_argument("--mode", default="train", choices=list(modes.MODES))
    plain, assignments, rest = [], {}, list(arguments)
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
    return parser.parse_args(plain), assignments


def run(arguments: list[str]) -> int:
    """Runs a mode and returns the exit code."""
    flags, assignments = parse(arguments)
    distributed.start(flags.distributed)
    assignments |= {"plan.topology": flags.topology} if flags.topology else {}
    workdir = None if flags.workdir is None else place(flags.workdir)
    asked = sections.load_config(flags.config, assignments, workdir)
    if workdir is None:
        if flags.mode in modes.OF_A_RUN or flags.distributed:
            what = "--distributed" if flags.distributed else f"--mode {flags.mode}"
            raise UserError(f"{what} needs the --workdir of a run")
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        workdir = place(f"runs/{Path(flags.config.replace('.py:', '_')).stem}-{now}")
    words = [f"--config={flags.config}"] * bool(flags.config) + [f"--mode={flags.mode}"]
    words += [f"--distributed={flags.distributed}"] if flags.distributed else []
    if flags.mode in ("train", *modes.OF_A_RUN) or not flags.config:
        words.append(f"--workdir={workdir}")
    words += [f"--config.{key}={value}" for key, value in assignments.items()]
    command = "python -m md4_jax.main " + shlex.join(words)
    return modes.run(flags.mode, asked, workdir, command)


def main() -> None:
    modes.silence_libraries()
    try:
        code = run(sys.argv[1:])
    except UserError as error:
        code = modes.print_user_error(error)
    except KeyboardInterrupt:  # outside of the training loop, which has its own way
        print("interrupted; the same command goes on from what is saved", file=sys.stderr)
        code = 130
    except Exception as error:
        code = distributed.fault(error)
    distributed.leave(code)


if __name__ == "__main__":
    main()
