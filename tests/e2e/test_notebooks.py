"""The notebooks in docs/ run from the first cell to the last, on a run of a few steps."""

import os
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
# As a reader takes them: the second and the third use the run of the first.
ORDER = ("train_and_sample", "score_and_infill", "own_objective")
FLAGS = (
    "--config {tiny} --config.data.length=32 --config.network.time_conditioning=False "
    "--config.evals.test.limit=64"
)


def read(name: str):
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def test_every_notebook_is_here_and_has_no_output():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(ORDER)
    code = [cell for name in ORDER for cell in read(name).cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
def test_the_notebooks_run(tmp_path, tiny, environment):
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    paths = [str(Path(sys.executable).parent), environment["PATH"]]
    variables = environment | {"PATH": os.pathsep.join(paths)}
    place = {"metadata": {"path": str(tmp_path)}}
    said = {}
    for name in ORDER:
        notebook = read(name)
        for cell in notebook.cells:
            if "parameters" in cell.metadata.get("tags", ()):
                cell.source = f"flags = {FLAGS.format(tiny=tiny)!r}"
        client = nbclient.NotebookClient(notebook, timeout=300, resources=place)
        client.execute(env=variables)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        said[name] = "".join(output.get("text", "") for output in outputs)
    assert "ROMEO:" in said["train_and_sample"] and "calls: " in said["train_and_sample"]
    assert "its letters shuffled" in said["score_and_infill"]
    assert "not a bound of -log p; the objective says itself" in said["own_objective"]
    assert "focal loss   <= " in said["own_objective"]
    assert "quickstart   <= " in said["own_objective"]
