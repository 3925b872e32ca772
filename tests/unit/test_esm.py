"""ESM-2 and DPLM: what their own code answers, the marks, masks that are dropped, the way back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import PROTEINS, answers, peer_folder, trained_on
from safetensors.numpy import load_file, save_file
from tiny_networks import T, Z, built, logits

import md4_jax
from md4_jax.networks.esm import Esm
from md4_jax.protocols import UserError

CLOSE, MASK = 3e-5, 32  # logits up to 14


def arrays(folder) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def theirs() -> tuple[np.ndarray, np.ndarray, dict]:
    """Residues, segments and what transformers answers for the rows with marks and padding."""
    told = answers("esm")
    segments = np.where(np.arange(14) < np.array(told["lengths"])[:, None], 0, -1)
    outputs = {name: np.array(told[name])[..., :MASK] for name in ("outputs", "plain", "halved")}
    return np.array(told["z"])[:, 1:-1], segments, outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return peer_folder(tmp_path_factory.mktemp("esm"), "esm")


@pytest.fixture(scope="module")
def model(folder):
    return md4_jax.load(folder)


def test_the_logits_are_those_of_transformers_and_of_dplm(model):
    """No mask, 9 of 10, half of a shorter protein, all, and the share of ESM's training."""
    z, segments, outputs = theirs()
    found, seen = model.logits(z, context={"segments": segments}), segments >= 0
    np.testing.assert_allclose(found[seen], outputs["outputs"][seen], atol=CLOSE)
    whole = np.flatnonzero(seen.all(axis=1))
    assert len(whole) == 3 and (z[whole] == MASK).sum(axis=1).tolist() == [0, 13, 14]
    np.testing.assert_allclose(model.logits(z[whole]), outputs["outputs"][whole], atol=CLOSE)
    assert model.config["network"]["token_dropout"] and not model.config["network"]["rotary_half"]
    assert model.config["data"]["windows"] == "documents" and model.config["data"]["length"] == 62


def test_padding_is_not_seen_and_does_not_count(model):
    z, segments, _ = theirs()
    context = {"segments": segments[2:3]}
    before = model.logits(z[2:3], context=context)
    for other in (4, MASK):
        after = model.logits(np.where(segments[2:3] < 0, other, z[2:3]), context=context)
        assert np.array_equal(after[:, :9], before[:, :9])
    np.testing.assert_allclose(model.logits(z[2:3, :9]), before[:, :9], atol=CLOSE)


def test_without_token_dropout_a_mask_has_its_own_vector(folder, tmp_path):
    z, _, outputs = theirs()
    other = md4_jax.load(peer_folder(tmp_path, "esm", token_dropout=None))
    np.testing.assert_allclose(other.logits(z[:2]), outputs["plain"], atol=CLOSE)
    assert np.abs(outputs["plain"][1] - outputs["outputs"][1]).max() > 1


def test_it_trains_with_the_same_scale():
    """With dropout too, which here drops nothing: ESM scales in training and afterwards alike."""
    network, params = built(Esm)
    dropping, _ = built(Esm, dropout=1e-9)
    keys = jax.random.split(jax.random.key(0), 3)
    found = jax.jit(lambda p: dropping.bind(p, None, keys)(Z, T))(params)
    np.testing.assert_allclose(found, logits(network, params), atol=1e-5)


@pytest.mark.parametrize("version", [4, 5])
def test_stored_angles_are_those_that_count(version, folder, tmp_path):
    """In float16 they move the logits of transformers; transformers 4 has them in each layer."""
    z, _, outputs = theirs()
    other = peer_folder(tmp_path, "esm")
    held = arrays(other)
    angles = held.pop("esm.rotary_embeddings.inv_freq").astype(np.float16).astype(np.float32)
    if version == 5:
        held["esm.rotary_embeddings.inv_freq"] = angles
    else:
        for n in range(3):
            name = f"esm.encoder.layer.{n}.attention.self.rotary_embeddings.inv_freq"
            held[name] = angles
        held["esm.embeddings.position_ids"] = np.arange(66)[None]
        held["esm.embeddings.position_embeddings.weight"] = np.ones((1026, 32), np.float32)
    save_file(held, other / "model.safetensors")
    halved = md4_jax.load(other)
    assert halved.config["network"]["rotary_half"]
    np.testing.assert_allclose(halved.logits(z[:2]), outputs["halved"], atol=CLOSE)
    assert np.abs(outputs["halved"] - outputs["outputs"][:2]).max() > 10 * CLOSE
    found = arrays(halved.export(tmp_path / "exported"))
    held.pop("esm.embeddings.position_embeddings.weight", None)
    held["lm_head.bias"][MASK] = 0.0
    assert found.keys() == held.keys()
    assert all(np.array_equal(found[name], held[name]) for name in held)


def test_other_angles_are_refused(tmp_path):
    other = peer_folder(tmp_path, "esm")
    held = arrays(other)
    held["esm.rotary_embeddings.inv_freq"] *= 1.001
    save_file(held, other / "model.safetensors")
    with pytest.raises(
        UserError, match=r"inv_freq' are not base\^\(-2 i / 16\) with base rope_theta="
    ):
        md4_jax.load(other)


def test_the_features_of_some_positions_are_those_of_all(model):
    z, _, _ = theirs()
    denoiser = model.experiment.network.denoiser(model.params)
    index = jnp.asarray([[0, 7, 13], [5, 5, 11]])
    z, t = jnp.asarray(z[:2]), jnp.zeros(2)
    whole = jax.jit(denoiser.features)(z, t)
    some = jax.jit(denoiser.features_at)(z, t, index)
    np.testing.assert_allclose(some, jnp.take_along_axis(whole, index[..., None], 1), atol=CLOSE)


