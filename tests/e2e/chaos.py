"""Kills runs at random, breaks their checkpoints, fills their disk, and compares how they end.

    python tests/e2e/chaos.py --kills 60 --seed 0 --directory DIRECTORY

Every run must end with each array of the newest checkpoint and each row of metrics.jsonl as in a
run that nobody disturbed, bit for bit. Prints a report in markdown; exits with 1 if one differs,
if a process outlives its partner by more than --patience seconds, or if one ends otherwise
than the documentation says.
"""

import argparse
import collections
import contextlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import runs  # noqa: E402

from md4_jax.runtime.commit import commit  # noqa: E402

EVAL_EVERY, FARTHEST = 10, 30
SETTINGS = {
    "log.every": 1,
    "evals.validation.every": EVAL_EVERY,
    "evals.validation.limit": 512,
    "checkpoint.every": 7,
    "checkpoint.retries": 0,
    "sample.num": 1,
}
STARTING, FINISHING = "at start-up", "in the final evaluation or sampling"
KILLED, ENDED = -signal.SIGKILL, 128 + signal.SIGTERM
# Ours; or JAX's own, which may come first where process 0 dies, at which the others are registered.
MESSAGES = ("error: ", "another task died")


class Campaign:
    """What was done and what came of it, by (kind of run, what)."""

    def __init__(self, directory: Path, steps: int, seed: int, patience: float):
        self.directory, self.steps, self.patience = directory, steps, patience
        self.random = random.Random(seed)
        self.count: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.wrong: list[str] = []
        self.longest = 0.0

    def start(self, workdir: Path, processes: int = 1) -> list["Process"]:
        settings = {"train.num_steps": self.steps, **SETTINGS}
        words = [f"--config.{key}={value}" for key, value in settings.items()]
        words = ["--config", ROOT / "tests/e2e/tiny.py", "--workdir", workdir, *words]
        port = runs.free_port()
        together = [
            [f"--distributed=127.0.0.1:{port},{processes},{index}"] if processes > 1 else []
            for index in range(processes)
        ]
        return [
            Process(self.directory / f"{i}.log", [*words, *more]) for i, more in enumerate(together)
        ]

    def disturb(self, kind: str, workdir: Path, processes: int) -> bool:
        """Starts the run and strikes one of its processes; whether it ended before."""
        begun = newest(workdir)
        started = self.start(workdir, processes)
        target = begun + self.random.randint(1, FARTHEST)
        # Processes that have not met yet wait for one another for minutes.
        if processes == 1 and self.random.random() < 0.1:
            ended = started[0].reach(None, self.random.uniform(0.0, 4.0))
        else:
            # Some at the line before an evaluation, all a little later than a line.
            target = -(-target // EVAL_EVERY) * EVAL_EVERY if self.random.random() < 0.2 else target
            ended = started[0].reach(target, self.random.uniform(0.0, 0.12))
        if not ended:
            number = self.random.choice([signal.SIGKILL, signal.SIGTERM])
            self.random.choice(started).process.send_signal(number)
        self.ends(kind, started, None if ended else number)
        if not ended:
            self.count[kind][f"{number.name}, {phase(started[0], workdir)}"] += 1
        return ended

    def ends(self, kind: str, started: list["Process"], number: int | None) -> None:
        """Waits for all, and notes those that hang or end with another code than they should."""
        first, codes = None, []
        limit = time.monotonic() + 300.0
        while len(codes) < len(started) and time.monotonic() < limit:
            codes = [p.process.returncode for p in started if p.process.poll() is not None]
            if codes and first is None:
                first = time.monotonic()
            time.sleep(0.01)
        outlived = time.monotonic() - (first or 0.0)
        if number == signal.SIGKILL and len(started) > 1:
            self.longest = max(self.longest, outlived)
        for p in started:
            if p.process.poll() is None:
                p.process.kill()
                self.wrong.append(f"{kind}: a process was still there after {outlived:.0f} s")
            p.process.wait()
        codes = [p.process.returncode for p in started]
        if len(started) > 1 and number == signal.SIGKILL:
            fine = KILLED in codes and 0 not in codes and outlived < self.patience
            left = [p.text() for p in started if p.process.returncode != KILLED]
            fine &= all(any(words in text for words in MESSAGES) for text in left)
        else:
            expected = {None: {0}, signal.SIGKILL: {KILLED}, signal.SIGTERM: {ENDED, 0}}[number]
            # Before and after the training loop SIGTERM ends a process, and that its partners.
            outside = phase(started[0], None) in (STARTING, FINISHING)
            fine = set(codes) <= expected or (number == signal.SIGTERM and outside)
        if not fine:
            text = " | ".join(p.text()[-1500:] for p in started)
            self.wrong.append(f"{kind}: codes {codes} after {number}, {outlived:.1f} s: {text}")

    def harm(self, kind: str, workdir: Path) -> None:
        """Breaks one file of the newest checkpoint, if there is one before it."""
        whole = checkpoints(workdir)
        if len(whole) < 2:
            return
        files = sorted(p for p in whole[-1].rglob("*") if p.is_file() and p.stat().st_size)
        file, how = self.random.choice(files), self.random.choice(["cut short", "one bit flipped"])
        content = bytearray(file.read_bytes())
        place = self.random.randrange(len(content))
        if how == "cut short":
            content = content[:place]
        else:
            content[place] ^= 1 << self.random.randrange(8)
        file.write_bytes(content)
        self.count[kind][f"file of a checkpoint {how}"] += 1

    def compare(self, kind: str, workdir: Path, reference: Path) -> None:
        self.count[kind]["runs ended"] += 1
        different = runs.different_arrays(workdir, reference)
        if runs.rows(workdir) != runs.rows(reference):
            different.append("metrics.jsonl")
        if different:
            some = ", ".join(different[-3:])
            self.wrong.append(
                f"{kind}: {workdir} differs from {reference} in {len(different)}, of them {some}"
            )
        else:
            self.count[kind]["runs equal bit for bit"] += 1
            shutil.rmtree(workdir)

    def kills(self, kind: str, processes: int, number: int, damage: float) -> None:
        """So many strikes, in as many runs as that takes, each of them led to its end."""
        reference, made = self.directory / f"{kind}, undisturbed", 0
        self.ends(kind, self.start(reference, processes), None)
        struck, workdir = 0, self.directory / f"{kind}, 0"
        while struck < number:
            if self.disturb(kind, workdir, processes):
                self.compare(kind, workdir, reference)
                made += 1
                workdir = self.directory / f"{kind}, {made}"
                continue
            struck += 1
            if self.random.random() < damage:
                self.harm(kind, workdir)
            print(f"{kind}: {struck} of {number}", file=sys.stderr, flush=True)
        self.ends(kind, self.start(workdir, processes), None)
        self.compare(kind, workdir, reference)

    def full_disks(self, number: int) -> None:
        """The disk fills up during a run; once there is room again the same command goes on."""
        kind, disk = "full disk", self.directory / "disk"
        for made in range(number):
            with mounted(disk) as there:
                if not there:
                    self.count[kind]["skipped: no right to mount a tmpfs"] += 1
                    return
                free = self.random.randint(200, 1200)
                room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                (disk / "filler").write_bytes(bytes(room - 1024 * free))
                (run,) = self.start(disk / "run")
                if run.process.wait(300) != 2 or "error: " not in run.text():
                    self.wrong.append(f"{kind}: {free} KiB free: {run.text()[-800:]}")
                self.count[kind]["ended with a message"] += 1
                (disk / "filler").unlink()
                self.ends(kind, self.start(disk / "run"), None)
                self.compare(kind, disk / "run", self.directory / "one process, undisturbed")
            print(f"{kind}: {made + 1} of {number}", file=sys.stderr, flush=True)

    def report(self) -> str:
        lines = [f"commit {commit()}, {sum(map(self._strikes, self.count))} kills", ""]
        lines += ["| run | what | how often |", "|---|---|---|"]
        for kind, found in self.count.items():
            lines += [f"| {kind} | {what} | {n} |" for what, n in sorted(found.items())]
        lines += ["", f"A process outlived its killed partner by at most {self.longest:.1f} s."]
        return "\n".join(lines + [f"WRONG: {line}" for line in self.wrong])

    def _strikes(self, kind: str) -> int:
        return sum(n for what, n in self.count[kind].items() if what.startswith("SIG"))


class Process:
    """One process of a run, whose output goes to a file."""

    def __init__(self, log: Path, arguments: list):
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "md4_jax.main", *map(str, arguments)],
                cwd=ROOT, stdout=out, stderr=out, env=environment(log.parent),
            )  # fmt: skip

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def last_step(self) -> int:
        return max(map(int, re.findall(r"^step (\d+)/", self.text(), re.M)), default=0)

    def reach(self, step: int | None, later: float) -> bool:
        """Returns so many seconds after the line of a step, or after now; whether it ended."""
        while step is not None and self.process.poll() is None and self.last_step() < step:
            time.sleep(0.005)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(later)
        return self.process.returncode is not None


