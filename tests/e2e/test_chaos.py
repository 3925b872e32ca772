"""The campaign of faults, a short one: tests/e2e/chaos.py is the command for a long one."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "kills, of_pairs, disks, steps",
    [(1, 0, 0, 12), pytest.param(56, 14, 4, 120, marks=pytest.mark.campaign)],
)
@pytest.mark.campaign
def test_a_campaign(kills, of_pairs, disks, steps, tiny, tmp_path):
    words = ["--directory", tmp_path / "runs", "--kills", kills, "--pairs", of_pairs]
    words += ["--disks", disks, "--steps", steps, "--seed", 1]
    done = subprocess.run(
        [sys.executable, tiny.with_name("chaos.py"), *map(str, words)],
        capture_output=True, text=True, timeout=150 + 300 * kills,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    count = json.loads((tmp_path / "runs" / "report.json").read_text())
    struck = {"one process": kills - of_pairs, "two processes": of_pairs}
    assert count.keys() >= {kind for kind, number in struck.items() if number}
    for kind, number in [(k, n) for k, n in struck.items() if n]:
        assert sum(n for what, n in count[kind].items() if what.startswith("SIG")) == number
        assert count[kind]["runs equal bit for bit"] == count[kind]["runs ended"] >= 1
    assert "kills" in done.stdout and "WRONG" not in done.stdout


def test_a_directory_that_is_not_empty_is_refused(tiny, tmp_path):
    (tmp_path / "mine").write_text("kept")
    done = subprocess.run(
        [sys.executable, tiny.with_name("chaos.py"), "--directory", tmp_path],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and "is not empty" in done.stderr
    assert (tmp_path / "mine").read_text() == "kept"
