"""The notebooks in docs/ run from the first cell to the last, on a run of a few steps.

Jupyter is not needed: a cell is Python, the start of the program, or the text of a file.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
# As a reader takes them: the second and the third use the run of the first.
ORDER = ("train_and_sample", "score_and_infill", "own_objective")
FLAGS = "--config {} --config.data.length=32 --config.evals.test.limit=64"
PROGRAM, FILE = "!python -m md4_jax ", "%%writefile "


def cells(name: str) -> list[dict]:
    """The cells of a notebook that hold code."""
    found = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def execute(name: str, flags: str, run) -> None:
    names: dict = {}
    for cell in cells(name):
        source = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", ()):
            names["flags"] = flags
        elif source.startswith(FILE):
            file, _, text = source.removeprefix(FILE).partition("\n")
            Path(file).write_text(text)
        elif source.startswith(PROGRAM):
            ended = run(*shlex.split(source.removeprefix(PROGRAM).format(**names)))
            assert ended.code == 0, ended
        else:
            exec(compile(source, name, "exec"), names)


def test_every_notebook_is_here_and_has_no_output():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(ORDER)
    code = [cell for name in ORDER for cell in cells(name)]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)


# Jupyter shows the picture of the last line of a cell and closes its file.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO")
@pytest.mark.campaign
def test_the_notebooks_run(tmp_path, tiny, run, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    said = {}
    for name in ORDER:
        execute(name, FLAGS.format(tiny), run)
        said[name] = capsys.readouterr().out
    del sys.modules["focal"]
    assert "ROMEO:" in said["train_and_sample"] and "2 calls: " in said["train_and_sample"]
    assert "its letters shuffled" in said["score_and_infill"]
    assert "not a bound of -log p; the objective itself does not claim" in said["own_objective"]
    for model in ("focal loss   <= ", "quickstart   <= "):
        assert model in said["own_objective"]
