"""Runs `python -m md4_jax` as a user does, and reads its output and files."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this checkout, not an installed one

from md4_jax.training import report  # noqa: E402


class Refused(Exception):
    """Raised for a UserError of the program (exit code 2), with its message."""


def call(words: list[str], log: Path | None = None, **variables: str) -> str:
    """Runs the program and returns its standard output.

    log: a file for standard output and error. variables: added to the environment. Raises Refused
    for exit code 2, and SystemExit with the error text for any other failure.
    """
    command = [sys.executable, "-m", "md4_jax", *words]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths} | variables
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(ended.stdout + ended.stderr)
    if ended.returncode == 2:
        raise Refused(" ".join(ended.stderr.rpartition("error: ")[2].split()))
    if ended.returncode:
        sys.exit(f"error: {written(words)} ended with {ended.returncode}:\n{ended.stderr.strip()}")
    return ended.stdout


def numbers(words: list[str], log: Path | None = None, **variables: str) -> dict:
    """Runs the program and returns the JSON object on the last line of its output."""
    return json.loads(call(words, log, **variables).strip().splitlines()[-1])


def train(words: list[str], workdir: Path, evaluation: str = "test") -> dict:
    """Trains a run to its end, unless already done; returns the result of an evaluation.

    words: the arguments without --workdir. evaluation: its name in `config.evals`. The log is a
    file beside the workdir. An interrupted run continues.
    """
    found = of_training(workdir, evaluation)
    if not found:
        call([*words, f"--workdir={workdir}"], workdir.with_suffix(".log"))
        found = of_training(workdir, evaluation)
    return found[-1]


def of_training(workdir: Path, evaluation: str) -> list[dict]:
    """Returns the stored results of an evaluation of a finished run."""
    rows = report.kept(workdir)
    return [row for row in rows if row["eval"] == evaluation and "command" not in row]


def bench(
    config: str, keys: str, *, part: str = "train", windows: int = 5, seconds: float = 2.0
) -> dict[str, float]:
    """Times one part of a config with --mode bench; keys are 'key=value key=value'."""
    return numbers(bench_words(config, keys, part, windows, seconds))[part]


def bench_words(config: str, keys: str, part: str, windows: int, seconds: float) -> list[str]:
    """Returns the arguments of the program for `bench`."""
    timed = f"bench.parts={part} bench.windows={windows} bench.seconds={seconds}"
    return ["--mode=bench", *config_words(config, f"{keys} {timed}")]


def config_words(config: str, keys: str) -> list[str]:
    """Returns --config for a file of this checkout, and --config.key=value for each key."""
    return [f"--config={ROOT / config}", *(f"--config.{key}" for key in keys.split())]


def written(words: list[str]) -> str:
    """Returns the command as typed at the root of the checkout."""
    return "python -m md4_jax " + shlex.join(words).replace(f"{ROOT}/", "")
