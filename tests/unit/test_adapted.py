"""Diffusion models whose config.json has the name of another model, or of a left-to-right one."""

import json

import numpy as np
import pytest
from noisy_blocks import ADAPTED, of_blocks
from peer_folders import answers, peer_folder

import md4_jax
from md4_jax.protocols import UserError

CLOSE, SYMBOLS = 3e-5, 123  # of logits up to 12
# Of an I-DLM's config.json: a causal SDAR.
IDLM = dict(
    model_type="sdar", architectures=["SDARForCausalLM"], block_size=3, mask_token_id=123,
    use_regular_causal=True,
)  # fmt: skip


EUROBERT = dict(
    model_type="eurobert", architectures=["EuroBertForMaskedLM"], mask_token_id=5,
    classifier_pooling="late",
)  # fmt: skip


@pytest.mark.parametrize("changes", [{}, EUROBERT], ids=["iLLaDA", "EuroBERT"])
def test_a_llama_that_sees_both_sides_and_whose_mask_is_the_entry_5(changes, tmp_path, capsys):
    """transformers' EuroBertForMaskedLM gives the same answers."""
    told = answers("illada")
    folder = peer_folder(tmp_path, "llama", **told["config"] | changes)
    model, z = md4_jax.load(folder), np.asarray(told["z"])
    assert (z == 5).any()
    ours = np.where(z == 5, SYMBOLS, z - (z > 5))
    expected = np.delete(np.asarray(told["outputs"]), 5, axis=-1)
    np.testing.assert_allclose(model.logits(ours), expected, atol=CLOSE)
    assert model.config["objective"]["name"] == "md4" and model.domain.vocab_size == SYMBOLS
    exported = model.export(tmp_path / "exported")
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, exported))
    assert before == after
    np.testing.assert_array_equal(md4_jax.load(exported).logits(ours), model.logits(ours))
    assert "warning" not in capsys.readouterr().err


def test_illada_with_another_normalisation_is_refused(tmp_path):
    folder = peer_folder(tmp_path, "llama", model_type="illada", layer_norm_eps=1e-5)
    with pytest.raises(UserError, match="layer_norm_eps=1e-05; only None is supported"):
        md4_jax.load(folder)


def test_a_dream_of_blocks_is_dreamreasoner_which_has_no_shift(tmp_path):
    """Its code gives the same as SDAR's: a Qwen3 whose blocks see themselves and earlier ones."""
    names = dict(model_type="Dream", architectures=["DreamForCausalLM"])
    folder, told = peer_folder(tmp_path, "sdar", **names), answers("sdar")
    model = md4_jax.load(folder)
    assert model.config["objective"] == {"name": "block", "block": 4}
    found = of_blocks(model, told["z"], told["clean"])
    np.testing.assert_allclose(found, np.asarray(told["outputs"])[..., :SYMBOLS], atol=CLOSE)
    same = json.loads((model.export(tmp_path / "same") / "config.json").read_text())
    assert same == json.loads((folder / "config.json").read_text())
    other = md4_jax.load(folder, {"objective.block": 8}).export(tmp_path / "other")
    assert json.loads((other / "config.json").read_text())["model_type"] == "sdar"
    assert md4_jax.load(other).config["objective"]["block"] == 8


def test_an_i_dlm_is_the_left_to_right_model_that_its_sampler_draws_from(tmp_path, capsys):
    folder, told = peer_folder(tmp_path, "qwen3", **IDLM), answers("qwen3")
    model = md4_jax.load(folder)
    assert "does not know" not in capsys.readouterr().err
    assert model.config["objective"]["name"] == "autoregressive" and model.domain.vocab_size == 124
    clean = np.asarray(told["clean"])
    z = np.concatenate([np.full((len(clean), 1), 124), clean[:, :-1]], axis=1)
    found = model.logits(z)
    np.testing.assert_allclose(found, np.asarray(told["outputs"])[..., :124], atol=CLOSE)
    blocks = md4_jax.load(folder, ADAPTED | {"network.shifted": False, "objective.block": 4})
    exported = blocks.export(tmp_path / "exported")
    told = json.loads((exported / "config.json").read_text())
    assert told["model_type"] == "sdar" and "use_regular_causal" not in told
    assert md4_jax.load(exported).config["objective"] == {"name": "block", "block": 4}


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("qwen3", {"mask_token_id": 123}, r"\(mask_token_id=123\), but model_type='qwen3' is a"),
        ("llama", {"mask_token_id": 5}, "such as 'a2d-llama' of dLLM"),
        ("qwen3", {"architectures": ["Qwen3DLLMForCausalLM"]}, "class 'Qwen3DLLMForCausalLM', w"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "which is not known"),
        ("llada", {"model_type": "editflow-llada", "architectures": None}, "names editflow-llada"),
    ],
)
def test_what_is_not_the_model_of_its_model_type_is_refused(name, changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, name, **changes))


def test_a_mask_of_the_tokenizer_counts_too(tmp_path):
    folder = peer_folder(tmp_path, "qwen3")
    (folder / "tokenizer_config.json").write_text('{"mask_token": "<|special_3|>"}')
    with pytest.raises(UserError, match="config.json or the tokenizer names a mask"):
        md4_jax.load(folder)


def test_code_of_the_authors_own_is_named_in_a_warning(tmp_path, capsys):
    own = {"AutoModelForCausalLM": "modeling_other.Qwen3ForCausalLM"}
    md4_jax.load(peer_folder(tmp_path, "qwen3", auto_map=own))
    assert f"does not know: auto_map={own}" in capsys.readouterr().err
    md4_jax.load(peer_folder(tmp_path, "dream", auto_map=own))
    assert "does not know" not in capsys.readouterr().err
