"""Models that are to judge samples are looked for when a run starts."""

import types

import pytest

from md4_jax.config import runs
from md4_jax.evals import judges
from md4_jax.options import CheckpointOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place


def test_a_folder_without_a_model_is_no_judge(tmp_path):
    said = "evals.a.judge=.*run holds neither a run with a checkpoint nor a model"
    with pytest.raises(UserError, match="evals.a.judge=.*run is no directory of a run"):
        judges.check_source("evals.a.judge", str(tmp_path / "run"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=said):
        judges.check_source("evals.a.judge", str(tmp_path / "run"))
    (tmp_path / "run" / "checkpoints" / "30").mkdir()
    for name in ("run", "run/checkpoints/30"):
        judges.check_source("evals.a.judge", str(tmp_path / name))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    judges.check_source("evals.a.judge", str(tmp_path / "model"))


def test_a_run_without_a_checkpoint_is_missed_at_once(tmp_path):
    """One that has none, whether or not the directory of the checkpoints is there."""
    told = types.SimpleNamespace(checkpoint="newest")
    experiment = types.SimpleNamespace(eval=told, checkpoint=CheckpointOptions())
    for make in (lambda: None, (tmp_path / "checkpoints").mkdir):
        make()
        with pytest.raises(UserError, match="holds no checkpoint yet: train it first"):
            runs.check_checkpoint(experiment, place(tmp_path))
