"""Models that are to judge samples are looked for when a run starts."""

import json
import types

import numpy as np
import pytest
from peer_folders import own_lora, peer_folder

import md4_jax
from md4_jax.config import load as config
from md4_jax.config import runs
from md4_jax.config.judging import Others
from md4_jax.evals import judges
from md4_jax.model import judging
from md4_jax.options import CheckpointOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place

LORA = {"model.layers.0.self_attn.q_proj": 2}


def check(folder, is_causal=lambda key, asked: True):
    judges.check_source("evals.a.judge", str(folder), is_causal)


def test_a_folder_without_a_model_is_no_judge(tmp_path):
    said = "evals.a.judge=.*run holds neither a run with a checkpoint nor a model"
    with pytest.raises(UserError, match="evals.a.judge=.*run is no directory of a run"):
        check(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=said):
        check(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "30").mkdir()
    for name in ("run", "run/checkpoints/30"):
        check(tmp_path / name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    check(tmp_path / "model")


def test_a_run_without_a_checkpoint_is_missed_at_once(tmp_path):
    """One that has none, whether or not the directory of the checkpoints is there."""
    told = types.SimpleNamespace(checkpoint="newest")
    experiment = types.SimpleNamespace(eval=told, checkpoint=CheckpointOptions())
    for make in (lambda: None, (tmp_path / "checkpoints").mkdir):
        make()
        with pytest.raises(UserError, match="holds no checkpoint yet: train it first"):
            runs.check_checkpoint(experiment, place(tmp_path))


@pytest.mark.parametrize("at", ["run", "run/checkpoints/30"])
def test_a_run_that_is_not_causal_is_refused_at_once(at, tmp_path):
    (tmp_path / "run" / "checkpoints" / "30").mkdir(parents=True)
    is_causal = Others(None, judging.FOREIGN).is_causal
    for network in ({"causal": True}, {}):  # a network of the user's own may not say it
        config.store(place(tmp_path / "run"), {"network": network})
        check(tmp_path / at, is_causal)
    config.store(place(tmp_path / "run"), {"network": {"causal": False}})
    with pytest.raises(UserError, match=r"^evals.a.judge=.* is not causal: name a run or a model"):
        check(tmp_path / at, is_causal)


def test_a_folder_that_is_not_causal_is_refused_without_its_parameters(tmp_path, monkeypatch):
    is_causal = Others(None, judging.FOREIGN).is_causal
    folders = [peer_folder(tmp_path, name) for name in ("gpt2", "mdlm")]
    folders += [md4_jax.load(folder).save(tmp_path / f"of_{folder.name}") for folder in folders]
    monkeypatch.setattr(np, "frombuffer", None)  # by which arrays are read
    for folder in folders:
        if "gpt2" in folder.name:
            check(folder, is_causal)
        else:
            with pytest.raises(UserError, match="^evals.a.judge=.*mdlm is not causal"):
                check(folder, is_causal)


def test_an_adapter_alone_is_no_judge(tmp_path):
    adapter = own_lora(tmp_path / "lora", peer_folder(tmp_path, "qwen2"), LORA)
    said = "^evals.a.judge=.*lora holds an adapter alone, of "
    with pytest.raises(UserError, match=said):
        check(adapter, Others(None, judging.FOREIGN).is_causal)
    (adapter / "config.json").write_text(json.dumps({"model_type": "zebra"}))
    with pytest.raises(UserError, match="^evals.a.judge=.*lora"):
        check(adapter, Others(None, judging.FOREIGN).is_causal)
