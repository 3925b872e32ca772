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
import collections
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from recorded import POWER, Disk, Operation, needed, read_log, state  # noqa: E402

REPLAYED = ("kill", "torn", *POWER)
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
LONGEST = 120.0  # seconds of a run; one that takes longer hangs
MADE = ("arrays", "rows", "result")  # by a run, besides the steps of its checkpoints
SETTINGS = {
    "data.name": "text", "data.length": 8, "network.size": 16, "network.depth": 1,
    "network.heads": 1, "network.hidden": 16, "train.num_steps": 6, "train.batch_size": 4,
    "checkpoint.every": 2, "checkpoint.keep": 2, "log.every": 1, "optim.warmup_steps": 1,
    "evals.validation.every": 3, "evals.validation.limit": 8, "evals.validation.batch_size": 8,
    "evals.test.batch_size": 8, "sample.num": 1, "sample.steps": 2,
}  # fmt: skip


class Ended(NamedTuple):
    """Exit code of a process, -9 if it hung, its output, and what a run that ended has made."""

    code: int
    text: str
    made: Any


class Campaign:
    """Outcomes by fault, in directories below one."""

    def __init__(self, directory: Path):
        self.live, self.log = directory / "live", directory / "log"
        self.text, self.out = directory / "text.txt", directory / "out"
        self.text.write_text("".join(random.Random(0).choices("abcdefgh ", k=2000)))
        self.count: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.wrong: list[str] = []
        self.known: dict[str, str] = {}
        self.expected: Any = None

    def start(self, number: int = 0, error: int = 0) -> Ended:
        """Runs the program in a fork of this process; its operation of that number fails."""
        self.log.unlink(missing_ok=True)
        self.live.mkdir(exist_ok=True)
        process = os.fork()
        if not process:
            self._be_the_program(number, error)
        until = time.monotonic() + LONGEST
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(process, 9)
            time.sleep(0.01)
        made = self.live.parent / "made.json"
        found = json.loads(made.read_text()) if made.exists() else None
        made.unlink(missing_ok=True)
        text = self.out.read_text(errors="replace")
        return Ended(os.waitstatus_to_exitcode(ended[1]), text, found)

    def _be_the_program(self, number: int, error: int) -> None:
        code = 1
        try:
            out = os.open(self.out, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ["MD4_JAX_CACHE"] = str(self.live / "cache")
            ctypes.CDLL(None).file_faults_arm(
                str(self.live).encode(), str(self.log).encode(), ctypes.c_long(number), error
            )
            code = self._run()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _run(self) -> int:
        from md4_jax import main
        from md4_jax.runtime import retries

        retries.FIRST_PAUSE = 0.001
        settings = {**SETTINGS, "data.path": self.text}
        words = ["--config", ROOT / "tests/e2e/tiny.py", "--workdir", self.live / "run"]
        words += [f"--config.{key}={value}" for key, value in settings.items()]
        sys.argv[1:] = map(str, words)
        try:
            main.main()
        except SystemExit as ended:
            ctypes.CDLL(None).file_faults_disarm()
            if ended.code == 0:
                with contextlib.redirect_stdout(sys.stderr):
                    (self.live.parent / "made.json").write_text(json.dumps(made(self.live / "run")))
            return ended.code
        return 0

    def recover(self, fault: str, n: int, disk: Disk) -> None:
        """Starts the same command in a directory, unless an equal one was tried."""
        content = hashlib.sha256()
        for path, data in disk.files():
            content.update(repr((path, data)).encode())
        key = content.hexdigest()
        if key not in self.known:
            disk.write(self.live)
            ended = self.start()
            self.known[key] = self._verdict(fault, n, ended)
            self.count[fault]["runs"] += 1
        self.count[fault][self.known[key]] += 1

    def _verdict(self, fault: str, n: int, ended: Ended) -> str:
        what = f"exit code {ended.code}"
        if ended.code == 0:
            keys = [key for key in MADE if ended.made[key] != self.expected[key]]
            # A save that failed in the background is made up for by the next one.
            lost = set(self.expected["steps"]) - set(ended.made["steps"])
            keys += ["steps"] if lost and fault not in ERRORS else []
            if not keys:
                return "equal bit for bit"
            what = f"differs in {', '.join(keys)}"
            ended = ended._replace(text=f"{[ended.made[key] for key in keys]}"[-900:] + ended.text)
        self.wrong.append(f"{fault} at {n}: {what}: {ended.text[-1500:]}")
        return what

    def fail(self, fault: str, n: int) -> None:
        """Fails the n-th operation of a living run."""
        shutil.rmtree(self.live)
        ended = self.start(n, ERRORS[fault])
        count = self.count[fault]
        if ended.code == 0:
            count["went on; " + self._verdict(fault, n, ended)] += 1
            return
        is_said = ended.code == 2 and len(re.findall("^error: ", ended.text, re.M)) == 1
        if not is_said or "Traceback" in ended.text:
            self.wrong.append(f"{fault} at {n}: exit code {ended.code}: {ended.text[-1500:]}")
        again = self._verdict(f"{fault}, again,", n, self.start())
        count[f"{'stopped with a sentence' if is_said else 'stopped otherwise'}; {again}"] += 1

    def record(self) -> list[Operation]:
        """Runs it undisturbed; the record must give the files that are there."""
        ended = self.start()
        assert ended.code == 0, ended.text
        self.expected = ended.made
        found = read_log(self.log, self.live)
        self._check_complete(found)
        return found

    def continued(self, operations: list[Operation]) -> list[Operation]:
        """Returns the record of a run that was killed in the middle and started again."""
        middle = operations[: len(operations) // 2]
        state("kill", middle, [], len(middle)).write(self.live)
        ended = self.start()
        assert ended.code == 0 and ended.made == self.expected, ended.text
        found = middle + read_log(self.log, self.live)
        self._check_complete(found)
        return found

    def _check_complete(self, operations: list[Operation]) -> None:
        disk = Disk()
        for op in operations:
            disk.apply(op)
        there = {str(p.relative_to(self.live)): p for p in self.live.rglob("*")}
        recorded = dict(disk.files())
        assert recorded.keys() == there.keys(), recorded.keys() ^ there.keys()
        for path, content in recorded.items():
            assert content is None or content == there[path].read_bytes(), path

    def note(self, n: int, of: int) -> None:
        """Says how far it is, and writes what was found so far."""
        print(f"{n} of {of}, {len(self.wrong)} wrong", file=sys.stderr, flush=True)
        found = {"outcomes": self.count, "wrong": self.wrong}
        (self.live.parent / "report.json").write_text(json.dumps(found, indent=1))

    def report(self, sizes: list[int]) -> str:
        lines = [f"{sizes[0]} operations of a run, {sizes[1]} of one that goes on after a kill"]
        lines += ["", "| fault | outcome | how often |", "|---|---|---|"]
        for fault, found in self.count.items():
            lines += [f"| {fault} | {what} | {n} |" for what, n in sorted(found.items())]
        return "\n".join(lines + [f"WRONG: {line}" for line in self.wrong])


def made(run: Path) -> Any:
    """Returns what a finished run has made: hashes of its arrays, its rows, its last results."""
    import runs

    found = {k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in runs.arrays(run).items()}
    steps = sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdecimal())
    result = runs.evaluated(run)
    result.pop("commit")  # the checkout may change meanwhile
    return {"arrays": found, "rows": runs.rows(run), "result": result, "steps": steps}


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


def strike(campaign: Campaign, faults: list[str], first: int, every: int, last: int) -> list[int]:
    """Tries the faults at the operations first, first + every, ...; returns their number."""
    operations = campaign.record()
    records = [operations, campaign.continued(operations)]
    for n in range(1 + first, min(len(operations), last or len(operations)) + 1, every):
        for fault in [f for f in faults if f in ERRORS]:
            campaign.fail(fault, n)
        campaign.note(n, len(operations))
    for record, begin in zip(records, (0, len(operations) // 2), strict=True):
        lasts = needed(record)
        for n in range(begin + first, min(len(record) + 1, last or len(record) + 1), every):
            for fault in [f for f in faults if f in REPLAYED]:
                campaign.recover(fault, n, state(fault, record, lasts, n))
            campaign.note(n, len(record))
    return [len(operations), len(records[1]) - len(operations) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="an empty or new one")
    parser.add_argument("--faults", default=",".join((*REPLAYED, *ERRORS)))
    parser.add_argument("--first", type=int, default=0, help="operation to begin with")
    parser.add_argument("--every", type=int, default=1, help="tries each EVERY-th operation")
    parser.add_argument("--last", type=int, default=0, help="operation to end before; 0: none")
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

    campaign = Campaign(directory)
    sizes = strike(campaign, flags.faults.split(","), flags.first, flags.every, flags.last)
    print(f"commit {commit()}\n{campaign.report(sizes)}")
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
