"""LFM2: logits by transformers' layers, convolutions, the way back, and left-to-right models."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import answers, peer_folder, trained_on
from safetensors.numpy import load_file, save_file
from tiny_networks import built, logits

import md4_jax
from md4_jax.networks.lfm2 import Lfm2
from md4_jax.networks.short_convolution import convolved
from md4_jax.protocols import UserError

CLOSE, MASK, SYMBOLS, ENTRIES = 4e-5, 122, 123, 124  # of logits up to 13
KINDS = ["conv", "full_attention", "conv", "full_attention", "conv"]


def ours(entries) -> np.ndarray:
    """Tokens with our numbers: the mask is the last."""
    z = np.asarray(entries)
    return np.where(z == MASK, SYMBOLS, z - (z > MASK))


def symbols(outputs) -> np.ndarray:
    """Their logits of all entries but the mask and padding."""
    return np.delete(np.asarray(outputs)[..., : SYMBOLS + 1], MASK, axis=-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return peer_folder(tmp_path_factory.mktemp("lfm2"), "lfm2")


@pytest.fixture(scope="module")
def model(folder):
    return md4_jax.load(folder)


def test_the_logits_are_those_of_transformers(model):
    """The recorded network has transformers' layers, but convolutions and attention see both
    sides."""
    told = answers("lfm2")
    assert model.domain.vocab_size == SYMBOLS == model.experiment.process.mask_id
    np.testing.assert_allclose(model.logits(ours(told["z"])), symbols(told["outputs"]), atol=CLOSE)
    network = model.config["network"]
    assert network["attention_layers"] == (1, 3) and network["kv_heads"] == 2
    assert (network["convolution_width"], network["hidden"]) == (3, 40)
    assert model.config["objective"]["name"] == "md4" and model.config["data"]["length"] == 64
    assert np.isfinite(model.score("abab", draws=2).nats).all()
    drawn = model.sample(num=1, length=8, sampler="confidence", temperature=0, steps=4)
    assert drawn.tokens.shape == (1, 8) and drawn.evaluations == 4


def test_padding_is_neither_attended_to_nor_convolved(model):
    told = answers("lfm2")
    padded = told["padded"]
    z = ours(told["z"])[padded["row"] :]
    segments = jnp.asarray([[0] * padded["length"] + [1] * (z.shape[1] - padded["length"])])
    found = model.experiment.network.denoiser(model.params, {"segments": segments})(z, jnp.zeros(1))
    expected = symbols(padded["outputs"])
    np.testing.assert_allclose(found[0, : padded["length"]], expected, atol=CLOSE)
    whole = symbols(told["outputs"])[padded["row"], : padded["length"]]
    assert np.abs(expected - whole).max() > 0.1  # it would be seen


def test_the_features_of_some_positions_are_those_of_all(model):
    z = jnp.asarray(ours(answers("lfm2")["z"]))
    denoiser = model.experiment.network.denoiser(model.params)
    index = jnp.asarray([[0, 7, 23], [5, 5, 11]])
    whole, some = denoiser.features(z, jnp.zeros(2)), denoiser.features_at(z, jnp.zeros(2), index)
    np.testing.assert_allclose(some, jnp.take_along_axis(whole, index[..., None], 1), atol=CLOSE)


def test_a_convolution_reads_the_token_and_its_neighbours():
    """Of three tokens each, with the first tap for the token before; zeros beyond the ends."""
    x = jnp.asarray([[[1.0, 1.0], [10.0, 10.0], [100.0, 100.0], [1000.0, 1000.0]]])
    taps = jnp.asarray([[1.0, 4.0], [2.0, 0.0], [3.0, 0.0]])
    found = convolved(x, taps, None)[0].T
    np.testing.assert_array_equal(found, [[32, 321, 3210, 2100], [0, 4, 40, 400]])
    found = convolved(x, taps, jnp.asarray([[0, 0, 1, 1]]))[0].T
    np.testing.assert_array_equal(found, [[32, 21, 3200, 2100], [0, 4, 0, 400]])


def test_without_attention_a_token_reaches_the_neighbours_of_its_neighbours():
    """Two layers of width 5 reach four tokens to each side."""
    network, params = built(Lfm2, attention_layers=(), convolution_width=5)
    z = jnp.arange(16)[None] % 5
    before, after = (logits(network, params, x, jnp.zeros(1)) for x in (z, z.at[0, 6].set(0)))
    moved = np.flatnonzero(np.any(np.asarray(before != after)[0], axis=1))
    assert moved.tolist() == list(range(2, 11))


def test_operations_count_attention_where_there_is_some():
    options = dict(size=16, depth=4, heads=2, hidden=24)
    found = [
        Lfm2(5, attention_layers=layers, **options).build() for layers in ((0, 1, 2, 3), (1,), ())
    ]
    params = [jax.eval_shape(network.init, jax.random.key(0)) for network in found]
    grown = [n.flops(p, 100) - n.flops(p, 50) for n, p in zip(found, params, strict=True)]
    assert grown == [4 * 50 * 16 * 4, 4 * 50 * 16, 0]


def test_it_is_never_told_the_time():
    network, params = built(Lfm2)
    assert network.time_free
    np.testing.assert_array_equal(*(logits(network, params, t=jnp.full(3, t)) for t in (0.1, 0.9)))


def test_it_goes_back_as_it_came(folder, model, tmp_path):
    exported = model.export(tmp_path / "exported")
    told = [json.loads((f / "config.json").read_text()) for f in (folder, exported)]
    held, found = (load_file(f / "model.safetensors") for f in (folder, exported))
    held["lfm2.embed_tokens.weight"][SYMBOLS + 1 :] = 0.0  # padding
    assert told[0] == told[1] and held.keys() == found.keys()
    assert all(np.array_equal(found[name], held[name]) for name in held)


def test_names_of_older_and_newer_configs(tmp_path):
    """Of transformers 4, and with a stored copy of the table as the head."""
    told = {"rope_parameters": None, "rope_theta": 1000.0, "layer_types": None}
    other = peer_folder(tmp_path, "lfm2", full_attn_idxs=[1, 3], **told)
    held = load_file(other / "model.safetensors")
    held["lm_head.weight"] = held["lfm2.embed_tokens.weight"]
    save_file(held, other / "model.safetensors")
    expected = answers("lfm2")
    found = md4_jax.load(other).logits(ours(expected["z"]))
    np.testing.assert_allclose(found, symbols(expected["outputs"]), atol=CLOSE)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False; only True is supported"),
        ({"num_hidden_layers": 6}, "says num_hidden_layers=6, but its arrays have 5"),
        ({"conv_bias": True}, "conv_bias=True; only False is supported"),
        ({"conv_L_cache": 4}, "says conv_L_cache=4, but its arrays have 3"),
        ({"num_attention_heads": None}, "config.json lacks num_attention_heads"),
        ({"layer_types": [*KINDS[::-1][1:], "conv"]}, r"says layer_types=\['full_attention', .*"),
        ({"full_attn_idxs": [1]}, r"full_attn_idxs=\[1\], but the arrays are those of \[1, 3\]"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "only the rope_type"),
    ],
)
def test_what_is_not_known_is_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, "lfm2", **changes))


@pytest.fixture
def causal(tmp_path):
    """The folder of the same parameters as a left-to-right model."""
    told = answers("lfm2_causal")["config"]
    other = peer_folder(tmp_path, "lfm2", **told, mask_token_id=None)
    held = load_file(other / "model.safetensors")
    held = {name.replace("lfm2.", "model."): x for name, x in held.items()}
    save_file(held, other / "model.safetensors")
    return other


def test_a_left_to_right_model_is_an_autoregressive_baseline(causal, tmp_path):
    """Its logits by transformers; the text begins with the vector of the entry 120."""
    told, model = answers("lfm2_causal"), md4_jax.load(causal)
    clean, outputs = np.asarray(told["clean"]), np.asarray(told["outputs"])
    assert (clean[:, 0] == 120).all() and model.domain.vocab_size == ENTRIES
    found = model.logits(np.where(np.arange(clean.shape[1]) == 0, ENTRIES, clean))
    np.testing.assert_allclose(found, outputs[..., :ENTRIES], atol=CLOSE)
    assert model.config["objective"]["name"] == "autoregressive"
    assert np.isfinite(model.score("abab", draws=1).nats).all()
    assert model.sample(num=1, length=4).tokens.shape == (1, 4)
    exported = model.export(tmp_path / "exported")
    configs = [json.loads((f / "config.json").read_text()) for f in (causal, exported)]
    names = [set(load_file(f / "model.safetensors")) for f in (causal, exported)]
    assert configs[0] == configs[1] and names[0] == names[1]


def test_a_left_to_right_model_becomes_a_masked_one_that_sees_both_sides(causal, tmp_path):
    changes = {"objective.name": "md4", "network.causal": False, "sample.name": "ancestral"}
    model = md4_jax.load(causal, changes)
    exported = model.export(tmp_path / "exported")
    told = json.loads((exported / "config.json").read_text())
    assert told["architectures"] == ["Lfm2BidirectionalForMaskedLM"]
    assert told["mask_token_id"] == ENTRIES
    z = [[0, 5, ENTRIES, 1, ENTRIES, 7]]
    np.testing.assert_array_equal(md4_jax.load(exported).logits(z), model.logits(z))


def test_a_causal_convolution_ends_with_the_token():
    x = jnp.asarray([[[1.0], [10.0], [100.0], [1000.0]]])
    found = convolved(x, jnp.asarray([[1.0], [2.0], [3.0]]), None, causal=True)[0, :, 0]
    np.testing.assert_array_equal(found, [3, 32, 321, 3210])
    network, params = built(Lfm2, causal=True, attention_layers=(1,), convolution_width=4)
    z = jnp.arange(16)[None] % 5
    before, after = (logits(network, params, x, jnp.zeros(1)) for x in (z, z.at[0, 6].set(0)))
    moved = np.flatnonzero(np.any(np.asarray(before != after)[0], axis=1))
    assert network.causal and moved.tolist() == list(range(6, 16))


@pytest.mark.parametrize("kind", ["Lfm2ForSequenceClassification", "Lfm2Model"])
def test_other_models_of_the_family_are_refused(kind, causal):
    told = json.loads((causal / "config.json").read_text())
    (causal / "config.json").write_text(json.dumps({**told, "architectures": [kind]}))
    with pytest.raises(UserError, match="no embedders, classifiers and other classes"):
        md4_jax.load(causal)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(scan_blocks=True), "needs network.scan_blocks=False, not True"),
        (dict(convolution_width=2), "network.convolution_width=2 must be odd"),
        (dict(attention_layers=(0, 2)), "there is no layer 2, since network.depth=2"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Lfm2(5, size=16, heads=2, depth=2, **{"attention_layers": (), **options})


def test_block_diffusion_is_refused(folder):
    with pytest.raises(UserError, match="objective"):
        md4_jax.load(folder, {"objective.name": "block", "objective.block": 4})


@pytest.mark.campaign
def test_training_goes_on(folder, tmp_path):
    model = md4_jax.load(trained_on(folder, tmp_path, {"network.dropout": 0.1}))
    again = md4_jax.load(model.export(tmp_path / "exported"))
    z = [[0, 5, SYMBOLS, 1]]
    np.testing.assert_allclose(again.logits(z), model.logits(z), atol=1e-6)
