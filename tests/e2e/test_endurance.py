"""A run that goes on for long takes no more and more; tests/e2e/endurance.py is the command."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.campaign
def test_half_an_hour(tiny, tmp_path):
    words = ["--directory", tmp_path / "run", "--minutes", 30]
    done = subprocess.run(
        [sys.executable, tiny.with_name("endurance.py"), *map(str, words)],
        capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
