"""Copies of the checkout and the results of their tests, for trying faults in mutants.py."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FROM_ELSEWHERE = ("tests", "launch", "tools", "pyproject.toml")  # what --tests-from replaces
RUNNING: set[subprocess.Popen] = set()
# Selections of tests to run in order, each only if none before it has failed.
STAGES = {
    "quick": ["-m", "not slow"],
    "slow": ["-m", "slow"],
    "campaign": ["-m", "campaign", "--campaign"],
}


def test_file(root: Path, argument: str) -> Path:
    """Returns the file of a pytest argument such as FILE::test_name."""
    return root / argument.partition("::")[0]


def tracked(root: Path) -> list[Path]:
    """Lists the files of a checkout: tracked, or new and not ignored."""
    git = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split("\0")
    return [Path(name) for name in dict.fromkeys(names) if name and os.path.lexists(root / name)]


def copy_checkout(own: Path, folder: Path, tests_from: Path | None) -> Path:
    """Copies the checkout `own` into the folder and returns the copy's path."""
    copy = folder / "repo"
    for root in filter(None, (own, tests_from)):
        for name in tracked(root):
            theirs = tests_from is not None and name.parts[0] in FROM_ELSEWHERE
            if theirs == (root is tests_from):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name, follow_symlinks=False)
    # Tests of real data look for it beside the checkout.
    if (own.parent / "shared").exists():
        (folder / "shared").symlink_to((own.parent / "shared").resolve())
    (folder / "tmp").mkdir()
    return copy


def pytest(copy: Path, tests: list[str], which: list[str], timeout: float) -> tuple[str, str]:
    """Returns (passed, seen or error; the failed test or message) of one call of pytest."""
    words = ["-x", "-q", "-p", "no:cacheprovider", *which, *tests]
    more = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    # Temporary files of killed tests are deleted with the copy.
    more["TMPDIR"] = str(copy.parent / "tmp")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=copy, env=os.environ | more, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    RUNNING.add(process)
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        process.communicate()
        return "seen", "timeout"
    finally:
        RUNNING.discard(process)
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out, re.MULTILINE)
    # 2 means a file that cannot be collected, or an interrupted pytest.
    if process.returncode == 1 or (process.returncode == 2 and named):
        return "seen", named[1] if named else "a failing test without a name"
    if process.returncode in (0, 5):
        return "passed", ""
    return "error", f"pytest ended with {process.returncode}: {out.strip()[-400:]}"


def kill(process: subprocess.Popen) -> None:
    """Kills pytest and the programs that its tests started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def ask(copy: Path, tests: list[str], options: Any) -> dict:
    """Runs the tests on the copy: {status: seen, escaped or error, by, when, seconds}.

    options: quick and timeout of the command. Slow tests run if no quick one has failed, those of
    campaigns if none of these has.
    """
    began, status, by, when = time.monotonic(), "passed", "", ""
    tests = [test for test in tests if test_file(copy, test).is_file()]
    for stage, which in STAGES.items():
        if tests and status == "passed" and (stage == "quick" or not options.quick):
            when = stage
            status, by = pytest(copy, tests, which, options.timeout)
    if status == "passed":
        status, when = "escaped", ""
    return {"status": status, "by": by, "when": when, "seconds": round(time.monotonic() - began)}
