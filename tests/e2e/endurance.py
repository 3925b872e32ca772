"""Trains, saves and evaluates for a long time, and watches what the process takes.

    python tests/e2e/endurance.py --directory DIRECTORY --minutes 30

Prints memory, open files, threads and bytes on the disk as they grow with the steps; exits with 1
if the least of one of them in the last quarter of the time is greater than that in the second
quarter by more than --growth of its size. --rows FILE keeps what was seen, a line of JSON a look.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "train.num_steps": 10**9, "optim.decay": "constant", "checkpoint.every": 50, "log.every": 25,
    "evals.validation.every": 50, "evals.test.limit": 64, "sample.num": 1,
}  # fmt: skip
LOGS = ("metrics.jsonl", "tensorboard")  # which grow with the steps, as they should


def taken(process: int, run: Path) -> dict[str, float]:
    """Returns resident memory in MB, open files, threads, and MB on the disk without logs."""
    status = Path(f"/proc/{process}/status").read_text()
    found = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.M))
    disk = 0
    for folder, _, files in os.walk(run):
        for file in (Path(folder) / name for name in files):
            if not str(file.relative_to(run)).startswith(LOGS):
                # The run may delete a checkpoint in between.
                with contextlib.suppress(FileNotFoundError):
                    disk += file.stat().st_size
    return {
        "memory MB": int(found["VmRSS"]) / 1000,
        "open files": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(found["Threads"]),
        "disk MB": disk / 1e6,
    }


def last_step(log: Path) -> int:
    return max(map(int, re.findall(r"^step (\d+)/", log.read_text(), re.M)), default=0)


def watched(directory: Path, minutes: float) -> tuple[list[tuple[int, dict]], int, str]:
    """Runs for so long; returns [(step, what it took)], the exit code and what it printed."""
    run, log, rows = directory / "run", directory / "log", []
    settings = {**SETTINGS, "train.seconds": 60 * minutes}
    words = ["--config", ROOT / "tests/e2e/tiny.py", "--workdir", run]
    words += [f"--config.{key}={value}" for key, value in settings.items()]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "md4_jax", *map(str, words)], cwd=ROOT, stdout=out, stderr=out
        )
    while process.poll() is None:
        time.sleep(minutes * 60 / 200)
        step = last_step(log)
        if step and "evaluating step" not in log.read_text() and process.poll() is None:
            rows.append((step, taken(process.pid, run)))
    return rows, process.returncode, log.read_text()


def grown(rows: list[tuple[int, dict]]) -> dict[str, float]:
    """Returns by which part of it each number grew from the second quarter to the last.

    The least of each quarter is compared: what is left between saves. A save opens files and starts
    threads, and how many looks fall into one depends on the machine.
    """
    quarter = len(rows) // 4
    parts = rows[quarter : 2 * quarter], rows[3 * quarter :]
    found = {}
    for name in rows[0][1]:
        before, after = (min(row[name] for _, row in part) for part in parts)
        found[name] = after / before - 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="an empty or new one")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--growth", type=float, default=0.05)
    parser.add_argument("--rows", type=Path)
    flags = parser.parse_args()
    directory = flags.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        parser.error(f"{directory} is not empty")
    rows, code, text = watched(directory, flags.minutes)
    if code or len(rows) < 8:
        print(text[-2000:])
        return 1
    if flags.rows:
        flags.rows.write_text("".join(f"{json.dumps([step, row])}\n" for step, row in rows))
    growth = grown(rows)
    print("| step | " + " | ".join(growth) + " |\n|" + "---|" * (1 + len(growth)))
    for step, row in rows[:: max(1, len(rows) // 8)]:
        print(f"| {step} | " + " | ".join(f"{value:.1f}" for value in row.values()) + " |")
    print("growth: " + ", ".join(f"{name} {100 * value:+.1f}%" for name, value in growth.items()))
    return int(max(growth.values()) > flags.growth)


if __name__ == "__main__":
    sys.exit(main())
