"""Block diffusion models in the layout of Qwen: SDAR, Fast-dLLM v2, and what is made of others."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_networks
from noisy_blocks import ADAPTED, BLOCK, drawn, of_blocks
from peer_folders import answers, chat_folder, peer_folder

import md4_jax
from md4_jax.processes.masking import Masking
from md4_jax.protocols import UserError, batch_of
from md4_jax.samplers.guidance import guided

CLOSE, SYMBOLS = 3e-5, 123  # of logits up to 12; on one processor they differ by 1.4e-5
NAMES = ("sdar", "fast_dllm_v2", "sdarmoe")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("block_decoders")
    return {name: md4_jax.load(peer_folder(directory, name)) for name in NAMES}


@pytest.mark.quick(1)
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_logits_of_blocks_are_those_of_their_own_code(name, models):
    model, told = models[name], answers(name)
    assert model.domain.vocab_size == SYMBOLS == model.experiment.process.mask_id
    found = of_blocks(model, told["z"], told["clean"])
    np.testing.assert_allclose(found, np.asarray(told["outputs"])[..., :SYMBOLS], atol=CLOSE)
    assert model.config["objective"] == {"name": "block", "block": BLOCK}
    assert model.config["network"]["shifted"] == (name == "fast_dllm_v2")
    assert not model.config["network"]["causal"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.cases(1)
def test_the_bound_is_made_of_their_logits(name, models):
    """A block with k masks weighs 4 / k."""
    model, told = models[name], answers(name)
    z, clean = np.asarray(told["z"]), np.asarray(told["clean"])
    logits = np.asarray(told["outputs"])[..., :SYMBOLS]
    exact = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    nats = -np.take_along_axis(exact, clean[..., None], axis=2)[..., 0]
    masks = (z == SYMBOLS).reshape(len(z), -1, BLOCK)
    each = np.sum(masks * nats.reshape(masks.shape), axis=2)
    expected = np.sum(BLOCK / np.maximum(1, masks.sum(axis=2)) * each, axis=1)
    own = model.experiment
    denoiser, share = own.network.denoiser(model.params), masks.mean(axis=2)
    found = own.objective.loss_at(
        denoiser, own.process, batch_of(jnp.asarray(clean)), jnp.asarray(z), jnp.asarray(share)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.isfinite(model.score("abab", draws=2).nats).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, options",
    [
        ("static_4", dict(steps=4)),
        ("static_2", dict(steps=2, per_step=2)),
        ("dynamic", dict(steps=4, rule="threshold", limit=0.12)),
    ],
)
@pytest.mark.cases(1)
def test_the_tokens_that_sdar_s_sampler_draws(way, options, models):
    """Six tokens are given, of which two are in a block that goes on; 14 are drawn."""
    told = answers("sdar")
    found, passes = drawn(models["sdar"], told["clean"][0][:6], 20, name="confidence", **options)
    assert found == told[way] and passes == told[f"{way}_passes"]


@pytest.fixture(scope="module")
def diffcoder(tmp_path_factory):
    return md4_jax.load(peer_folder(tmp_path_factory.mktemp("coder"), "stable_diffcoder"))


def as_symbols(entries, mask: int = 5) -> np.ndarray:
    """Entries of a vocabulary whose mask is among the others as symbols here."""
    entries = np.asarray(entries)
    return np.where(entries == mask, SYMBOLS, entries - (entries > mask))


def test_a_llama_of_stable_diffcoder_s_class_is_block_diffusion(diffcoder, tmp_path):
    """Its config.json says neither blocks nor the mask, which is its entry 5."""
    told = answers("stable_diffcoder")
    assert diffcoder.config["objective"] == {"name": "block", "block": BLOCK}
    assert diffcoder.domain.vocab_size == SYMBOLS
    found = of_blocks(diffcoder, as_symbols(told["z"]), as_symbols(told["clean"]))
    expected = np.delete(np.asarray(told["outputs"]), 5, axis=-1)[..., :SYMBOLS]
    np.testing.assert_allclose(found, expected, atol=CLOSE)
    config = json.loads((diffcoder.export(tmp_path / "back") / "config.json").read_text())
    assert config["architectures"] == ["StableDiffcoderForCausalLM"]
    assert config["model_type"] == "llama" and config.get("block_size", BLOCK) == BLOCK


@pytest.mark.parametrize("number", range(4))
@pytest.mark.cases(1)
def test_the_tokens_that_stable_diffcoder_s_sampler_draws(number, diffcoder):
    """After prompts that end with a block or within one, with and without a threshold."""
    told = answers("stable_diffcoder")["samples"][number]
    rule = dict(per_step=1)
    if told["threshold"] is not None:
        rule = dict(rule="threshold", limit=told["threshold"])
    length = len(told["tokens"]) + -len(told["tokens"]) % BLOCK
    options = dict(name="confidence", steps=BLOCK, **rule)
    found, _ = drawn(diffcoder, as_symbols(told["prompt"]), length, **options)
    whole = len(told["tokens"]) // BLOCK * BLOCK  # their last block is shorter
    assert found[:whole] == as_symbols(told["tokens"])[:whole].tolist()


@pytest.mark.campaign
def test_the_tokens_that_fast_dllm_v2_draws_one_by_one(models):
    """Its first token of a block comes from the end of the block before, which the cache keeps."""
    told = answers("fast_dllm_v2")
    options = dict(name="any_order", order="left_to_right", per_step=1)
    found, _ = drawn(models["fast_dllm_v2"], told["clean"][0][:6], 16, **options)
    assert found == told["left_to_right"][:16]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.cases(1)
def test_the_tokens_that_fast_dllm_v2_s_sampler_draws(number, models):
    """In parts of a block, the surest first, after a first token that costs no evaluation."""
    told = answers("fast_dllm_v2_samples")[number]
    keys = {key: told[key] for key in ("limit", "semi_autoregressive")}
    options = dict(name="confidence", rule="threshold", steps=4, next_token=True) | keys
    length = len(told["tokens"])
    found, passes = drawn(models["fast_dllm_v2"], told["prompt"], length, **options)
    assert found == told["tokens"] and passes == told["passes"]


@pytest.mark.campaign
def test_the_first_token_of_a_block_is_the_likeliest_whatever_the_temperature(models):
    """Of the first block it is drawn as the others are, as there is no token before it."""
    model = models["fast_dllm_v2"]
    drawings = [
        drawn(model, [], 12, name="confidence", next_token=True, steps=4, temperature=2.0, seed=n)[
            0
        ]
        for n in range(12)
    ]
    denoiser = model.experiment.network.denoiser(model.params)
    for row in drawings:
        text = jnp.asarray([row])
        whole = of_blocks(model, jnp.full_like(text, SYMBOLS), text)[0]
        assert row[4] == int(jnp.argmax(whole[4])) and row[8] == int(jnp.argmax(whole[8]))
    assert len({row[0] for row in drawings}) > 4 and denoiser.blocks.following is not None


def test_guidance_keeps_the_features_of_the_next_token():
    """The first token of a block is then the likeliest by the guided logits."""
    network, params = tiny_networks.built(classes=2, shifted=True, time_conditioning=False)
    both = {"network": jax.tree.map(jnp.asarray, params), "process": Masking(5)}
    z, label = jnp.asarray([[1, 4, 0], [2, 2, 3]]), {"label": jnp.asarray([0, 1])}

    def following(denoiser):
        cache = denoiser.blocks.append_block(z, jnp.zeros(2), denoiser.blocks.empty_cache(2, 3))[1]
        h, follows = denoiser.blocks.following(cache)
        assert bool(follows)
        return jax.nn.log_softmax(denoiser.unembed(h))

    told, free = (following(network.denoiser(both, context)) for context in (label, {}))
    found = following(guided(network, both, label, 2.5)[0])
    np.testing.assert_allclose(found, jax.nn.log_softmax(2.5 * told - 1.5 * free), atol=CLOSE)


@pytest.mark.parametrize("keys", [{}, {"dual_cache": True}])
def test_a_first_token_that_the_cache_does_not_give_is_refused(keys, models):
    with pytest.raises(UserError, match="needs network.shifted=True or network.causal_context=Tr"):
        models["sdar"].sample(num=1, length=8, steps=4, next_token=True, **keys)


@pytest.mark.parametrize(
    "name, block, mask",
    [("sdar", 4, 151_669), ("sdarmoe", 4, 151_669), ("fast_dllm_v2", 32, 151_665)],
)
def test_what_config_json_does_not_say_is_what_their_code_takes(name, block, mask, tmp_path):
    """The size of blocks, and the entry of the mask, which these tiny tables do not have."""
    absent = {"block_size": None, "bd_size": None}
    model = md4_jax.load(peer_folder(tmp_path / "blocks", name, **absent))
    assert model.config["objective"]["block"] == block
    with pytest.raises(UserError, match=f"the mask is {mask} .*, but must be below .* of 128"):
        md4_jax.load(peer_folder(tmp_path / "mask", name, mask_token_id=None))


def test_a_text_has_whole_blocks(tmp_path):
    folder = peer_folder(tmp_path, "sdar", block_size=5)
    assert md4_jax.load(folder).length == 60
    with pytest.raises(UserError, match="objective.block must be at least 1, not 0"):
        md4_jax.load(peer_folder(tmp_path / "none", "sdar", block_size=0))


@pytest.mark.parametrize(
    "name, shifted, kind, key",
    [
        ("qwen3", False, "sdar", "block_size"),
        ("qwen3moe", False, "sdar_moe", "block_size"),
        ("qwen2", True, "Fast_dLLM_Qwen", "bd_size"),
        ("qwen2", False, "a2d-qwen2", "block_size"),
        ("llama", True, "a2d-llama", "block_size"),
    ],
)
@pytest.mark.cases(1)
def test_a_causal_model_leaves_as_block_diffusion(name, shifted, kind, key, tmp_path):
    changes = ADAPTED | {"network.shifted": shifted, "objective.block": 8}
    model = md4_jax.load(peer_folder(tmp_path, name), config=changes)
    folder = model.export(tmp_path / "exported")
    told = json.loads((folder / "config.json").read_text())
    assert (told["model_type"], told[key], told["mask_token_id"]) == (kind, 8, 124)
    again = md4_jax.load(folder)
    assert again.config["objective"] == model.config["objective"]
    assert again.config["network"]["shifted"] == shifted
    z = np.array([[0, 124, 5, 124, 123, 1, 2, 3]])
    np.testing.assert_array_equal(of_blocks(again, z, z), of_blocks(model, z, z))


def test_a_mistral_leaves_as_a_llama(tmp_path):
    source = peer_folder(tmp_path, "llama", model_type="mistral")
    folder = md4_jax.load(source, config=ADAPTED).export(tmp_path / "exported")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "a2d-llama"
    assert md4_jax.load(folder).config["objective"] == {"name": "block", "block": 16}


def test_other_blocks_are_told_when_it_leaves(tmp_path):
    """And a Dream that learnt to write in blocks is a Fast-dLLM."""
    changes = {"objective.name": "block", "objective.block": 8}
    for name, kind, key in (("sdar", "sdar", "block_size"), ("dream", "Fast_dLLM_Qwen", "bd_size")):
        model = md4_jax.load(peer_folder(tmp_path, name), config=changes)
        folder = model.export(tmp_path / "exported" / name)
        told = json.loads((folder / "config.json").read_text())
        assert (told["model_type"], told[key], told["mask_token_id"]) == (kind, 8, SYMBOLS)
        again = md4_jax.load(folder)
        assert again.config["objective"] == model.config["objective"]
        assert again.config["network"] == model.config["network"]


def test_a_stable_diffcoder_of_other_blocks_leaves_as_one(tmp_path):
    path = peer_folder(tmp_path / "coder", "stable_diffcoder")
    told = json.loads((path / "config.json").read_text())
    folder = md4_jax.load(path, config={"objective.block": 8}).export(tmp_path / "back")
    assert json.loads((folder / "config.json").read_text()) == told | {"block_size": 8}
    assert md4_jax.load(folder).config["objective"] == {"name": "block", "block": 8}


@pytest.mark.campaign
def test_an_entry_that_was_chosen_for_the_mask_stays_it(tmp_path):
    changes = ADAPTED | {"tokenizer.mask": 122}
    model = md4_jax.load(peer_folder(tmp_path, "qwen2"), config=changes)
    again = md4_jax.load(model.export(tmp_path / "exported"))
    assert again.config["tokenizer"]["mask"] == 122 == model.config["tokenizer"]["mask"]
    z = np.array([[0, 123, 5, 122]])
    np.testing.assert_array_equal(of_blocks(again, z, z), of_blocks(model, z, z))


def test_a_model_of_dllm_in_blocks(tmp_path):
    """Its config.json does not say that it was trained in blocks: the config does."""
    folder = peer_folder(tmp_path, "sdar", model_type="a2d-qwen3", block_size=None)
    assert md4_jax.load(folder).config["objective"]["name"] == "md4"
    model = md4_jax.load(folder, config={"objective.name": "block", "objective.block": BLOCK})
    told = answers("sdar")
    found = of_blocks(model, told["z"], told["clean"])
    np.testing.assert_allclose(found, np.asarray(told["outputs"])[..., :SYMBOLS], atol=CLOSE)


def test_blocks_after_the_end_of_a_turn_are_not_drawn(tmp_path, monkeypatch):
    """Also where the model was trained in blocks, and the options name none."""
    seen = {}
    monkeypatch.setattr(
        "md4_jax.model.answers.drawn",
        lambda model, prompts, size, options: [seen.update(options) or np.array([2])],
    )
    blocks = {"objective.name": "block", "objective.block": 4}
    window = {"objective.name": "wedlm", "sample.name": "streaming", "network.causal": False}
    both = "<|endoftext|> <|eot_id|>"
    for changes, stop in ((blocks, both), (window, both), ({}, None)):
        seen.clear()
        md4_jax.load(chat_folder(tmp_path, str(len(changes))), config=changes).chat("hi", 8)
        assert seen.get("stop") == stop
