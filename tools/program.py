"""Runs `python -m md4_jax.main` as a user does, and reads the JSON of its last line."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Refused(Exception):
    """The program refused what was asked (exit code 2); the text is its message."""


def call(words: list[str], log: Path | None = None, **variables: str) -> str:
    """Runs the program and returns its standard output.

    log: a file for standard output and error. variables: added to the environment. Raises Refused
    for exit code 2, and SystemExit with the error text for any other failure.
    """
    command = [sys.executable, "-m", "md4_jax.main", *words]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths} | variables
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if log is not None:
        log.write_text(ended.stdout + ended.stderr)
    if ended.returncode == 2:
        raise Refused(ended.stderr.strip().splitlines()[-1])
    if ended.returncode:
        sys.exit(f"error: {written(words)} ended with {ended.returncode}:\n{ended.stderr.strip()}")
    return ended.stdout


def numbers(words: list[str], log: Path | None = None, **variables: str) -> dict:
    """Runs the program and returns the JSON object on the last line that it prints."""
    return json.loads(call(words, log, **variables).strip().splitlines()[-1])


def bench(
    config: str, overrides: str, *, part: str = "train", windows: int = 5, seconds: float = 2.0
) -> dict[str, float]:
    """Times one part of a config with --mode bench; overrides are 'key=value key=value'."""
    return numbers(bench_words(config, overrides, part, windows, seconds))[part]


def bench_words(config: str, overrides: str, part: str, windows: int, seconds: float) -> list[str]:
    """The arguments of the program for `bench`; the config is a path from the checkout."""
    keys = [*overrides.split(), f"bench.parts={part}"]
    keys += [f"bench.windows={windows}", f"bench.seconds={seconds}"]
    words = ["--mode", "bench", "--config", str(ROOT / config)]
    return words + [f"--config.{key}" for key in keys]


def written(words: list[str]) -> str:
    """The command as a user would type it from the root of the checkout."""
    return "python -m md4_jax.main " + shlex.join(words).replace(f"{ROOT}/", "")
