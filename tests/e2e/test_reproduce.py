"""tools/reproduce.py: tables from runs of the program, kept, continued and shown on a page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture
def reproduce(environment, tmp_path):
    """Runs the command with its tables in tmp_path/results; the process that ended."""

    def reproduce(*words):
        command = [sys.executable, "tools/reproduce.py", "--out", tmp_path / "results"]
        command += ["--workdir", tmp_path / "runs", *words]
        return subprocess.run(
            list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True
        )

    return reproduce


@pytest.mark.campaign
def test_a_quick_table_is_made_kept_continued_and_shown(reproduce, tmp_path):
    ended = reproduce("--quick", "--only", "sampling")
    assert ended.returncode == 0, ended.stderr
    path, page = tmp_path / "results" / "sampling.json", tmp_path / "results.md"
    made = json.loads(path.read_text())
    assert made["finished"] and made["quick"] and made["machine"]["cores"] > 0
    assert len(made["commit"].rstrip("+")) == 40 and str(tmp_path) not in path.read_text()
    steps, four = made["rows"]
    row = made["rows"][four]
    assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
    assert row["commands"][0].startswith("python -m md4_jax --mode=bench --config=configs/")
    text = page.read_text()
    assert "A quick run" in text and f"| {four} | {row['network_evaluations']:,.1f} |" in text
    assert "Not measured yet: recipes, families, speed, entropy" in text

    assert "sampling: kept" in reproduce("--quick", "--only", "sampling").stdout
    assert json.loads(path.read_text()) == made
    # What is missing of a table that was interrupted is made, and nothing else.
    del made["rows"][four]
    path.write_text(json.dumps({**made, "finished": False}))
    said = reproduce("--quick", "--only", "sampling").stdout
    assert f"sampling: {four} ..." in said and f"sampling: {steps} ..." not in said
    continued = json.loads(path.read_text())
    assert continued["finished"] and continued["rows"][steps] == made["rows"][steps]

    page.write_text("")
    assert reproduce("--render").returncode == 0
    assert page.read_text().startswith("# Results") and f"| {steps} |" in page.read_text()


@pytest.mark.campaign
def test_what_cannot_be_run_stands_in_the_table_with_the_reason(reproduce, tmp_path):
    ended = reproduce("--quick", "--only", "recipes")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "results" / "recipes.json").read_text())["rows"]
    assert rows["text8_fast"] == {
        "skipped": "needs --data PATH, the file of text8 or of its beginning"
    }
    (run,) = rows["quickstart"]["runs"]
    assert run["step"] == 30 and run["bits_per_token_se"] > 0
    text = (tmp_path / "results.md").read_text()
    assert f"| quickstart | <= {run['bits_per_token']:.3f} +- " in text
    assert "| text8_fast | needs --data PATH" in text
    assert "recipes: text8_fast ..." in reproduce("--quick", "--only", "recipes").stdout


@pytest.mark.parametrize(
    "words, message",
    [
        (("--only", "speeds"), "unknown table speeds; known: recipes, families, speed"),
        (("--data", "nowhere"), "--data nowhere is no file"),
    ],
)
def test_impossible_arguments(reproduce, tmp_path, words, message):
    ended = reproduce(*words)
    assert ended.returncode == 2 and message in ended.stderr
    assert not list(tmp_path.iterdir())


def test_tables_have_no_paths_of_this_machine(monkeypatch, tmp_path):
    """Paths given with '..' from the checkout, as are those of data beside it."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import program
    import reproduce
    import tables

    def rows(settings):
        words = [f"--config.data.path={settings.data}", f"--workdir={settings.workdir / 'seed0'}"]
        return [tables.Row("one", lambda: {"commands": [program.written(words)]})]

    made = tables.TABLES["recipes"]._replace(rows=rows)
    monkeypatch.setitem(tables.TABLES, "recipes", made)
    monkeypatch.setattr(reproduce, "page", lambda out: "")
    (tmp_path / "text8").write_text("of the")
    beside = os.path.relpath(tmp_path, ROOT)
    words = f"--only recipes --data {beside}/text8 --workdir {beside}/runs --out {tmp_path}/results"
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *words.split()])
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.chdir(ROOT)
    reproduce.main()
    text = (tmp_path / "results" / "recipes.json").read_text()
    (command,) = json.loads(text)["rows"]["one"]["commands"]
    assert "--config.data.path=text8 --workdir=runs/reproduce/" in command
    assert ".." not in text and str(tmp_path) not in text


def test_the_chain_has_the_entropy_that_its_text_is_compared_with(monkeypatch, tmp_path):
    """The mean of -log p over its own draws is the entropy, worked out from the matrix."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import chain
    import numpy as np

    law, log = chain.stationary(), np.log(chain.CHAIN)
    np.testing.assert_allclose(law @ chain.CHAIN, law, atol=1e-12)
    first = -(law * np.log(law)).sum()
    rest = -(law[:, None] * chain.CHAIN * log).sum()
    entropy = (first + (chain.LENGTH - 1) * rest) / chain.LENGTH
    keys, nats = chain.write(tmp_path / "chain.txt", 10, 20_000)
    assert abs(nats - entropy) < 4 * 0.25 / np.sqrt(20_000)
    text = (tmp_path / "chain.txt").read_text()
    assert len(text) == (10 + chain.LENGTH + 20_000) * chain.LENGTH and set(text) == set("abcd")
    assert f"data.test={20_000 * chain.LENGTH}" in keys
