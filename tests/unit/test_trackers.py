"""Trackers of a run: what they are sent, and that none of them ends training."""

import functools
import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from events import events_of
from PIL import Image

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place
from md4_jax.training.trackers import TRACKERS, Tracked, Trackers, check_installed
from md4_jax.training.writers import Writer, read_rows, tag

CONFIG = {"train": {"seed": 3}, "log": {"trackers": "wandb"}}


@pytest.fixture
def wandb(monkeypatch):
    """A module that is imported as wandb."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "wandb_stand_in")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    yield importlib.import_module("wandb")
    del sys.modules["wandb"]


def opened(workdir, names=("wandb",), step=0, say=print) -> Writer:
    workdir = place(workdir)
    workdir.mkdir(exist_ok=True)
    make = functools.partial(Trackers, list(names), Tracked(workdir, CONFIG, step), say)
    return Writer(workdir, resume_step=step, trackers=make)


def test_a_run_at_wandb_is_sent_its_config_and_every_finite_number(tmp_path, wandb):
    writer = opened(tmp_path / "first")
    writer.write(10, {"loss": np.float32(2.5), "se": math.nan, "note": "text"})
    Image.new("RGB", (4, 3)).save(tmp_path / "grid.png")
    writer.picture(20, "samples", str(tmp_path / "grid.png"))
    (tmp_path / "texts.txt").write_text("a <b>\n", encoding="utf-8")
    writer.text(20, "samples", str(tmp_path / "texts.txt"))
    writer.close()
    (_, options), metric, row, (_, picture), (_, texts), end = wandb.told
    assert options["config"] == CONFIG and options["name"] == "first"
    assert (options["project"], options["resume"]) == ("md4_jax", "allow")
    assert options["dir"] == str(tmp_path / "first")
    assert metric == ("define_metric", "*", "step")
    assert row == ("log", {"step": 10, "train/loss": 2.5})
    assert picture["step"] == 20 and picture["samples"].shape == (3, 4, 3)
    assert texts["samples"].text == "<pre>a &lt;b&gt;\n</pre>"
    assert end == ("finish", 0)


def test_numbers_stand_in_groups():
    names = ("train_bits_per_token", "skipped", "validation/bits_per_token", "samples/evaluations")
    assert [tag(name) for name in names] == [
        "train/bits_per_token",
        "train/skipped",
        "validation/bits_per_token",
        "samples/evaluations",
    ]


def test_tensorboard_shows_numbers_config_texts_and_pictures(tmp_path):
    writer = opened(tmp_path / "run", ("tensorboard",))
    writer.write(10, {"train_loss_bits": 2.5, "validation/bits_per_token": 3.0})
    (tmp_path / "texts.txt").write_text("--- sample 0 ---\nto be\n", encoding="utf-8")
    writer.text(10, "samples", str(tmp_path / "texts.txt"))
    Image.new("RGB", (4, 3)).save(tmp_path / "grid.png")
    writer.picture(10, "digits", str(tmp_path / "grid.png"))
    writer.flush()  # before a checkpoint, after which a kill must lose none of them
    shown = {}
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    for event in events_of(file):
        for value in event.summary.value:
            shown[value.tag] = (event.step, value)
    numbers = {tag: (step, v.simple_value) for tag, (step, v) in shown.items()}
    assert numbers["train/loss_bits"] == (10, 2.5)
    assert numbers["validation/bits_per_token"] == (10, 3.0)
    texts = {
        tag: v.tensor.string_val[0].decode() for tag, (_, v) in shown.items() if v.tensor.string_val
    }
    config = "".join(
        line.removeprefix("    ") for line in texts["config/text_summary"].splitlines()
    )
    assert json.loads(config) == CONFIG
    assert texts["samples/text_summary"] == "    --- sample 0 ---\n    to be\n"
    assert (shown["digits"][1].image.width, shown["digits"][1].image.height) == (4, 3)
    writer.close()


def test_a_resumed_run_goes_on_in_the_same_run_at_wandb(tmp_path, wandb):
    for step in (0, 7):
        opened(tmp_path / "a", step=step).close()
    opened(tmp_path / "b").close()
    first, second, other = (fact[1]["id"] for fact in wandb.told if fact[0] == "init")
    assert first == second != other
    assert json.loads((tmp_path / "a" / "wandb.json").read_text()) == {"id": first}


def test_a_run_that_ends_by_an_error_is_told_so(tmp_path, wandb):
    with pytest.raises(ValueError):
        try:
            writer = opened(tmp_path)
            raise ValueError
        finally:
            writer.close()
    assert wandb.told[-1] == ("finish", 1)


class Failing:
    """A tracker that fails when it is sent its second row."""

    def __init__(self, run):
        self.rows = 0

    def write(self, step, numbers):
        self.rows += 1
        if self.rows == 2:
            raise ConnectionError("no route")

    def flush(self):
        pass


class Closed:
    """A tracker that cannot be opened."""

    def __init__(self, run):
        raise RuntimeError("log in first")


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(tmp_path, monkeypatch, wandb):
    monkeypatch.setitem(TRACKERS, "failing", Failing)
    monkeypatch.setitem(TRACKERS, "closed", Closed)
    said = []
    writer = opened(tmp_path, ("failing", "closed", "wandb"), say=said.append)
    for step in (1, 2, 3, 4):
        writer.write(step, {"a": 0.5})
    writer.close()
    assert [s.split(":")[0] for s in said] == ["warning"] * 2
    assert "closed of log.trackers failed" in said[0] and "RuntimeError: log in first" in said[0]
    assert "failing of log.trackers failed" in said[1] and "no route" in said[1]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [fact[1]["step"] for fact in wandb.told if fact[0] == "log"] == [1, 2, 3, 4]


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    check_installed("tensorboard")
    check_installed("")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()  # as runs at W&B leave it; it is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="log.trackers=tensorboard,wandb needs .* install wandb"):
        check_installed("tensorboard,wandb")


@pytest.mark.slow
def test_wandb_itself_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="it needs pip install -e '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said = []
    for step in (0, 10):
        writer = opened(tmp_path / "run", ("tensorboard", "wandb"), step, said.append)
        writer.write(step + 10, {"validation/bits_per_token": 2.25})
        writer.close()
    wandb.teardown()  # its own process has written all
    assert said == []
    kept = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    files = list((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{kept}.wandb"))
    assert files and all(b"validation/bits_per_token" in file.read_bytes() for file in files)
