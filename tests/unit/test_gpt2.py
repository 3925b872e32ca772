"""GPT-2, and the diffusion models that are made of it."""

import json

import jax
import numpy as np
import pytest
from peer_folders import INSTANCES, answers, own_lora, peer_folder, trained_on
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.evals.judges import PublishedJudge
from md4_jax.model import judging
from md4_jax.protocols import UserError, batch_of
from md4_jax.runtime.paths import Place

CLOSE = 1e-5
ENTRIES = 124
MASK = 119  # of the DiffuGPT
ADAPTED = {
    "objective.name": "md4", "network.causal": False, "network.shifted": True,
    "sample.name": "ancestral", "evals.test.draws": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gpt2")
    return {name: peer_folder(directory, name) for name in ("gpt2", "diffugpt")}


def arrays(folder) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def clean() -> np.ndarray:
    return np.asarray(answers("gpt2")["clean"])


def begun() -> np.ndarray:
    """The texts after the mask, as the autoregressive objective shows them to the network."""
    return np.concatenate([np.full((len(clean()), 1), ENTRIES), clean()], axis=1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@pytest.mark.parametrize("scan", [True, False])
def test_gpt2_answers_what_transformers_answers(scan, folders):
    model = md4_jax.load(folders["gpt2"], {"network.scan_blocks": scan})
    assert model.domain.vocab_size == ENTRIES and model.config["data"]["length"] == 64
    expected = np.asarray(answers("gpt2")["outputs"])
    np.testing.assert_allclose(model.logits(begun()[:, :-1]), expected, atol=CLOSE)
    logs = log_softmax(expected.astype(np.float64))
    nats = -np.sum(np.take_along_axis(logs, clean()[..., None], axis=2)[..., 0], axis=1)
    own = model.experiment
    denoiser = own.network.denoiser(model.params)
    found, _ = own.objective(denoiser, own.process, batch_of(clean()), None, None)
    np.testing.assert_allclose(found, nats, rtol=1e-5)


def test_the_score_of_a_text_is_the_sum_of_its_log_probabilities(folders):
    model = md4_jax.load(folders["gpt2"])
    logs = log_softmax(np.asarray(answers("gpt2")["outputs"], np.float64))
    texts = [model.domain.decode(row) for row in clean()]
    assert [model.domain.encode(text).tolist() for text in texts] == clean().tolist()
    found = model.score(texts)
    nats = -np.sum(np.take_along_axis(logs, clean()[..., None], axis=2)[..., 0], axis=1)
    assert found.exact and found.tokens.tolist() == [16, 16]
    np.testing.assert_allclose(found.nats, nats, rtol=1e-5)


@pytest.mark.campaign
def test_kept_keys_and_values_give_the_same_samples(folders):
    model = md4_jax.load(folders["gpt2"])
    own = model.experiment
    denoiser = own.network.denoiser(model.params)
    z, t = begun(), np.zeros(2)
    whole = denoiser.features(z, t)
    cache, parts = denoiser.blocks.empty_cache(2, z.shape[1]), []
    append = jax.jit(denoiser.blocks.append_block)
    for begin, end in ((0, 1), (1, 2), (2, 7), (7, z.shape[1])):
        h, cache = append(z[:, begin:end], t, cache)
        parts.append(h)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-5)
    kept = model.sample(num=2, length=12, seed=3).tokens
    slow = own.network._replace(bind=lambda *a: own.network.bind(*a)._replace(blocks=None))
    model.experiment = own._replace(network=slow)
    again = model.sample(num=2, length=12, seed=3).tokens
    np.testing.assert_array_equal(kept, again)
    assert len(np.unique(kept)) > 4


def test_diffugpt_answers_what_its_code_answers(folders):
    """Without the entry of its mask, which is no symbol."""
    told = answers("diffugpt")
    model = md4_jax.load(folders["diffugpt"])
    assert model.config["network"]["shifted"] and not model.config["network"]["causal"]
    assert model.domain.vocab_size == 123 == model.experiment.process.mask_id
    z = np.asarray(told["z"])
    z = np.where(z == MASK, 123, z - (z > MASK))
    expected = np.delete(np.asarray(told["outputs"]), MASK, axis=-1)
    np.testing.assert_allclose(model.logits(z), expected, atol=CLOSE)
    assert model.config["objective"]["name"] == "md4"
    assert np.isfinite(model.score("abab", draws=2).nats).all()
    assert len(model.sample(num=1, steps=2, length=4).tokens[0]) == 4


def test_the_table_of_diffugpt_may_have_the_name_of_the_head(folders, tmp_path):
    """Of matrices that are tied one is stored; the mask is then told by the user."""
    folder = peer_folder(tmp_path, "diffugpt", mask_token_id=None)
    held = arrays(folder)
    held["lm_head.weight"] = held.pop("embed_tokens.weight")
    save_file(held, folder / "model.safetensors")
    with pytest.raises(UserError, match="config.json lacks mask_token_id"):
        md4_jax.load(folder)
    model, z = md4_jax.load(folder, {"tokenizer.mask": MASK}), [[0, 123, 5]]
    assert np.array_equal(model.logits(z), md4_jax.load(folders["diffugpt"]).logits(z))
    found = arrays(model.export(tmp_path / "exported"))
    assert found.keys() == held.keys()
    assert all(np.array_equal(found[name], held[name]) for name in held)


def test_gpt2_becomes_a_diffugpt(folders, tmp_path):
    """It sees both sides; exported it has the names of DiffuGPT and is the same model."""
    model = md4_jax.load(folders["gpt2"], ADAPTED)
    expected = np.asarray(answers("gpt2")["bidirectional"])
    moved = np.concatenate([expected[:, :1], expected[:, :-1]], axis=1)
    np.testing.assert_allclose(model.logits(begun()[:1]), moved, atol=CLOSE)
    folder = model.export(tmp_path / "exported")
    told = json.loads((folder / "config.json").read_text())
    assert (told["model_type"], told["mask_token_id"], told["vocab_size"]) == ("gpt2", 124, 125)
    assert arrays(folder).keys() == arrays(folders["diffugpt"]).keys()
    again, z = md4_jax.load(folder), np.array([[0, 124, 5, 124, 123]])
    assert again.domain.vocab_size == ENTRIES
    np.testing.assert_array_equal(again.logits(z), model.logits(z))


@pytest.mark.parametrize(
    "keys",
    [{"network.shifted": False}, {"objective.name": "block", "objective.block": 4}],
)
@pytest.mark.cases(1)
def test_what_diffugpt_does_not_know_is_kept_in_its_config(keys, folders, tmp_path):
    model = md4_jax.load(folders["gpt2"], ADAPTED | keys)
    again = md4_jax.load(model.export(tmp_path / "exported"))
    for section in ("network", "objective"):
        assert again.config[section] == model.config[section]
    z = np.array([[0, 124, 5, 124, 123]])
    np.testing.assert_array_equal(again.logits(z), model.logits(z))
    assert again.sample(num=1, steps=2, length=8).tokens.shape == (1, 8)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_goes_back_as_it_came(prefix, tmp_path):
    """Bit for bit; the causal mask that is stored with it is no parameter and is left out."""
    folder = peer_folder(tmp_path, "gpt2")
    held = {prefix + name: x for name, x in arrays(folder).items()}
    buffers = {}
    for layer in range(2):
        name = f"{prefix}h.{layer}.attn"
        buffers[f"{name}.bias"] = np.tril(np.ones((1, 1, 80, 80), np.float32))
        buffers[f"{name}.masked_bias"] = np.array(-1e4, np.float32)
    save_file(held | buffers, folder / "model.safetensors")
    model = md4_jax.load(folder)
    expected = np.asarray(answers("gpt2")["outputs"])
    np.testing.assert_allclose(model.logits(begun()[:, :-1]), expected, atol=CLOSE)
    exported = model.export(tmp_path / "exported")
    found = arrays(exported)
    assert found.keys() == held.keys()
    assert all(np.array_equal(found[name], held[name]) for name in held)
    told = [json.loads((f / "config.json").read_text()) for f in (folder, exported)]
    assert told[0] == told[1]


def test_texts_are_not_longer_than_the_positions(folders):
    model = md4_jax.load(folders["gpt2"])
    assert model.config["network"]["positions"] == 64
    with pytest.raises(
        UserError, match="reads 65 tokens at once, but has vectors for only network.positions=64"
    ):
        model.logits(np.zeros((1, 65), np.int32))
    with pytest.raises(UserError, match="data.length=65 must be at most 64"):
        md4_jax.load(folders["gpt2"], {"data.length": 65})
    with pytest.raises(UserError, match="evals.test.data.length=65 must be at most 64"):
        md4_jax.load(folders["gpt2"], {"evals.test.data.length": 65})
    with pytest.raises(UserError, match="sample.length=65 must be at most 64"):
        model.sample(num=1, length=65)
    with pytest.raises(UserError, match="^network.positions=128, but the model has 64: its"):
        md4_jax.load(folders["gpt2"], {"network.positions": 128})
    assert np.isfinite(model.score("ab" * 50).nats).all()  # in windows


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"activation_function": "gelu"}, "activation_function='gelu'; only 'gelu_new' and"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "inverse_layer_idx=True; only False is supported",
        ),
        (
            {"reorder_and_upcast_attn": True},
            "reorder_and_upcast_attn=True; only False is supported",
        ),
        ({"scale_attn_weights": False}, "scale_attn_weights=False; only True is supported"),
        ({"add_cross_attention": True}, "add_cross_attention=True; only False is supported"),
        ({"n_inner": 64}, "says n_inner=64, but its arrays have 128"),
        ({"n_positions": 128}, "says n_positions=128, but its arrays have 64"),
        ({"vocab_size": 200}, "says vocab_size=200, but its arrays have 124"),
        ({"n_layer": 3}, "says n_layer=3, but its arrays have 2"),
        ({"n_head": None, "num_heads": 4}, "config.json lacks n_head"),
        ({"n_head": 5}, "network.size=32 must be a multiple of twice network.heads=5"),
        ({"bos_token_id": None, "eos_token_id": None}, "config.json lacks bos_token_id"),
    ],
)
def test_what_is_not_known_is_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, "gpt2", **changes))


