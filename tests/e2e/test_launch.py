"""The launch scripts, without a network: a stub stands where Python would."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = sorted(p.name for p in (Path(__file__).parents[2] / "launch").glob("*.sh"))


@pytest.fixture
def launch(tmp_path):
    """A copy of the launch scripts in a directory of their own, and how to run one there."""
    root = tmp_path / "check out"
    shutil.copytree("launch", root / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(name, root / name)
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    stub = venv / "bin" / "python"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do printf "[%s]" "$word"; done\necho\n')
    stub.chmod(0o755)
    path = f"{venv / 'bin'}:{os.environ['PATH']}"

    def launch(script, *arguments):
        return subprocess.run(
            ["bash", root / "launch" / script, *arguments],
            cwd=tmp_path,
            env={"PATH": path, "VIRTUAL_ENV": str(venv), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.splitlines()

    return launch


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_shell_reads_it(script):
    subprocess.run(["bash", "-n", f"launch/{script}"], check=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", "-x", f"launch/{script}"], check=True)


def test_local_without_arguments_is_the_quickstart(launch):
    assert launch("local.sh")[-1] == "[-m][md4_jax.main][--config][configs/quickstart.py]"


def test_local_passes_arguments_on(launch):
    arguments = ("--config", "a b.py", "--config.sample.num=3", "--workdir", "x y", "*")
    assert launch("local.sh", *arguments)[-1] == (
        "[-m][md4_jax.main][--config][a b.py][--config.sample.num=3][--workdir][x y][*]"
    )


def test_tests_pass_arguments_on(launch):
    assert launch("test.sh", "-m", "not slow")[-1] == "[-m][pytest][-m][not slow]"


def test_the_package_is_installed_once_for_the_same_requirements(launch):
    first, second, other = launch("local.sh"), launch("local.sh"), launch("test.sh")
    assert any("[install]" in line for line in first)
    assert not any("[install]" in line for line in second)
    assert any("[.[dev]]" in line for line in other)
