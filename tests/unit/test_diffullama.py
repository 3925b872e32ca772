"""DiffuLLaMA: with the names of its class, and as the Llama that its authors have published."""

import json

import numpy as np
import pytest
from peer_folders import answers, peer_folder, trained_on
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.protocols import UserError

CLOSE = 1e-5
MASK, SYMBOLS = 81, 123
ADAPTED = {
    "objective.name": "md4", "network.causal": False, "network.shifted": True,
    "sample.name": "ancestral",
}  # fmt: skip


def arrays(folder) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def told(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def as_a_llama(directory, **changes):
    """A DiffuLLaMA under the names of a Llama, as `save_pretrained` of transformers writes it."""
    folder = peer_folder(directory, "diffullama", **changes)
    held = {
        name.replace("denoise_model.", "model.").replace("embed_", "model.embed_"): array
        for name, array in arrays(folder).items()
    }
    assert "model.embed_tokens.weight" in held and "model.norm.weight" in held
    save_file(held, folder / "model.safetensors")
    return folder


def agrees(model) -> None:
    """Its logits are theirs, without the entry of the mask, which is no symbol."""
    own, z = answers("diffullama"), np.asarray(answers("diffullama")["z"])
    z = np.where(z == MASK, SYMBOLS, z - (z > MASK))
    expected = np.delete(np.asarray(own["outputs"]), MASK, axis=-1)
    np.testing.assert_allclose(model.logits(z), expected, atol=CLOSE)
    network = model.config["network"]
    assert network["shifted"] and not network["causal"]
    assert model.domain.vocab_size == SYMBOLS == model.experiment.process.mask_id
    assert model.config["objective"]["name"] == "md4"


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.cases(1)
def test_the_logits_are_those_of_its_code(scan, tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, "diffullama"), {"network.scan_blocks": scan})
    agrees(model)
    assert np.isfinite(model.score("abab", draws=2).nats).all()
    assert model.sample(num=1, steps=2, length=4).tokens.shape == (1, 4)


def test_it_goes_back_as_it_came(tmp_path):
    for folder in (peer_folder(tmp_path, "diffullama"), as_a_llama(tmp_path / "llama")):
        model = md4_jax.load(folder)
        agrees(model)
        exported = model.export(tmp_path / "exported" / str(len(folder.parts)))
        assert told(exported) == told(folder)
        held, found = arrays(folder), arrays(exported)
        assert held.keys() == found.keys()
        held["lm_head.weight"][MASK] = 0.0  # no parameter stands for it
        assert all(np.array_equal(held[name], found[name]) for name in held)


def test_the_config_of_the_published_model_is_that_of_a_llama(tmp_path):
    """So it is an autoregressive model, unless the user says what it is."""
    names = {"architectures": ["LlamaForCausalLM"], "mask_token_id": None, "vocab_size": 124}
    folder = as_a_llama(tmp_path, **names)
    assert md4_jax.load(folder).config["objective"]["name"] == "autoregressive"
    model = md4_jax.load(folder, ADAPTED | {"tokenizer.mask": MASK})
    agrees(model)
    exported = model.export(tmp_path / "exported")
    assert told(exported)["architectures"] == ["DiscreteDiffusionModel"]
    assert (told(exported)["model_type"], told(exported)["mask_token_id"]) == ("llama", MASK)
    assert arrays(exported).keys() == arrays(folder).keys()
    agrees(md4_jax.load(exported))


def test_the_mask_is_that_of_the_tokenizer_or_of_their_code(tmp_path):
    folder = peer_folder(tmp_path, "diffullama", mask_token_id=None)
    with pytest.raises(UserError, match="the mask is 811 .*, but must be below .* of 124"):
        md4_jax.load(folder)
    name = md4_jax.load(folder, {"tokenizer.mask": 80}).domain.tokenizer.decode([80])
    for file, entry in (
        ("special_tokens_map.json", name),
        ("tokenizer_config.json", {"content": name}),
    ):
        (folder / file).write_text(json.dumps({"mask_token": entry}))
        agrees(md4_jax.load(folder))
        (folder / file).unlink()
    named = peer_folder(tmp_path / "named", "diffullama")
    (named / "tokenizer_config.json").write_text(json.dumps({"mask_token": "a"}))
    agrees(md4_jax.load(named))  # config.json goes before
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json is not readable JSON"):
        md4_jax.load(folder)


def test_what_their_code_does_not_know_is_written_under_keys_of_others(tmp_path):
    """A DiffuLLaMA that learnt to write in blocks, and one without a shift."""
    folder = peer_folder(tmp_path, "diffullama")
    blocks = {"objective.name": "block", "objective.block": 8}
    for shifted in (True, False):
        model = md4_jax.load(folder, blocks | {"network.shifted": shifted})
        exported = model.export(tmp_path / f"exported_{shifted}")
        assert told(exported)["block_size"] == 8
        assert told(exported).get("right_shift_logits", True) == shifted
        again = md4_jax.load(exported)
        assert again.config["network"]["shifted"] == shifted
        assert again.config["objective"] == model.config["objective"]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rope_scaling": {"type": "linear"}}, "scales rotary positions by 'linear'"),
        ({"hidden_size": 64}, "says hidden_size=64, but its arrays have 32"),
        ({"num_hidden_layers": 3}, "says num_hidden_layers=3, but its arrays have 2"),
        ({"num_attention_heads": None}, "config.json lacks num_attention_heads"),
    ],
)
def test_what_is_not_known_is_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, "diffullama", **changes))


def test_biases_are_refused(tmp_path):
    folder = peer_folder(tmp_path, "diffullama")
    name = "denoise_model.layers.0.mlp.gate_proj.bias"
    save_file(arrays(folder) | {name: np.zeros(48, np.float32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"biases '{name}'"):
        md4_jax.load(folder)


@pytest.mark.campaign
def test_training_goes_on(tmp_path):
    model = md4_jax.load(trained_on(peer_folder(tmp_path, "diffullama"), tmp_path, {}))
    again = md4_jax.load(model.export(tmp_path / "exported"))
    z = [[0, 5, SYMBOLS, 1]]
    np.testing.assert_allclose(again.logits(z), model.logits(z), atol=1e-6)