def test_arrays_without_blocks_are_refused(tmp_path):
    folder = peer_folder(tmp_path, "gpt2")
    save_file({"wte.weight": arrays(folder)["wte.weight"]}, folder / "model.safetensors")
    with pytest.raises(UserError, match="has no array 'h.0.attn.c_attn.weight'"):
        md4_jax.load(folder)


def test_a_published_judge_gives_the_first_token_no_probability(folders):
    """What transformers gives for the texts without anything before them."""
    found = judging.read("evals.judged.judge", str(folders["gpt2"]), {"data": 0})
    assert found is not None and found[2] is False
    judge = PublishedJudge(*found[:2], {})
    ids = [*clean().astype(np.int32), clean()[0, :5].astype(np.int32)]
    judged = judge.judge(ids, 2)
    assert judged.size.tolist() == [15, 15, 4] and judge.counts_first is False
    np.testing.assert_allclose(judged.nats[:2], answers("gpt2")["later_nats"], rtol=1e-5)
    alone = judge.judge(ids[2:], 2).nats
    np.testing.assert_allclose(judged.nats[2:], alone, rtol=1e-5)
    text = judge.experiment.domain.decode(ids[0])
    assert judge.counted(text, ids[0]) == text[1:] and judge.length == 64
    features = judge.features(ids, 2)
    network = judge.experiment.network.denoiser(judge.params)
    expected = network.features(ids[2][None], np.zeros(1))[0, -1]
    np.testing.assert_allclose(features[2], expected, atol=CLOSE)


