"""ModernBERT: what transformers answers, local layers, and the way back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import answers, peer_folder, trained_on
from safetensors.numpy import load_file, save_file
from tiny_networks import built, logits

import md4_jax
from md4_jax.networks.modernbert import ModernBert
from md4_jax.protocols import UserError

CLOSE, MASK, SYMBOLS = 3e-5, 122, 123  # five layers differ by 1e-5


def arrays(folder) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def theirs() -> tuple[np.ndarray, np.ndarray]:
    """The tokens with our number of the mask, and the logits of all other entries."""
    told = answers("modernbert")
    z = np.asarray(told["z"])
    expected = np.delete(np.asarray(told["outputs"])[..., : SYMBOLS + 1], MASK, axis=-1)
    return np.where(z == MASK, SYMBOLS, z - (z > MASK)), expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return peer_folder(tmp_path_factory.mktemp("modernbert"), "modernbert")


def test_the_logits_are_those_of_transformers(folder):
    model, (z, expected) = md4_jax.load(folder), theirs()
    assert model.domain.vocab_size == SYMBOLS == model.experiment.process.mask_id
    np.testing.assert_allclose(model.logits(z), expected, atol=CLOSE)
    network = model.config["network"]
    assert (network["window"], network["global_every"], network["local_base"]) == (6, 3, 100.0)
    assert model.config["objective"]["name"] == "md4" and model.config["data"]["length"] == 64
    assert np.isfinite(model.score("abab", draws=2).nats).all()
    assert model.sample(num=1, steps=2, length=4).tokens.shape == (1, 4)
    assert model.sample(num=1, steps=2, length=8, sampler="first_hitting").tokens.shape == (1, 8)


@pytest.mark.campaign
def test_the_features_of_some_positions_are_those_of_all(folder):
    model, (z, _) = md4_jax.load(folder), theirs()
    denoiser = model.experiment.network.denoiser(model.params)
    index = jnp.asarray([[0, 7, 23], [5, 5, 11]])
    whole = denoiser.features(z, jnp.zeros(2))
    some = denoiser.features_at(jnp.asarray(z), jnp.zeros(2), index)
    np.testing.assert_allclose(some, jnp.take_along_axis(whole, index[..., None], 1), atol=CLOSE)


@pytest.mark.slow
def test_two_documents_do_not_see_each_other(folder):
    model, (z, _) = md4_jax.load(folder), theirs()
    both = np.concatenate([z[:1, :10], z[1:, :14]], axis=1)
    segments = jnp.asarray([[0] * 10 + [1] * 14])
    bind = model.experiment.network.denoiser
    found = bind(model.params, {"segments": segments})(both, jnp.zeros(1))
    alone = [
        bind(model.params)(z[row : row + 1, :n], jnp.zeros(1)) for row, n in ((0, 10), (1, 14))
    ]
    np.testing.assert_allclose(found, np.concatenate(alone, axis=1), atol=5e-5)


def test_it_is_never_told_the_time():
    network, params = built(ModernBert)
    assert network.time_free
    found = [logits(network, params, t=jnp.full(3, t)) for t in (0.1, 0.9)]
    np.testing.assert_array_equal(*found)
    with pytest.raises(UserError, match="needs network.time_conditioning=False, not True"):
        ModernBert(5, size=16, heads=2, time_conditioning=True)


def test_a_local_layer_reaches_half_its_window():
    """Of one global and two local layers with 4 near tokens, the latter alone reach 4 further."""
    network, params = built(ModernBert, depth=3, global_every=3, window=4, initial="torch")
    z = jnp.arange(16)[None] % 5
    silent = jax.tree.map(lambda x: x, params)
    out = silent["blocks_0"]["attention"]["out"]
    silent["blocks_0"]["attention"]["out"] = jax.tree.map(jnp.zeros_like, out)
    before, after = (logits(network, silent, x, jnp.zeros(1)) for x in (z, z.at[0, 3].set(4)))
    moved = np.flatnonzero(np.any(np.asarray(before != after)[0], axis=1))
    assert moved.tolist() == list(range(8))
    before, after = (logits(network, params, x, jnp.zeros(1)) for x in (z, z.at[0, 3].set(4)))
    assert np.any(np.asarray(before != after)[0], axis=1).all()


def test_it_goes_back_as_it_came(folder, tmp_path):
    model = md4_jax.load(folder)
    exported = model.export(tmp_path / "exported")
    told = [json.loads((f / "config.json").read_text()) for f in (folder, exported)]
    held, found = arrays(folder), arrays(exported)
    for name in ("model.embeddings.tok_embeddings.weight", "decoder.bias"):
        held[name][SYMBOLS + 1 :] = 0.0  # padding
    held["decoder.bias"][MASK] = 0.0
    assert told[0] == told[1] and held.keys() == found.keys()
    assert all(np.array_equal(found[name], held[name]) for name in held)


def test_a_stored_copy_of_the_table_goes_back_too(folder, tmp_path):
    other = peer_folder(tmp_path, "modernbert")
    held = arrays(other)
    held["decoder.weight"] = held["model.embeddings.tok_embeddings.weight"]
    save_file(held, other / "model.safetensors")
    model, (z, expected) = md4_jax.load(other), theirs()
    np.testing.assert_allclose(model.logits(z), expected, atol=CLOSE)
    found = arrays(model.export(tmp_path / "exported"))
    assert found.keys() == held.keys()
    rows = slice(0, SYMBOLS + 1)
    assert np.array_equal(found["decoder.weight"][rows], held["decoder.weight"][rows])


def test_the_mask_is_that_of_the_tokenizer(folder, tmp_path):
    other = peer_folder(tmp_path, "modernbert", mask_token_id=None)
    with pytest.raises(UserError, match="config.json lacks mask_token_id"):
        md4_jax.load(other)
    (other / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<|special_2|>"}))
    assert md4_jax.load(other).config["tokenizer"]["mask"] == MASK


def test_bases_as_transformers_5_tells_them(tmp_path):
    bases = {"full_attention": {"rope_theta": 160000.0}, "sliding_attention": {"rope_theta": 100.0}}
    none = {"global_rope_theta": None, "local_rope_theta": None}
    model = md4_jax.load(peer_folder(tmp_path, "modernbert", rope_parameters=bases, **none))
    z, expected = theirs()
    np.testing.assert_allclose(model.logits(z), expected, atol=CLOSE)


def test_kinds_of_layers_as_transformers_5_lists_them(tmp_path):
    """The list alone says which layers see all tokens: every third one, or all."""
    kinds = ["full_attention", *["sliding_attention"] * 2, "full_attention", "sliding_attention"]
    model = md4_jax.load(
        peer_folder(tmp_path, "modernbert", layer_types=kinds, global_attn_every_n_layers=2)
    )
    z, expected = theirs()
    np.testing.assert_allclose(model.logits(z), expected, atol=CLOSE)
    everywhere = dict(layer_types=["full_attention"] * 5)
    model = md4_jax.load(peer_folder(tmp_path / "all", "modernbert", **everywhere))
    assert model.config["network"]["global_every"] == 1
    assert np.abs(model.logits(z) - expected).max() > 1e-3


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"hidden_activation": "silu"}, "hidden_activation='silu'; only 'gelu' is supported"),
        ({"mlp_bias": True}, "mlp_bias=True; only False is supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False; only True is supported"),
        ({"num_hidden_layers": 6}, "says num_hidden_layers=6, but its arrays have 5"),
        ({"intermediate_size": 48}, "says intermediate_size=48, but its arrays have 24"),
        ({"num_attention_heads": None}, "config.json lacks num_attention_heads"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0, "rope_type": "yarn"}}},
            "rope_parameters.full_attention=.*, which is not supported",
        ),
        ({"layer_types": ["sliding_attention"] * 5}, "only 5 layers of which"),
        ({"layer_types": ["full_attention"] * 4}, "only 5 layers of which"),
    ],
)
def test_what_is_not_known_is_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, "modernbert", **changes))


def test_a_model_without_its_head_is_refused(tmp_path):
    other = peer_folder(tmp_path, "modernbert")
    held = {name: x for name, x in arrays(other).items() if not name.startswith("head.")}
    save_file(held, other / "model.safetensors")
    with pytest.raises(
        UserError, match="has no array 'head.dense.weight', which every ModernBertForMasked"
    ):
        md4_jax.load(other)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(scan_blocks=True), "needs network.scan_blocks=False, not True"),
        (dict(causal=True), "needs network.causal=False, not True"),
        (dict(attention="splash"), "needs network.attention='plain', not 'splash'"),
        (dict(window=-2), "network.window must not be negative, not -2"),
        (dict(global_every=0), "network.global_every must be at least 1, not 0"),
        (dict(local_base=0.0), "network.local_base=0.0 must be above 0"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        ModernBert(5, size=16, heads=2, depth=2, **options)


def test_block_diffusion_is_refused(folder):
    with pytest.raises(UserError, match="objective"):
        md4_jax.load(folder, {"objective.name": "block", "objective.block": 4})


@pytest.mark.campaign
def test_training_goes_on(folder, tmp_path):
    model = md4_jax.load(trained_on(folder, tmp_path, {"network.embedding_dropout": 0.1}))
    again = md4_jax.load(model.export(tmp_path / "exported"))
    z = [[0, 5, SYMBOLS, 1]]
    np.testing.assert_allclose(again.logits(z), model.logits(z), atol=1e-6)
