"""Outcomes of runs whose file operations fail; `every_operation.py` is the command."""

import collections
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import warm  # noqa: E402
from recorded import POWER, Disk, Operation, read_log, state  # noqa: E402

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
    """Exit code of the program, its output, and what a run that ended has made."""

    code: int
    text: str
    made: Any


class Campaign:
    """Outcomes by fault, in directories below one."""

    def __init__(self, directory: Path, text: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.live, self.log = directory / "live", directory / "log"
        self.text, self.out, self.made = text, directory / "out", directory / "made.json"
        self.count: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.wrong: list[str] = []
        self.known: dict[str, str] = {}
        self.expected: Any = None

    def start(self, number: int = 0, error: int = 0) -> Ended:
        """Runs the program in this process; its operation of that number fails."""
        self.log.unlink(missing_ok=True)
        self.made.unlink(missing_ok=True)
        self.live.mkdir(exist_ok=True)
        os.environ["MD4_JAX_CACHE"] = str(self.live / "cache")
        library = ctypes.CDLL(None)
        library.file_faults_arm(
            str(self.live).encode(), str(self.log).encode(), ctypes.c_long(number), error
        )
        try:
            code = warm.exit_code(self._run, self.out)
        finally:
            library.file_faults_disarm()
        found = made(self.live / "run") if code == 0 else None
        return Ended(code, self.out.read_text(errors="replace"), found)

    def start_forked(self) -> Ended:
        """Runs the program in a process of its own."""
        process = os.fork()
        if not process:
            try:
                ended = self.start()
                self.made.write_text(json.dumps(ended))
            finally:
                os._exit(0)
        until = time.monotonic() + LONGEST
        while not os.waitpid(process, os.WNOHANG)[0]:
            if time.monotonic() > until:
                os.kill(process, 9)
            time.sleep(0.01)
        return Ended(*json.loads(self.made.read_text()))

    def _run(self) -> None:
        from md4_jax import main
        from md4_jax.runtime import retries

        retries.FIRST_PAUSE = 0.001
        settings = {**SETTINGS, "data.path": self.text}
        words = ["--config", ROOT / "tests/e2e/tiny.py", "--workdir", self.live / "run"]
        words += [f"--config.{key}={value}" for key, value in settings.items()]
        sys.argv[1:] = map(str, words)
        main.main()

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
        shutil.rmtree(self.live, ignore_errors=True)
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
        ended = self.start_forked()
        assert ended.code == 0, ended.text
        self.expected = ended.made
        found = read_log(self.log, self.live)
        self._check_complete(found)
        return found

    def continued(self, operations: list[Operation]) -> list[Operation]:
        """Returns the record of a run that was killed in the middle and started again."""
        middle = operations[: len(operations) // 2]
        state("kill", middle, [], len(middle)).write(self.live)
        ended = self.start_forked()
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

    def add(self, part: Path, status: int) -> None:
        """Adds what the process of a part has found, and writes all that was found so far."""
        if status:
            now, out = part / "now", part / "out"
            text = [p.read_text(errors="replace")[-1500:] for p in (now, out) if p.exists()]
            self.wrong.append(f"{part.name} ended with status {status}: {': '.join(text)}")
        if (part / "report.json").exists():
            found = json.loads((part / "report.json").read_text())
            for fault, outcomes in found["outcomes"].items():
                self.count[fault].update(outcomes)
            self.wrong += found["wrong"]
        shutil.rmtree(part)
        found = {"outcomes": self.count, "wrong": self.wrong}
        (part.parent / "report.json").write_text(json.dumps(found, indent=1))

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
