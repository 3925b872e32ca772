"""Each file operation of a run fails once; tests/e2e/every_operation.py is the whole campaign."""

import json
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.campaign


@pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler and Linux"
)
@pytest.mark.parametrize(
    "every, faults",
    [(80, "kill,EIO"), (1, "kill,torn,ordered,strict,reordered,EIO,ENOSPC")],
)
def test_operations_that_fail(every, faults, tiny, tmp_path):
    first = 300 if every > 1 else 0
    words = ["--directory", tmp_path / "runs", "--every", every, "--first", first]
    words += ["--faults", faults]
    done = subprocess.run(
        [sys.executable, tiny.with_name("every_operation.py"), *map(str, words)],
        capture_output=True, text=True, timeout=300 if every > 1 else 40_000,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    count = json.loads((tmp_path / "runs" / "report.json").read_text())["outcomes"]
    assert count.keys() == set(faults.split(","))
    assert count["kill"]["equal bit for bit"] >= 2
    assert any("equal bit for bit" in what for what in count["EIO"])
