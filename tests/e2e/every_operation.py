"""Lets each file operation of a short run fail, one at a time, and compares how the run ends.

    python tests/e2e/every_operation.py --directory DIRECTORY

A run (start, train, save, evaluate, sample) and its continuation after a kill are recorded by
file_faults.c. From the record this makes the directory as it is

    kill       before the N-th operation
    torn       with half of what the N-th one writes
    ordered    after a loss of power at N: data that were not fsynced are gone, names are not
    strict     likewise, and names in directories that were not fsynced are gone
    reordered  likewise, of all that was not fsynced a random half is gone

and starts the same command in it. EIO and ENOSPC are what the N-th operation of a living run
returns. Each run must end with the arrays, rows and results of one that was not disturbed, and
one that stops must say why in one sentence. Prints a table; exits with 1 if anything is wrong.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import warm  # noqa: E402
from recorded import Operation, needed, state  # noqa: E402
from struck import ERRORS, LONGEST, REPLAYED, Campaign  # noqa: E402

TOGETHER = 16  # operations that one process tries


def preload(directory: Path) -> Path | None:
    """Compiles the library; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = directory / "file_faults.so"
    source = Path(__file__).with_name("file_faults.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def import_all() -> None:
    """Imports what a run imports, so that forks need not."""
    import matplotlib.figure
    import runs

    from md4_jax import main

    del matplotlib, runs, main


class Part(NamedTuple):
    """Operations of a record that one process tries, one after another."""

    record: list[Operation]
    numbers: Sequence[int]
    faults: list[str]


def parts(records: list[list[Operation]], flags: argparse.Namespace) -> list[Part]:
    """Returns all that is to be tried, in random order, so that one may stop at any time."""
    found, faults = [], flags.faults.split(",")
    begins = (0, len(records[0]) // 2)  # the second record has the first half of the first
    for kind, record, begin in (
        (list(ERRORS), records[0], 1),
        *(((list(REPLAYED), *both)) for both in zip(records, begins, strict=True)),
    ):
        end = min(len(record) + 1, flags.last or len(record) + 1)
        numbers = range(begin + flags.first, end, flags.every)
        asked = [fault for fault in kind if fault in faults]
        found += [
            Part(record, numbers[at : at + TOGETHER], asked)
            for at in range(0, len(numbers) if asked else 0, TOGETHER)
        ]
    random.Random(0).shuffle(found)
    return found


def tried(campaign: Campaign, part: Part) -> None:
    """Tries a part, and writes what was found so far after each operation."""
    warm.compile_once()
    report = campaign.live.parent / "report.json"
    lasts = needed(part.record)
    for n in part.numbers:
        for fault in part.faults:
            report.with_name("now").write_text(f"{fault} at {n}")
            if fault in ERRORS:
                campaign.fail(fault, n)
            else:
                campaign.recover(fault, n, state(fault, part.record, lasts, n))
        report.write_text(json.dumps({"outcomes": campaign.count, "wrong": campaign.wrong}))


def strike(campaign: Campaign, flags: argparse.Namespace) -> list[int]:
    """Tries the faults in several processes at once; returns the numbers of operations."""
    operations = campaign.record()
    records = [operations, campaign.continued(operations)]
    waiting, working = parts(records, flags), {}
    total = len(waiting)
    while waiting or working:
        while waiting and len(working) < flags.workers:
            part = waiting.pop()
            own = Campaign(campaign.live.parent / f"part-{total - len(waiting)}", campaign.text)
            own.expected = campaign.expected
            process = os.fork()
            if not process:
                code = 1
                try:
                    tried(own, part)
                    code = 0
                finally:
                    os._exit(code)
            working[process] = own
        time.sleep(0.1)
        for process, own in list(working.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del working[process]
                campaign.add(own.live.parent, status)
                done = total - len(waiting) - len(working)
                print(f"{done} of {total}, {len(campaign.wrong)} wrong", file=sys.stderr)
            elif _is_hanging(own.live.parent / "now"):
                os.kill(process, 9)
    return [len(operations), len(records[1]) - len(operations) // 2]


def _is_hanging(now: Path) -> bool:
    return now.exists() and time.time() - now.stat().st_mtime > LONGEST


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="an empty or new one")
    parser.add_argument("--faults", default=",".join((*REPLAYED, *ERRORS)))
    parser.add_argument("--first", type=int, default=0, help="operation to begin with")
    parser.add_argument("--every", type=int, default=1, help="tries each EVERY-th operation")
    parser.add_argument("--last", type=int, default=0, help="operation to end before; 0: none")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once")
    flags = parser.parse_args()
    directory = flags.directory.absolute()
    if "file_faults" not in os.environ.get("LD_PRELOAD", ""):
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            parser.error(f"{directory} is not empty")
        library = preload(directory)
        if library is None:
            parser.error("this needs a C compiler, cc, and Linux")
        compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(directory / "compiled"))
        settings = {
            "LD_PRELOAD": str(library), "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true", "JAX_COMPILATION_CACHE_DIR": compiled,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)
    import_all()
    from md4_jax.runtime.commit import commit

    text = directory / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefgh ", k=2000)))
    campaign = Campaign(directory, text)
    sizes = strike(campaign, flags)
    print(f"commit {commit()}\n{campaign.report(sizes)}")
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