def test_what_is_read_as_a_judge(folders, tmp_path, monkeypatch):
    """A folder that was saved is this package's own once it was trained; runs are none."""
    model = md4_jax.load(folders["gpt2"])
    for step in (0, 3):
        model.step = step
        saved = model.save(tmp_path / f"saved_{step}")
        assert judging.read("evals.judged.judge", str(saved), {})[2] is bool(step)
    assert judging.read("evals.judged.judge", str(tmp_path), {}) is None
    fetched = {"hf:gpt2": Place(folders["gpt2"])}
    monkeypatch.setattr("md4_jax.model.finding.hub.snapshot", fetched.get)
    named = judging.read("evals.judged.judge", "hf:gpt2", {"fsdp": 1})
    assert named[0].domain.vocab_size == ENTRIES and named[2] is False
    with pytest.raises(UserError, match="evals.judged.judge=.*only 'gelu_new'"):
        wrong = peer_folder(tmp_path, "gpt2", activation_function="relu")
        judging.read("evals.judged.judge", str(wrong), {})


def test_adapters_of_peft_are_refused(folders, tmp_path):
    """Modules of GPT-2 store their matrices the other way round."""
    adapter = own_lora(tmp_path / "lora", folders["gpt2"], {"h.0.attn.c_proj": 2})
    said = r"\(gpt2\) stores matrices as \[in, out\]"
    for keys in ({}, {"network.lora_rank": 2}):
        with pytest.raises(UserError, match=said):
            md4_jax.load(folders["gpt2"], keys, adapters=adapter)
    model = md4_jax.load(folders["gpt2"], {"network.lora_rank": 2})
    with pytest.raises(UserError, match=said):
        model.export(tmp_path / "exported", adapters=True)
    assert arrays(model.export(tmp_path / "whole")).keys() == arrays(folders["gpt2"]).keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, keys",
    [
        pytest.param("gpt2", ADAPTED, marks=pytest.mark.campaign),
        pytest.param("gpt2", {}, marks=pytest.mark.campaign),
        pytest.param("diffugpt", {}, marks=pytest.mark.campaign),
    ],
)
def test_training_goes_on(name, keys, folders, tmp_path):
    model = md4_jax.load(trained_on(folders[name], tmp_path, keys))
    begun_with = md4_jax.load(folders[name], keys).params["network"]["positions"]
    assert model.step == 2 and np.any(model.params["network"]["positions"] != begun_with)
    again = md4_jax.load(model.export(tmp_path / "exported"))
    z, entries = np.array([[0, 5, 7, 1]]), 119  # before the one that takes the mask's vector
    found, expected = (m.logits(z)[..., :entries] for m in (again, model))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def parted(folder):
    """The model after its two vectors of the entry 120 have changed: the symbol's, the beginning's.

    The entry begins texts and ends them.
    """
    model = md4_jax.load(folder)
    table = model.params["network"]["embedding"]
    changed = table.at[120, 3].add(0.25).at[model.domain.vocab_size, 5].add(-0.5)
    model.params["network"]["embedding"] = changed
    return model


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_an_export_has_both_vectors_of_an_entry_of_a_tied_head(name, tmp_path, capsys):
    """One in the embedding, the other in a head of its own, as transformers reads them."""
    model = parted(peer_folder(tmp_path, name))
    model.export(tmp_path / "exported")
    assert "the logits after this entry inside a text differ" in capsys.readouterr().err
    written, table = arrays(tmp_path / "exported"), model.params["network"]["embedding"]
    (embedding,) = (x for key, x in written.items() if "wte" in key or "embed_tokens" in key)
    np.testing.assert_array_equal(embedding[120], table[ENTRIES])
    np.testing.assert_array_equal(written["lm_head.weight"][120], table[120])
    told = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert told["tie_word_embeddings"] is False
    again, z = md4_jax.load(tmp_path / "exported"), np.array([[ENTRIES, 5, 7, 1]])
    np.testing.assert_allclose(again.logits(z), model.logits(z), atol=1e-6)


