"""Runs of a sweep: every combination of the given values of some keys."""

import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from md4_jax.config import schema
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.streams import print_user_error

FORM = "--vary SECTION.KEY=VALUE,VALUE,..."
CLOSING = {"(": ")", "[": "]", "{": "}"}


def combinations(asked: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns {name of a run: {key: value}}, with one run per combination of values.

    asked  'section.key=value,value,...' for each key that varies; the last one varies fastest. A
           comma within brackets is part of a value, as in 'sample.grid=[1,0.5,0],[1,0]'

    The name joins 'key=value' of all keys. Each key is shortened to its last word, or to as many
    words as make it unique. UserError for another form, a repeated key or value, or two runs with
    the same name.
    """
    axes = [_axis(words) for words in asked]
    keys = [key for key, _ in axes]
    if len(set(keys)) < len(keys):
        raise UserError(f"--vary names a key twice: {', '.join(keys)}")
    runs = [
        dict(zip(keys, values, strict=True))
        for values in itertools.product(*(values for _, values in axes))
    ]
    ends = {key: _end(key, keys) for key in keys}
    named = {",".join(f"{ends[key]}={_plain(run[key])}" for key in run): run for run in runs}
    if len(named) < len(runs):
        raise UserError(f"--vary {' '.join(asked)}: two runs would have the same name")
    return named


def configs(
    runs: Mapping[str, Mapping[str, str]], path: str, said: Mapping[str, str], folder: Place
) -> dict[str, dict[str, Any]]:
    """Returns the config of each run of `combinations`; its directory is `folder`/name.

    path: the config file
    said: assignments for all runs

    UserError if two runs have the same config, as with the values 0 and 00.
    """
    found = {
        name: schema.load_config(path, {**said, **varied}, folder / name)
        for name, varied in runs.items()
    }
    for (one, config), (other, same) in itertools.combinations(found.items(), 2):
        if config == same:
            raise UserError(
                f"--vary asks for {one} and {other}, but their values are equal, so they are the "
                "same run: remove one of them"
            )
    return found


def in_turn(runs: Mapping[str, Callable[[], int]], table: Callable[[], str], *, aloud: bool) -> int:
    """Calls the runs one after another, prints their table and returns an exit code.

    A UserError is printed, sets the code to 1, and the next run begins. With several processes it
    ends the sweep instead: if only one process raised it, that process would start the next run
    while the others are still in this one. A code above 128, which means a signal, ends the sweep
    without a table. Only a process with `aloud` prints.
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
    """Returns (key, its values)."""
    key, _, text = words.partition("=")
    values = _values(words, text)
    if "." not in key or not all(values):
        raise UserError(f"--vary {words}: it must be {FORM}, as in optim.learning_rate=1e-3,3e-4")
    if len(set(values)) < len(values):
        raise UserError(f"--vary {words} names a value twice")
    return key, values


def _values(words: str, text: str) -> list[str]:
    """Splits a text at its commas, but not within brackets; UserError for a lone bracket."""
    values, awaited = [""], []
    for sign in text:
        if sign == "," and not awaited:
            values.append("")
            continue
        values[-1] += sign
        if sign in CLOSING:
            awaited.append(CLOSING[sign])
        elif sign in CLOSING.values() and (not awaited or awaited.pop() != sign):
            raise UserError(f"--vary {words}: {sign!r} closes a bracket that was not opened")
    if awaited:
        raise UserError(f"--vary {words}: the closing bracket {awaited[-1]!r} is missing")
    return values


def _end(key: str, keys: Sequence[str]) -> str:
    """Returns the shortest ending of a key, in whole words, that no other key has."""
    words, others = key.split("."), [f".{other}" for other in keys if other != key]
    ends = (".".join(words[first:]) for first in reversed(range(len(words))))
    return next((end for end in ends if not any(o.endswith(f".{end}") for o in others)), key)


def _plain(value: str) -> str:
    """Returns a value as part of the name of a folder: 1_0.5_0 of [1, 0.5, 0]."""
    return re.sub(r"[/*?\\]|, *", "_", re.sub(r"[\[\](){}]", "", value))
