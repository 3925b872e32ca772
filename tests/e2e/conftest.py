"""The program as its users start it: in a process of its own, or here where that adds nothing."""

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import runs

from md4_jax import main

ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    """What a run left: exit code, standard output and standard error."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Makes a directory for all workers: the first that asks for it calls make(directory)."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(name: str, make: Callable[[Path], None]) -> Path:
        directory, done = base / name, base / f"{name}.done"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                make(directory)
                done.touch()
        return directory

    return once


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The config file of the tests."""
    return Path(__file__).with_name("tiny.py")


@pytest.fixture(scope="session")
def environment(scratch) -> dict[str, str]:
    """Of the program's processes: one CPU device, caches shared between them."""
    kept = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    flags = [f for f in kept["XLA_FLAGS"].split() if "host_platform_device_count" not in f]
    return kept | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "MD4_JAX_CACHE": str(scratch / "cache"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "XLA_FLAGS": " ".join(flags),
    }


@pytest.fixture(scope="module", autouse=True)
def here(scratch):
    """The same for runs in this process, undone after each file of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MD4_JAX_CACHE", str(scratch / "cache"))
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="session")
def start(environment):
    """Starts `python WORDS`; whatever still runs at the end of the tests is killed."""
    started = []

    def start(*words, XLA_FLAGS="", **variables) -> subprocess.Popen:
        variables["XLA_FLAGS"] = f"{environment['XLA_FLAGS']} {XLA_FLAGS}".strip()
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=ROOT,
            env=environment | {k: str(v) for k, v in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(scope="session")
def program(start):
    """`python -m md4_jax ARGUMENTS` in a process of its own, to its end."""

    def program(*arguments, **variables) -> Ended:
        process = start("-m", "md4_jax.main", *arguments, **variables)
        out, err = process.communicate(timeout=300)
        return Ended(process.returncode, out, err)

    return program


@pytest.fixture(scope="session")
def run():
    """The same in this process."""

    def run(*arguments) -> Ended:
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            patch.setattr(os, "_exit", sys.exit)  # as after an interruption
            patch.setattr(sys, "argv", ["md4_jax", *map(str, arguments)])
            patch.setattr(sys, "unraisablehook", sys.unraisablehook)  # which main replaces
            main.main()
        return Ended(ended.value.code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def refused(run):
    """Runs what must fail as a user's mistake: exit code 2, one error, no traceback."""

    def refused(*arguments) -> str:
        ended = run(*arguments)
        assert ended.code == 2, ended
        assert "Traceback" not in ended.err
        assert ended.err.count("error: ") == 1
        return ended.err

    return refused


@pytest.fixture(scope="session")
def trained(run, tiny, scratch) -> Path:
    """The workdir of a whole run of the tiny config in this process; not to be changed."""
    workdir = scratch / "trained"
    ended = run("--config", tiny, "--workdir", workdir)
    assert ended.code == 0, ended
    return workdir


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A copy of that workdir, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="session")
def arrays():
    """{path: array} of the newest checkpoint of a workdir: all of the state."""
    return runs.arrays


@pytest.fixture(scope="session")
def rows():
    """The lines of metrics.jsonl, in order, without what depends on the clock."""
    return runs.rows


@pytest.fixture(scope="session")
def same_run():
    """Asserts that two workdirs ended alike: every array bit for bit and every row."""

    def same_run(workdir: Path, reference: Path) -> None:
        assert runs.rows(workdir) == runs.rows(reference)
        assert runs.different_arrays(workdir, reference) == []

    return same_run


@pytest.fixture(scope="session")
def snapshot():
    """{file: hash} of all that a directory holds, to see that nothing changed."""

    def snapshot(directory: Path) -> dict[str, str]:
        return {
            str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(directory.rglob("*"))
            if file.is_file()
        }

    return snapshot
