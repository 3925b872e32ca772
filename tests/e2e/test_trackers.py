"""A run with trackers and a trace: it goes on where it was, and no number changes."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from md4_jax.training import trackers
from md4_jax.training.writers import tag

STAND_IN = Path(__file__).parents[1] / "wandb_stand_in"


@pytest.mark.slow
def test_a_resumed_run_with_a_tracker_and_a_trace(copy, trained, run, rows, same_run, monkeypatch):
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for step in ("28", "30"):
        shutil.rmtree(copy / "checkpoints" / step)
    keys = ("--config.log.trackers=tensorboard,wandb", "--config.log.profile=23,24")
    ended = run("--workdir", copy, *keys)
    assert ended.code == 0, ended
    same_run(copy, trained)
    assert f"profile of steps 23 to 24: {copy / 'profile'}" in ended.err
    assert len(list((copy / "profile").rglob("*.xplane.pb"))) == 1
    told = importlib.import_module("wandb").told
    del sys.modules["wandb"]
    assert told[0][1]["config"]["train"]["num_steps"] == 30
    sent = [fact[1] for fact in told if fact[0] == "log"]
    sent = [{k: v for k, v in row.items() if k != "train/tokens_per_second"} for row in sent]
    written = [row for row in rows(trained) if row["step"] > 21]
    assert sent == [{k if k == "step" else tag(k): v for k, v in row.items()} for row in written]
    assert told[-1] == ("finish", 0)


def test_a_tracker_that_is_missing_is_said_before_anything_is_written(
    tmp_path, tiny, refused, monkeypatch
):
    monkeypatch.setattr(trackers.WandB, "package", "wandb_that_is_not_there")
    keys = ("--workdir", tmp_path / "run", "--config.log.trackers=wandb")
    said = refused("--config", tiny, *keys)
    assert "log.trackers=wandb needs a package: pip install wandb_that_is_not_there" in said
    assert not (tmp_path / "run").exists()