def test_transformers_reads_both_vectors(folders):
    told = json.loads((INSTANCES / "gpt2_untied.json").read_text())
    (rows,) = told["tokens"]
    found = parted(folders["gpt2"]).logits([[ENTRIES, *rows[1:]]])[0][:, told["entries"]]
    np.testing.assert_allclose(found, told["logits"], atol=CLOSE)


def test_an_export_says_what_is_lost_of_two_vectors(folders, tmp_path, capsys):
    """Nothing of equal ones; of an entry that no text contains, nothing either."""
    model = md4_jax.load(folders["gpt2"])
    model.export(tmp_path / "equal")
    assert not capsys.readouterr().err
    assert arrays(tmp_path / "equal").keys() == arrays(folders["gpt2"]).keys()
    model = parted(folders["gpt2"])
    model.export(tmp_path / "ends")
    said = capsys.readouterr().err
    assert "the entry 120 is both" in said and "differ by up to 0.5;" in said
    again, z = md4_jax.load(tmp_path / "ends"), np.array([[ENTRIES, 5, 120, 1]])
    off = np.abs(again.logits(z) - model.logits(z)).max(axis=(0, 2))
    assert off[:2].max() < 1e-6 and off[2:].min() > 1e-3
    other = peer_folder(tmp_path, "gpt2", eos_token_id=121)  # the entry 120 is in no text
    parted(other).export(tmp_path / "begins")
    assert not capsys.readouterr().err
