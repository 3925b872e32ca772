"""A run that goes on for long takes no more and more; tests/e2e/endurance.py is the command."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def test_what_stays_has_grown_and_what_a_save_holds_has_not():
    """Looks of which more and more fall into a save, without and with a slow leak."""
    path = Path(__file__).with_name("endurance.py")
    spec = importlib.util.spec_from_file_location("endurance", path)
    endurance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(endurance)
    held = [30 if look % 7 < look // 10 else 10 for look in range(40)]
    steady = [(look, {"files": files}) for look, files in enumerate(held)]
    leaking = [(look, {"files": files + look // 9}) for look, files in enumerate(held)]
    assert endurance.grown(steady)["files"] == 0
    assert endurance.grown(leaking)["files"] == pytest.approx(2 / 11)


@pytest.mark.slow
@pytest.mark.campaign
def test_half_an_hour(tiny, tmp_path):
    words = ["--directory", tmp_path / "run", "--minutes", 30]
    done = subprocess.run(
        [sys.executable, tiny.with_name("endurance.py"), *map(str, words)],
        capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
