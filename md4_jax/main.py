"""Entry point: parses the command line, loads the config and runs a mode."""

import argparse
import datetime
import functools
import sys
from pathlib import Path
from typing import Any

from md4_jax import modes
from md4_jax.config import command, foreign, schema, starting, sweep
from md4_jax.config.load import flatten, is_place
from md4_jax.model import importing, judging, listing
from md4_jax.model.load import load
from md4_jax.protocols import UserError
from md4_jax.runtime import distributed, heap, streams
from md4_jax.runtime.commit import code
from md4_jax.runtime.paths import Place, place
from md4_jax.server import serving


def run(arguments: list[str]) -> int:
    """Runs the mode given by the arguments and returns the exit code."""
    flags, assignments = command.parse(arguments)
    if flags.distributed and flags.workdir is None and flags.mode != "ls":
        # Said before this process waits for the others.
        raise UserError("--distributed needs the --workdir of a run")
    distributed.start(flags.distributed)
    workdir = None if flags.workdir is None else place(flags.workdir)
    foreign.allow(flags.trust)
    if flags.mode == "serve":
        source = flags.source or flags.workdir
        read = functools.partial(load, source, assignments, adapters=flags.adapters)
        return serving.run(read, source, flags.host, flags.port)
    if flags.mode == "ls":
        print(listing.table(workdir or place("runs")))
        return 0
    if flags.mode == "sweep":
        return _sweep(flags, assignments, workdir)
    if flags.mode == "import":
        return importing.run(flags.source, assignments, workdir, flags.adapters)
    # With --back the mode checks the differences.
    config = schema.load_config(flags.config, assignments, workdir, may_differ=bool(flags.back))
    if workdir is None:
        if flags.mode in command.OF_A_RUN:
            raise UserError(f"--mode {flags.mode} needs the --workdir of a run")
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = Path(flags.config.replace(".py", "").replace(":", "_")).name
        workdir = place(f"runs/{name}-{now}")
    again = command.again(flags, workdir, assignments)
    run = None if flags.config else workdir
    distributed.check_alike(_facts(flags, config))
    call = modes.Call(config, workdir, again, flags.evals, run, flags.back, judging.FOREIGN)
    return modes.run(flags.mode, call._replace(assigned=tuple(assignments)))


def _sweep(flags: argparse.Namespace, said: dict[str, str], folder: Place) -> int:
    """Trains one run per combination of --vary, one after another, and prints a table.

    If a run fails, it is named and the next one begins. The same command resumes a stopped sweep.
    """
    runs, calls, facts = sweep.combinations(flags.vary), {}, {}
    configs = sweep.configs(runs, flags.config, said, folder)
    for name, varied in runs.items():  # all are checked before the first one runs
        config = configs[name]
        starting.check_run(name, config, folder / name)
        again = command.again(flags, folder / name, said | varied, mode="train")
        call = modes.Call(
            config, folder / name, again, others=judging.FOREIGN, one_budget=True
        )  # fmt: skip
        calls[name] = functools.partial(modes.run, "train", call)
        facts[name] = _facts(flags, config)
    distributed.check_alike(facts)
    return sweep.in_turn(calls, lambda: listing.table(folder), aloud=distributed.is_first())


def _facts(flags: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts that must be equal on all processes of one program."""
    keys = {key: value for key, value in flatten(config) if not is_place(key)}
    return {**keys, "--mode": flags.mode, "--evals": flags.evals, "--back": flags.back, **code()}


def main() -> None:
    streams.silence_libraries()
    streams.outlive()
    heap.reuse()
    try:
        failed, code = None, run(sys.argv[1:])
    except UserError as error:
        failed, code = error, streams.print_user_error(error)
    except KeyboardInterrupt as error:  # the training loop handles its own
        print("interrupted: repeat the command to continue", file=sys.stderr)
        failed, code = error, 130
    except Exception as error:
        failed, code = error, distributed.fault(error)
    distributed.leave(code, failed)


if __name__ == "__main__":
    main()
