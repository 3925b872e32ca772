"""Published checkpoints with something that the network would ignore."""

import json
import re

import numpy as np
import pytest
from peer_folders import TOLD, answers, peer_folder
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.model import peers, surplus
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place
from md4_jax.runtime.tensors import Tensors


def with_arrays(folder, **more):
    """The folder, with more arrays, or others in place of its own."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | more, file)
    return folder


@pytest.mark.parametrize(
    "name, array, size",
    [
        ("dream", "lm_head.bias", 128),
        ("dream", "model.layers.1.self_attn.o_proj.bias", 32),
        ("dream", "model.layers.0.post_feedforward_layernorm.weight", 32),
        ("llada", "model.transformer.blocks.0.q_proj.bias", 32),
        ("mdlm", "backbone.blocks.1.attn_qkv.bias", 96),
        ("llada", "remask.proj.weight", 32),
    ],
)
def test_an_array_of_the_model_that_the_network_lacks_is_refused(name, array, size, tmp_path):
    """It would change the outputs, and config.json need not tell of it."""
    folder = with_arrays(peer_folder(tmp_path, name), **{array: np.ones(size, np.float32)})
    with pytest.raises(UserError, match=rf"has the array '{array}', but this kind of .*{name}"):
        md4_jax.load(folder)


@pytest.mark.parametrize("kind", TOLD)
def test_no_array_is_left_out_in_silence(kind, tmp_path):
    """Beside the trunk, in a part of its own, in a layer or at the head: each is named."""
    folder = place(peer_folder(tmp_path, kind))
    told = json.loads((folder / "config.json").read_text())
    held = Tensors(folder)
    peer = peers.peer(peers.with_mask(told, folder), held)
    surplus.check_used(held, peer, [name for name in held if not surplus.IDLE.fullmatch(name)])
    first = min(name for name in held if re.search(r"[._/]\d+[./]", name))
    layer = re.match(r".*?[._/]\d+[./]", first)[0]
    trunk = first.partition(".")[0]
    for name in ("extra", "control.proj.weight", f"{trunk}.extra.weight", f"{layer}extra.weight"):
        more = with_arrays(folder, **{name: np.ones((2, 8200), np.float32)})
        with pytest.raises(UserError, match=rf"has the array '{re.escape(name)}', but this kind"):
            surplus.check_used(Tensors(more), peer, list(held))
        save_file({n: held[n] for n in held}, folder / "model.safetensors")


def test_a_model_without_its_head_is_refused(tmp_path):
    """An embedder would be read as if its head were tied to the embedding."""
    folder = peer_folder(tmp_path, "llama")
    held = load_file(folder / "model.safetensors")
    del held["lm_head.weight"]
    save_file(held, folder / "model.safetensors")
    with pytest.raises(UserError, match="has no array 'lm_head.weight', though .* a classifier"):
        md4_jax.load(folder)


def test_angles_and_arrays_of_other_parts_are_no_matter(tmp_path):
    angles, head = np.ones(4, np.float32), np.ones((2, 32), np.float32)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = with_arrays(peer_folder(tmp_path, "dream"), **{name: angles, "score.weight": head})
    told = answers("dream")
    expected = np.asarray(told["outputs"])[..., :123]
    np.testing.assert_allclose(md4_jax.load(folder).logits(told["z"]), expected, atol=3e-5)


@pytest.mark.parametrize("said", [{"quantization_config": {"quant_method": "bitsandbytes"}}, {}])
def test_quantised_matrices_are_refused(said, tmp_path):
    """Their numbers are those of the matrix divided by a scale in another array."""
    name = "model.layers.0.mlp.up_proj.weight"
    matrix = load_file(peer_folder(tmp_path / "plain", "dream") / "model.safetensors")[name]
    scale = np.abs(matrix).max(axis=1, keepdims=True) / 127
    held = {name: np.round(matrix / scale).astype(np.int8), f"{name}_scale": scale}
    folder = with_arrays(peer_folder(tmp_path, "dream", **said), **held)
    how = "bitsandbytes" if said else "an unnamed method"
    with pytest.raises(UserError, match=rf"is quantised \({how}\): its array '{name}' .* I8"):
        md4_jax.load(folder)


@pytest.mark.parametrize("name", TOLD)
def test_the_keys_of_published_configs_are_known(name, tmp_path):
    folder = peer_folder(tmp_path, name)
    told = json.loads((folder / "config.json").read_text())
    assert not peers.peer(told, Tensors(place(folder))).unread


def test_keys_that_nothing_reads_are_named(tmp_path, capsys):
    """They may be options of the network; those that are off, or that only train, are not."""
    off = {"logit_cap": None, "use_gate": False, "initializer_range": 0.5, "top_p": 0.9}
    folder = peer_folder(tmp_path, "dream", residual_multiplier=0.22, **off)
    md4_jax.load(folder)
    said = capsys.readouterr().err
    assert "keys that md4_jax does not know: residual_multiplier=0.22. If the network" in said


@pytest.mark.parametrize(
    "name, section, key",
    [
        ("e2d2", "backbone_config", "rope_scaling"),
        ("diffusiongemma", "text_config", "logits_scaling"),
        ("qwen2", "rope_parameters", "attention_temperature"),
    ],
)
def test_keys_within_sections_are_named(name, section, key, tmp_path):
    folder = peer_folder(tmp_path, name)
    told = json.loads((folder / "config.json").read_text())
    told[section] = {**(told.get(section) or {}), key: 2.0}
    unread = peers.peer(told, Tensors(place(folder))).unread
    assert unread == {f"{section}.{key}": 2.0}
