"""Entry point: parses the command line, loads the config and runs a mode."""

import datetime
import logging
import sys
from pathlib import Path

from md4_jax import modes
from md4_jax.config import command, foreign, schema
from md4_jax.protocols import UserError
from md4_jax.runtime import distributed
from md4_jax.runtime.paths import place


def run(arguments: list[str]) -> int:
    """Runs the mode that the arguments ask for and returns the exit code."""
    flags, assignments = command.parse(arguments)
    distributed.start(flags.distributed)
    workdir = None if flags.workdir is None else place(flags.workdir)
    foreign.allow(flags.trust)
    config = schema.load_config(flags.config, assignments, workdir)
    if workdir is None:
        if flags.mode in command.OF_A_RUN or flags.distributed:
            what = "--distributed" if flags.distributed else f"--mode {flags.mode}"
            raise UserError(f"{what} needs the --workdir of a run")
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        workdir = place(f"runs/{Path(flags.config.replace('.py:', '_')).stem}-{now}")
    again = command.again(flags, workdir, assignments)
    run = None if flags.config else workdir
    return modes.run(flags.mode, modes.Call(config, workdir, again, flags.evals, run))


def print_user_error(error: UserError) -> int:
    """Prints a UserError without a traceback; returns the exit code 2."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 2


def silence_libraries() -> None:
    """Silences the logs of libraries; this package reports its errors itself."""
    for name in ("absl", "asyncio"):  # Orbax logs tracebacks of what it also raises
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # After a failed read, Orbax's unfinished reads raise when they are garbage-collected.
    others = sys.unraisablehook

    def hook(event) -> None:
        text = str(event.exc_value)
        if "Event loop is closed" not in text and "TensorStore" not in text:
            others(event)

    sys.unraisablehook = hook


def main() -> None:
    silence_libraries()
    try:
        code = run(sys.argv[1:])
    except UserError as error:
        code = print_user_error(error)
    except KeyboardInterrupt:  # the training loop handles its own
        print("interrupted; the same command continues from the last checkpoint", file=sys.stderr)
        code = 130
    except Exception as error:
        code = distributed.fault(error)
    distributed.leave(code)


if __name__ == "__main__":
    main()
