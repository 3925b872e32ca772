"""Published checkpoints with something that the network would ignore."""

import numpy as np
import pytest
from peer_folders import answers, peer_folder
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.protocols import UserError


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
    ],
)
def test_an_array_of_the_model_that_the_network_lacks_is_refused(name, array, size, tmp_path):
    """It would change the outputs, and config.json need not tell of it."""
    folder = with_arrays(peer_folder(tmp_path, name), **{array: np.ones(size, np.float32)})
    with pytest.raises(UserError, match=rf"has the array '{array}', but this kind of .*{name}"):
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
