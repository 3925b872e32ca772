"""Models with adapters and with parameters in bfloat16: loaded, imported, saved and merged."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import peer_folder
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.config import build, files
from md4_jax.data.domains import TextDomain
from md4_jax.data.tokenizers import Characters
from md4_jax.model import importing
from md4_jax.model.model import Model
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.sharding import path_name
from md4_jax.runtime.tensors import Tensors
from md4_jax.training import base
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.loop import abstract_state, fresh_state

Z = np.array([[3, 1, 125, 7, 125, 0], [5, 125, 2, 2, 9, 125]])
FACTS = {"commit": "unknown", "results": {}}
LORA = {"network.lora_rank": 4, "network.lora_alpha": 6.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return peer_folder(tmp_path_factory.mktemp("adapted"), "llada")


@pytest.fixture(scope="module")
def plain(folder):
    return md4_jax.load(folder)


@pytest.fixture(scope="module")
def adapted(folder):
    """The model with adapters that add something."""
    model = md4_jax.load(folder, config=LORA)
    rng = np.random.default_rng(0)

    def noisy(path, x):
        if "lora_b" not in path_name(path):
            return x
        return jnp.asarray(0.2 * rng.standard_normal(x.shape), jnp.float32)

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(noisy, model.params))


def types(model) -> set[str]:
    return {str(x.dtype) for x in jax.tree.leaves(model.params["network"])}


def names(model) -> set[str]:
    return {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(model.params)}


def test_a_published_model_with_fresh_adapters_is_the_same(folder, plain):
    model = md4_jax.load(folder, config=LORA)
    assert model.logits(Z, 0.3).tobytes() == plain.logits(Z, 0.3).tobytes()
    assert len(names(model) - names(plain)) == 14 and names(plain) < names(model)


def test_adapters_are_saved_and_read(adapted, plain, tmp_path):
    again = md4_jax.load(adapted.save(tmp_path / "saved"))
    expected = adapted.logits(Z, 0.3)
    assert again.logits(Z, 0.3).tobytes() == expected.tobytes()
    assert np.abs(expected - plain.logits(Z, 0.3)).max() > 0.05


def test_merged_models_compute_the_same_without_adapters(adapted, plain, tmp_path):
    folder = adapted.save(tmp_path / "merged", merged=True)
    merged = md4_jax.load(folder)
    assert names(merged) == names(plain) and merged.size == plain.size
    assert merged.config["network"]["lora_rank"] == 0
    np.testing.assert_allclose(merged.logits(Z, 0.3), adapted.logits(Z, 0.3), atol=2e-5)
    assert set(Tensors(folder)) == names(plain)


def test_only_adapters_can_be_merged(plain, tmp_path):
    with pytest.raises(
        UserError, match=r"merged=True merges .* has no adapters \(network.lora_rank=0"
    ):
        plain.save(tmp_path / "merged", merged=True)
    assert not (tmp_path / "merged").exists()


def test_a_saved_model_is_given_adapters(plain, tmp_path):
    saved = plain.save(tmp_path / "saved")
    model = md4_jax.load(saved, config=LORA)
    assert model.logits(Z, 0.3).tobytes() == plain.logits(Z, 0.3).tobytes()
    assert len(names(model) - names(plain)) == 14


def test_saved_adapters_keep_their_scale(adapted, tmp_path):
    adapted.save(tmp_path / "saved")
    alpha = adapted.config["network"]["lora_alpha"]
    assert md4_jax.load(tmp_path / "saved", {"network.lora_alpha": alpha}).step == adapted.step
    with pytest.raises(UserError, match="lora_alpha=160.0 would scale them by another factor"):
        md4_jax.load(tmp_path / "saved", {"network.lora_alpha": 160.0})


def test_saved_adapters_are_not_left_out_in_silence(adapted, tmp_path):
    """Neither all of them, nor one that the folder has lost."""
    saved = adapted.save(tmp_path / "saved")
    with pytest.raises(UserError, match="saved holds adapters, which network.lora_rank=0 would"):
        md4_jax.load(saved, config={"network.lora_rank": 0})
    arrays = load_file(saved / "model.safetensors")
    del arrays["network/blocks/attention/query/lora_b/kernel"]
    save_file(arrays, saved / "model.safetensors")
    with pytest.raises(UserError, match="holds no array 'network/blocks/attention/query/lora_b"):
        md4_jax.load(saved)


def test_all_parameters_of_a_model_that_is_used_may_be_bfloat16(folder, plain, tmp_path):
    """Half the bytes, and the logits of rounded parameters."""
    model = md4_jax.load(folder, config={"network.parameters": "bfloat16"})
    assert types(model) == {"bfloat16"} and types(plain) == {"float32"}
    told, expected = model.logits(Z, 0.3), plain.logits(Z, 0.3)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), plain.params)
    by_hand = dataclasses.replace(plain, params=rounded)
    np.testing.assert_allclose(told, by_hand.logits(Z, 0.3), atol=1e-5)
    assert 1e-4 < np.abs(told - expected).max() < 0.1
    again = md4_jax.load(model.save(tmp_path / "half"))
    assert types(again) == {"bfloat16"} and again.logits(Z, 0.3).tobytes() == told.tobytes()


def test_beside_float32_adapters_the_rest_is_bfloat16(folder, tmp_path):
    """However few adapters are trained."""
    config = {**LORA, "network.parameters": "bfloat16"}
    model = md4_jax.load(folder, config=config)
    kinds = {str(x.dtype) for x in jax.tree.leaves(model.params["network"]["blocks"])}
    assert kinds == {"float32", "bfloat16"}
    assert {n for n in names(model) if "lora" in n} == {
        path_name(p) for p, x in jax.tree_util.tree_leaves_with_path(model.params)
        if x.dtype == jnp.float32
    }  # fmt: skip
    few = md4_jax.load(folder, config={**config, "train.trainable": "query/lora"})
    assert few.logits(Z, 0.3).tobytes() == model.logits(Z, 0.3).tobytes()
    merged = md4_jax.load(model.save(tmp_path / "merged", merged=True))
    assert types(merged) == {"bfloat16"}


def imported(folder, tmp_path, **more):
    keys = {key: str(value) for key, value in more.items()}
    return importing.imported(str(folder), keys, Place(tmp_path / "run"))


@pytest.mark.slow
def test_an_imported_run_holds_the_base_once(folder, plain, tmp_path):
    model = imported(folder, tmp_path, **LORA)
    record = json.loads((tmp_path / "run" / base.FOLDER / base.RECORD).read_text())
    assert set(record["checksums"]) == names(plain)
    run = md4_jax.load(tmp_path / "run")
    assert run.step == 0 and run.logits(Z, 0.3).tobytes() == plain.logits(Z, 0.3).tobytes()
    host = json.loads((tmp_path / "run/checkpoints/0/host/metadata").read_text())
    kept = [name for part in host["checksums"].values() for name in part if "/blocks/" in name]
    assert len(kept) == 4 * 14 and all("lora" in name for name in kept)
    every = [name for part in host["checksums"].values() for name in part]
    assert not [name for name in every if "embedding" in name or "norm" in name]
    # A run is read in another type too, as long as it is not trained on.
    half = md4_jax.load(tmp_path / "run", config={"network.parameters": "bfloat16"})
    assert types(half) == {"float32", "bfloat16"} and types(model) == {"float32"}


@pytest.mark.campaign
def test_an_imported_run_of_a_model_with_tables_can_be_read(tmp_path):
    """Tables are in the average alone."""
    config = files.load("quickstart")
    config["network"] |= dict(size=16, depth=1, heads=2, hidden=32, tables=64, tables_hidden=4)
    config["data"] |= dict(length=32)
    experiment = build.experiment(config, TextDomain(Characters("abcdef"), 32))
    params = fresh_state(experiment).averaged
    counted = jax.tree.map(lambda x: x + 1, params["companion"])
    model = Model(experiment, {**params, "companion": counted}, 0, "", FACTS)
    run = Place(tmp_path / "run")
    importing.imported(str(model.save(tmp_path / "saved")), {}, run)
    checkpoints = Checkpoints(run / "checkpoints", experiment.checkpoint, read_only=True)
    state, _ = checkpoints.restore(abstract_state(experiment))
    checkpoints.close()
    chex.assert_trees_all_equal(state.ema["companion"], counted)
    assert state.params.keys() == {"network", "process"}


@pytest.mark.parametrize(
    "keys, said",
    [
        (
            {"network.parameters": "bfloat16"},
            "network.parameters='bfloat16' is only for param",
        ),
        ({**LORA, "train.trainable": "head"}, "trainable='head' matches none of the adapters"),
        ({"train.trainable": "nowhere"}, "trainable='nowhere' matches none of the network's 12"),
    ],
)
def test_runs_that_could_not_be_trained_are_not_imported(keys, said, folder, tmp_path):
    with pytest.raises(UserError, match=said):
        imported(folder, tmp_path, **keys)
    assert not (tmp_path / "run").exists()