@pytest.mark.slow
def test_proteins_are_drawn_filled_and_scored(model):
    """The end that the network sees in a text with blanks is that of the text."""
    asked = dict(num=3, steps=3, resample=0.0, seed=1)
    drawn = model.sample(length=9, **asked)
    assert drawn.tokens.shape == (3, 9) and not np.isin(drawn.tokens, [0, 1, 2, 24, MASK]).any()
    found = model.infill("MKT___GAV", **asked)
    given = [PROTEINS.index(letter) for letter in "MKTGAV"]
    assert np.array_equal(np.delete(found.tokens, [3, 4, 5], 1), [given] * 3)
    same = model.sample(template="MKT___GAV", length=9, **asked)
    assert found.tokens.shape == (3, 9) and same.texts == found.texts
    scores = model.score(["MKTAYIAKQR", "GAV"], draws=4)
    assert scores.tokens.tolist() == [10, 3] and np.isfinite(scores.nats).all()


@pytest.mark.parametrize(
    "never, said",
    [
        ("J", "sample.exclude='J' is not an entry of the vocabulary"),
        ("<mask>", "sample.exclude='<mask>' is not an entry"),
        (" ".join(PROTEINS[:-1]), "excludes all symbols"),
    ],
)
def test_what_cannot_be_excluded(model, never, said):
    with pytest.raises(UserError, match=said):
        model.sample(exclude=never)


def test_it_goes_back_as_it_came(folder, model, tmp_path):
    exported = model.export(tmp_path / "exported")
    told = [json.loads((f / "config.json").read_text()) for f in (folder, exported)]
    held, found = arrays(folder), arrays(exported)
    held["lm_head.bias"][MASK] = 0.0
    assert told[0] == told[1] and held.keys() == found.keys()
    assert all(np.array_equal(found[name], held[name]) for name in held)
    assert (exported / "vocab.txt").read_text() == (folder / "vocab.txt").read_text()
    assert not (exported / "tokenizer.json").exists()
    kind = json.loads((exported / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert kind == "EsmTokenizer"


def test_a_model_from_the_start_fits_into_the_layout(folder, tmp_path):
    """Of which only the head of contacts is left out; angles in float16 are written too."""
    halved = md4_jax.load(folder, {"network.rotary_half": True, "objective.name": "md4"})
    halved.layout = None
    exported = halved.export(tmp_path / "exported")
    assert arrays(folder).keys() - arrays(exported).keys() == {
        "esm.contact_head.regression.weight", "esm.contact_head.regression.bias"
    }  # fmt: skip
    again, (z, _, _) = md4_jax.load(exported), theirs()
    assert again.config["network"] == halved.config["network"]
    assert again.config["data"]["length"] == halved.config["data"]["length"]
    np.testing.assert_array_equal(again.logits(z[:2]), halved.logits(z[:2]))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"position_embedding_type": "absolute"}, "'absolute'; only 'rotary', as in ESM-2"),
        ({"position_embedding_type": None}, "'absolute'; only 'rotary', as in ESM-2"),
        ({"emb_layer_norm_before": True}, "emb_layer_norm_before=True; only False is supported"),
        ({"is_folding_model": True}, "is_folding_model=True; only False is supported"),
        ({"dplm_type": "dplm2_esm"}, "dplm_type='dplm2_esm'; only 'dplm_esm' is supported"),
        (
            {"mask_token_id": 4},
            "33 entries with the mask 4, but the vocabulary of ESM-2 has 33 with",
        ),
        ({"num_hidden_layers": 6}, "says num_hidden_layers=6, but its arrays have 3"),
        ({"num_attention_heads": None}, "config.json lacks num_attention_heads"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters=.* not supported"),
    ],
)
def test_what_is_not_known_is_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, "esm", **changes))


def test_another_vocabulary_is_refused(tmp_path):
    other = peer_folder(tmp_path, "esm")
    (other / "vocab.txt").write_text("\n".join(["A", "C", "G", "T"]))
    with pytest.raises(
        UserError, match="does not have the vocabulary of ESM-2 .*: it has 4 .* A C G T"
    ):
        md4_jax.load(other)


def test_a_model_without_its_head_is_refused(tmp_path):
    other = peer_folder(tmp_path, "esm")
    held = {name: x for name, x in arrays(other).items() if not name.startswith("lm_head.dense")}
    save_file(held, other / "model.safetensors")
    with pytest.raises(
        UserError, match="has no array 'lm_head.dense.weight', which every EsmForMasked"
    ):
        md4_jax.load(other)


def test_it_is_never_told_the_time():
    network, params = built(Esm)
    assert network.time_free
    found = [logits(network, params, t=jnp.full(3, t)) for t in (0.1, 0.9)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(causal=True), "network.name='esm' needs network.causal=False, not True"),
        (dict(embedding_dropout=0.1), "needs network.embedding_dropout=0.0, not 0.1"),
        (dict(ends=5), "network.ends=5 must be one of the 5 symbols of the tokenizer, 0 to 4"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Esm(5, size=16, heads=2, depth=2, **options)


@pytest.mark.campaign
def test_training_goes_on(folder, tmp_path):
    proteins = tmp_path / "proteins.fasta"
    proteins.write_text("".join(f">{n}\nMKTAYI\nAKQR{'GAV'[n % 3]}\n" for n in range(30)))
    changes = {"network.dropout": 0.1, "objective.name": "reparameterized"}
    changes |= {"data.path": proteins, "data.length": 16}
    model = md4_jax.load(trained_on(folder, tmp_path, changes))
    again = md4_jax.load(model.export(tmp_path / "exported"))
    z = [[4, 5, MASK, 20]]
    np.testing.assert_allclose(again.logits(z), model.logits(z), atol=1e-6)