def environment(directory: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return kept | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "JAX_PLATFORMS": "cpu",
        "MD4_JAX_CACHE": str(directory / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def phase(process: Process, workdir: Path | None) -> str:
    """What the process was doing when it ended, from what it left."""
    text, last = process.text(), process.last_step()
    if not last:
        return STARTING
    if workdir is not None and list((workdir / "checkpoints").glob("*tmp*")):
        return "in a save"  # what an earlier kill left was cleared away before the first step
    if "evaluating step" in text:
        return FINISHING
    said = [line for line in text.splitlines() if line.startswith("step ")][-1]
    due = last % EVAL_EVERY == 0 and said.startswith(f"step {last}/")
    return "in an evaluation" if due else "in a step"


def checkpoints(workdir: Path) -> list[Path]:
    found = [p for p in (workdir / "checkpoints").glob("*") if p.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def newest(workdir: Path) -> int:
    return max((int(p.name) for p in checkpoints(workdir)), default=0)


@contextlib.contextmanager
def mounted(where: Path):
    """A disk of 8 MiB; yields whether it could be mounted."""
    where.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(where)]
    there = not os.geteuid() and not subprocess.run(mount, capture_output=True).returncode
    try:
        yield there
    finally:
        if there:
            subprocess.run(["umount", "-l", str(where)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="an empty or new one")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--pairs", type=int, help="of these of two processes; default: a quarter")
    parser.add_argument("--steps", type=int, default=120, help="of each run")
    parser.add_argument("--disks", type=int, default=4, help="how often the disk fills up")
    parser.add_argument("--damage", type=float, default=0.4, help="probability of a broken file")
    parser.add_argument("--patience", type=float, default=110.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    directory = flags.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        parser.error(f"{directory} is not empty")
    logging.getLogger("absl").setLevel(logging.ERROR)
    campaign = Campaign(directory, flags.steps, flags.seed, flags.patience)
    pairs = -(-flags.kills // 4) if flags.pairs is None else flags.pairs
    campaign.kills("one process", 1, flags.kills - pairs, flags.damage)
    if pairs:
        campaign.kills("two processes", 2, pairs, flags.damage)
    campaign.full_disks(flags.disks)
    print(campaign.report())
    (directory / "report.json").write_text(json.dumps(campaign.count))
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
