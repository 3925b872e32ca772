"""Runs of a sweep: every combination of the values that some keys shall take."""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence

import jax

from md4_jax.protocols import UserError
from md4_jax.runtime.streams import print_user_error

FORM = "--vary SECTION.KEY=VALUE,VALUE,..."


def combinations(asked: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns {name of a run: {key: value}}, a run for each combination of values.

    asked  'section.key=value,value,...' for each key that varies; the last one varies fastest

    The name is 'key=value' of each, by the last word of the key. UserError for another form, a key
    or value that comes twice, or runs that would have the same name.
    """
    axes = [_axis(words) for words in asked]
    keys = [key for key, _ in axes]
    if len(set(keys)) < len(keys):
        raise UserError(f"--vary names a key twice: {', '.join(keys)}")
    runs = [
        dict(zip(keys, values, strict=True))
        for values in itertools.product(*(values for _, values in axes))
    ]
    named = {",".join(_short(key, run[key]) for key in run): run for run in runs}
    if len(named) < len(runs):
        raise UserError(f"--vary {' '.join(asked)}: two runs would have the same name")
    return named


def in_turn(runs: Mapping[str, Callable[[], int]], table: Callable[[], str], *, aloud: bool) -> int:
    """Calls the runs one after another, prints their table and returns an exit code.

    A UserError is printed, makes the code 1, and the next run begins. Of several processes it may
    be raised by one alone: there it ends the sweep, or that process would be in the next run while
    the others are in this one. A code above 128, that of a signal, ends the sweep without a table.
    Only a process that is `aloud` prints.
    """
    failed = 0
    for number, (name, call) in enumerate(runs.items(), 1):
        if aloud:
            print(f"\nrun {number} of {len(runs)}: {name}", flush=True)
        try:
            code = call()
        except UserError as error:
            if jax.process_count() > 1:
                raise UserError(f"run {number} of {len(runs)}, {name}: {error}") from error
            code = print_user_error(error)
            failed += 1
        if code > 128:
            print("to continue the sweep, give its command again", file=sys.stderr)
            return code
    if aloud and failed < len(runs):  # there is a run to list
        print(f"\n{table()}", flush=True)
    return int(failed > 0)


def _axis(words: str) -> tuple[str, list[str]]:
    key, _, text = words.partition("=")
    values = text.split(",")
    if "." not in key or not all(values):
        raise UserError(f"--vary {words}: it must be {FORM}, as in optim.learning_rate=1e-3,3e-4")
    if len(set(values)) < len(values):
        raise UserError(f"--vary {words} names a value twice")
    return key, values


def _short(key: str, value: str) -> str:
    """Returns 'key=value' that can be part of the name of a folder."""
    return f"{key.rpartition('.')[2]}={value.replace('/', '_')}"
