"""CoDA, a Qwen3 that sees both sides. States of its decoder: test_published_decoders.py."""

import json

import numpy as np
import pytest
from peer_folders import answers, peer_folder
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.protocols import UserError

TOLD = answers("coda")
Z = np.asarray(TOLD["z"])
OUTPUTS = np.asarray(TOLD["outputs"])[..., :123]
CLOSE = 1e-5  # of logits up to 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return md4_jax.load(peer_folder(tmp_path_factory.mktemp("coda"), "coda"))


def test_its_logits_are_those_of_its_own_code(model):
    assert model.domain.vocab_size == 123 == model.experiment.process.mask_id
    assert model.config["objective"]["name"] == "md4" and model.config["network"]["shifted"]
    np.testing.assert_allclose(model.logits(Z), OUTPUTS, atol=CLOSE)


def test_its_head_is_not_tied_whatever_config_json_says(tmp_path):
    """Its class ties none, and its default for tie_word_embeddings is True."""
    folder = peer_folder(tmp_path, "coda", tie_word_embeddings=True)
    np.testing.assert_allclose(md4_jax.load(folder).logits(Z), OUTPUTS, atol=CLOSE)
    arrays = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in arrays.items() if "head" not in k}, folder / "model.safetensors")
    with pytest.raises(UserError, match="has no 'lm_head.weight': CoDA's code reads it"):
        md4_jax.load(folder)


def test_keys_that_config_json_lacks_have_the_values_of_its_code(tmp_path):
    model = md4_jax.load(peer_folder(tmp_path / "base", "coda", rope_theta=None))
    np.testing.assert_allclose(model.logits(Z), OUTPUTS, atol=CLOSE)
    with pytest.raises(UserError, match="the mask is 151669"):
        md4_jax.load(peer_folder(tmp_path / "mask", "coda", mask_token_id=None))


def test_options_of_its_training_are_known(tmp_path, capsys):
    assert TOLD["config"]["mask_block_sizes"] and TOLD["config"]["attention_kernel"]
    md4_jax.load(peer_folder(tmp_path / "known", "coda"))
    assert "does not know" not in capsys.readouterr().err
    md4_jax.load(peer_folder(tmp_path / "unknown", "coda", logits_scale=2))
    assert "does not know: logits_scale=2. If" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changed, kind",
    [
        ({"network.shifted": False}, "a2d-qwen3"),
        ({"objective.name": "block", "objective.block": 4}, "a2d-qwen3"),
        ({"network.shifted": False, "objective.name": "block", "objective.block": 4}, "sdar"),
    ],
)
@pytest.mark.cases(1)
def test_what_is_no_coda_any_more_leaves_with_a_head_of_its_own(changed, kind, tmp_path):
    """Other code ties the head where config.json says so."""
    own = md4_jax.load(peer_folder(tmp_path, "coda", tie_word_embeddings=True), config=changed)
    folder = own.export(tmp_path / "exported")
    told = json.loads((folder / "config.json").read_text())
    assert told["model_type"] == kind and told["tie_word_embeddings"] is False
    assert "auto_map" not in told
    again = md4_jax.load(folder)
    assert again.config["network"] == own.config["network"]
    np.testing.assert_array_equal(again.logits(Z), own.logits(Z))
