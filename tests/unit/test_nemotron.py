"""Nemotron-Labs-Diffusion: block diffusion whose clean tokens see only those before them."""

import json
from pathlib import Path

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_networks
from noisy_blocks import ADAPTED, BLOCK, drawn, of_blocks
from peer_folders import answers, peer_folder, trained_on
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.evals.samples import drawn_samples
from md4_jax.model.answers import drawn as draw_answers
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Prompt, UserError, batch_of
from md4_jax.samplers.guidance import guided

CLOSE, SYMBOLS, MASK = 3e-5, 123, 121
TOLD = answers("nemotron")
YARN = TOLD["config"]["rope_parameters"]
LEFT = {"dlm_paradigm": "autoregressive"}


def own(entries) -> np.ndarray:
    """Entries of their vocabulary as symbols here, where the mask is the last."""
    entries = np.asarray(entries)
    return np.where(entries == MASK, SYMBOLS, entries - (entries > MASK))


def of_symbols(logits) -> np.ndarray:
    """Their logits of what is a symbol here."""
    return np.delete(np.asarray(logits), MASK, axis=-1)[..., :SYMBOLS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return md4_jax.load(peer_folder(tmp_path_factory.mktemp("nemotron"), "nemotron"))


def test_its_config_says_blocks_and_a_causal_context(model):
    network = model.config["network"]
    assert model.config["objective"] == {"name": "block", "block": BLOCK}
    assert network["causal_context"] and not network["causal"] and not network["shifted"]
    assert tuple(network["rotary_scaling"]) == (4.0, 0.05, 1.0, 8.0)
    assert network["rotary_ramp"] == "pairs" and tuple(network["query_scaling"]) == (0.5, 8.0)
    assert model.domain.vocab_size == SYMBOLS == model.experiment.process.mask_id


def test_the_logits_of_noisy_blocks_after_clean_tokens(model):
    found = of_blocks(model, own(TOLD["z"]), own(TOLD["clean"]))
    np.testing.assert_allclose(found, of_symbols(TOLD["outputs"]), atol=CLOSE)


def test_the_logits_of_a_whole_text(model):
    found = model.logits(own(TOLD["z"])[:1])
    np.testing.assert_allclose(found, of_symbols(TOLD["bidirectional"]), atol=CLOSE)


@pytest.mark.parametrize("scan", [True, False])
def test_the_cache_holds_tokens_that_see_only_those_before_them(scan, tmp_path):
    """From the last of them the next token follows."""
    keys = {"network.scan_blocks": scan}
    blocks = _denoiser(md4_jax.load(peer_folder(tmp_path, "nemotron"), config=keys))
    z, clean = own(TOLD["z"]), own(TOLD["clean"])
    cache, zeros = blocks.blocks.empty_cache(2, z.shape[1]), jnp.zeros(2)
    append, read = jax.jit(blocks.blocks.append_block), jax.jit(blocks.blocks.read)
    for begin in range(0, z.shape[1], BLOCK):
        part = slice(begin, begin + BLOCK)
        found = blocks.unembed(append(z[:, part], zeros, cache)[0])
        np.testing.assert_allclose(found, of_symbols(TOLD["outputs"])[:, part], atol=CLOSE)
        cache = read(clean[:, part], zeros, cache)
        h, follows = blocks.blocks.following(cache)
        expected = of_symbols(TOLD["causal"])[:, begin + BLOCK - 1]
        np.testing.assert_allclose(blocks.unembed(h), expected, atol=CLOSE)
        assert bool(follows)


def _denoiser(model):
    return model.experiment.network.denoiser(model.params)


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", range(len(TOLD["samples"])))
@pytest.mark.cases(1)
def test_the_tokens_that_its_sampler_draws(number, model):
    """A first token from the left, which costs no evaluation, and then the surest ones."""
    told = TOLD["samples"][number]
    rule = {"per_step": 1, "steps": BLOCK}
    if told["threshold"] is not None:
        rule = {"rule": "threshold", "limit": told["threshold"], "steps": BLOCK}
    options = dict(name="confidence", next_token=True) | rule
    found, passes = drawn(model, own(told["prompt"]), len(told["tokens"]), **options)
    assert found == own(told["tokens"]).tolist() and passes == told["passes"]


def slowly(model, prompt, length: int, threshold: float) -> list[int]:
    """What is drawn with blocks after the prompt, each from a whole pass over all of the text.

    The text is moved to the right in a sequence of whole blocks, as a document of its own.
    """
    text = list(prompt)
    while len(text) < length:
        shift = -len(text) % BLOCK
        clean = jnp.asarray([[0] * shift + text + [0] * BLOCK])
        segments = jnp.asarray([[0] * shift + [1] * (clean.shape[1] - shift)])
        denoiser = model.experiment.network.denoiser(model.params, {"segments": segments})
        before = denoiser.blocks.reading(clean, jnp.zeros(1))[:, shift + len(text) - 1]
        block = [int(jnp.argmax(denoiser.unembed(before)))] + [SYMBOLS] * (BLOCK - 1)
        while SYMBOLS in block:
            z = clean.at[0, -BLOCK:].set(jnp.asarray(block))
            times = jnp.zeros((1, clean.shape[1] // BLOCK))
            logits = denoiser.unembed(denoiser.blocks.features(z, times, clean, BLOCK))
            chances = np.asarray(jax.nn.softmax(logits[0, -BLOCK:]))
            masks = np.asarray(block) == SYMBOLS
            sure = np.where(masks, chances.max(axis=1), -1.0)
            for place in np.flatnonzero((sure >= threshold) | (sure == sure.max())):
                block[place] = int(chances[place].argmax())
        text += block
    return text[:length]


@pytest.mark.campaign
@pytest.mark.parametrize("count", [5, 7])
def test_blocks_begin_where_the_prompt_ends(count, model):
    """Also of two prompts of different lengths in one batch."""
    prompts = [own(TOLD["samples"][number]["prompt"]) for number in (0, 1)]
    prompts = [prompts[0][:count], prompts[1]]
    options = dict(rule="threshold", limit=0.2, steps=BLOCK, next_token=True, temperature=0.0)
    experiment = model.sampling({"num": 1, "length": 16, "name": "confidence", **options})
    asked = []
    for prompt in prompts:
        tokens, given = np.zeros(16, np.int32), np.arange(16) < len(prompt)
        tokens[: len(prompt)] = prompt
        asked.append(Prompt(tokens, given))
    found = drawn_samples(experiment, model.params, {}, asked).tokens
    for row, prompt in zip(found, prompts, strict=True):
        assert row.tolist() == slowly(model, prompt.tolist(), 16, 0.2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("count, size", [(19, 1), (17, 5), (18, 3)])
@pytest.mark.cases(1)
def test_an_answer_is_drawn_as_if_nothing_came_after_it(count, size, model):
    """Also where its last block ends later than whole blocks of all tokens would."""
    prompt = np.random.default_rng(count).integers(0, 120, count).astype(np.int32)
    options = dict(name="confidence", steps=BLOCK)
    (found,) = draw_answers(model, [prompt], size, options | {"temperature": 0.0})
    expected, _ = drawn(model, prompt, 32, **options)
    assert found.tolist() == expected[count : count + size]


@pytest.mark.slow
def test_the_loss_may_have_that_of_the_next_token(model):
    """As in the authors' training: with a weight, beside that of the masks."""
    clean = own(TOLD["clean"])
    logs = jax.nn.log_softmax(of_symbols(TOLD["causal"])[:, :-1])
    each = -np.take_along_axis(np.asarray(logs), clean[:, 1:, None], axis=-1)[..., 0]
    batch, u, keys = batch_of(clean), jnp.full(2, 0.4), exact.keys_for(0, 2)
    plain, joint = (
        BlockDiffusion(BLOCK, left_to_right=weight)(
            _denoiser(model), model.experiment.process, batch, u, keys
        )
        for weight in (0.0, 0.3)
    )
    np.testing.assert_allclose(joint[1]["left_to_right"], each.sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(joint[0] - plain[0], 0.3 * each.sum(axis=1), rtol=1e-3)
    objective = BlockDiffusion(BLOCK, left_to_right=0.3)
    assert not objective.is_bound(model.experiment.process)
    assert objective.for_evaluation().is_bound(model.experiment.process)
    with pytest.raises(UserError, match="left_to_right above 0 needs network.causal_context=True"):
        md4_jax.load(
            model.origin, {"objective.left_to_right": 0.3, "network.causal_context": False}
        )


def test_the_cache_may_be_computed_again(model):
    """From clean tokens that see only those before them."""
    told = TOLD["samples"][1]
    rule = {"rule": "threshold", "limit": told["threshold"], "steps": BLOCK, "cached": False}
    options = dict(name="confidence", next_token=True) | rule
    found, _ = drawn(model, own(told["prompt"]), len(told["tokens"]), **options)
    assert found == own(told["tokens"]).tolist()


@pytest.mark.slow
def test_it_is_also_a_model_that_reads_from_left_to_right(tmp_path):
    """With all entries as symbols; its texts begin with the entry 120."""
    model = md4_jax.load(peer_folder(tmp_path, "nemotron", **LEFT))
    _check_causal(model)


def test_ministral_3_is_an_autoregressive_baseline(tmp_path):
    _check_causal(md4_jax.load(ministral(tmp_path)))


def ministral(directory: Path) -> Path:
    """The same arrays in the layout of transformers' Ministral3ForCausalLM."""
    named = {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}
    folder = peer_folder(directory, "nemotron", mask_token_id=None, **named)
    arrays = load_file(folder / "model.safetensors")
    names = {"encoder.": "model.", "diffusion_head.": "lm_head."}
    renamed = {}
    for name, array in arrays.items():
        begin = next(x for x in names if name.startswith(x))
        renamed[names[begin] + name.removeprefix(begin)] = array
    save_file(renamed, folder / "model.safetensors")
    return folder


def _check_causal(model) -> None:
    clean, entries = np.asarray(TOLD["clean"]), SYMBOLS + 1
    assert model.domain.vocab_size == entries and model.config["network"]["causal"]
    assert not model.config["network"]["causal_context"]
    # Texts begin with the mask here, whose vector is that of the entry 120.
    text = np.concatenate([[entries], clean[0]])[None]
    with_start = model.logits(text)
    assert with_start.shape == (1, clean.shape[1] + 1, entries)
    network = model.experiment.network.denoiser(model.params)
    h = network.features(jnp.asarray(clean), jnp.zeros(2))
    expected = np.asarray(TOLD["causal"])[..., :entries]
    np.testing.assert_allclose(network.unembed(h), expected, atol=CLOSE)
    started = network.features(jnp.asarray([[120]]), jnp.zeros(1))
    np.testing.assert_allclose(with_start[:, 0], network.unembed(started)[:, 0], atol=CLOSE)
    cache = network.blocks.empty_cache(2, clean.shape[1])
    for place in range(clean.shape[1]):
        h, cache = network.blocks.append_block(clean[:, place : place + 1], jnp.zeros(2), cache)
    np.testing.assert_allclose(network.unembed(h[:, 0]), expected[:, -1], atol=CLOSE)


def test_its_bound_is_made_of_its_logits(model):
    """A block with k masks weighs 4 / k."""
    z, clean = own(TOLD["z"]), own(TOLD["clean"])
    log_mu = jax.nn.log_softmax(of_symbols(TOLD["outputs"]))
    nats = -np.take_along_axis(np.asarray(log_mu), clean[..., None], axis=2)[..., 0]
    masks = (z == SYMBOLS).reshape(len(z), -1, BLOCK)
    each = np.sum(masks * nats.reshape(masks.shape), axis=2)
    expected = np.sum(BLOCK / np.maximum(1, masks.sum(axis=2)) * each, axis=1)
    run, share = model.experiment, jnp.asarray(masks.mean(axis=2))
    batch = batch_of(jnp.asarray(clean))
    found = run.objective.loss_at(_denoiser(model), run.process, batch, jnp.asarray(z), share)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.isfinite(model.score("abab", draws=2).nats).all()


def test_it_goes_back_with_the_same_arrays(tmp_path):
    folder = peer_folder(tmp_path, "nemotron")
    exported = md4_jax.load(folder).export(tmp_path / "exported")
    told = json.loads((exported / "config.json").read_text())
    assert told == json.loads((folder / "config.json").read_text())
    held, kept = (load_file(x / "model.safetensors") for x in (folder, exported))
    assert held.keys() == kept.keys()
    rows = np.delete(np.arange(SYMBOLS + 1), MASK)  # those of the head that are symbols
    for name, array in held.items():
        if name == "diffusion_head.weight":
            assert np.array_equal(array[rows], kept[name][rows])
        else:
            end = SYMBOLS + 1 if "embed" in name else None
            assert np.array_equal(array[:end], kept[name][:end])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "source, keys, kind, block, context",
    [
        ("nemotron", {"objective.block": 8}, "nemotron_labs_diffusion", 8, None),
        ("left", ADAPTED, "nemotron_labs_diffusion", 16, None),
        ("nemotron", {"network.causal_context": False}, "a2d-ministral3", 4, None),
        ("nemotron", {"objective.name": "md4"}, "a2d-ministral3", None, None),
        ("ministral3", ADAPTED, "a2d-ministral3", 16, True),
        ("qwen3", ADAPTED, "a2d-qwen3", 16, True),
        ("gpt2", ADAPTED, "gpt2", 16, True),
    ],
)
@pytest.mark.cases(2)
def test_what_was_made_of_it_leaves_with_its_blocks(source, keys, kind, block, context, tmp_path):
    """Under a name whose own code computes the same, or else under one that this package reads."""
    changes = LEFT if source == "left" else {}
    if source == "ministral3":
        folder = ministral(tmp_path)
    else:
        folder = peer_folder(tmp_path, "nemotron" if source == "left" else source, **changes)
    model = md4_jax.load(folder, config={"network.causal_context": block is not None} | keys)
    exported = model.export(tmp_path / "exported")
    told = json.loads((exported / "config.json").read_text())
    assert (told["model_type"], told.get("block_size")) == (kind, block)
    assert told.get("causal_context") == context and told.get("dlm_paradigm") != "autoregressive"
    again = md4_jax.load(exported)
    assert again.experiment.objective == model.experiment.objective
    same = ("causal_context", "shifted", "causal", "rotary_scaling", "query_scaling")
    assert all(again.config["network"][x] == model.config["network"][x] for x in same)
    z = np.array([[0, again.domain.vocab_size, 5, 2, 1, 1, 2, 3]])
    np.testing.assert_array_equal(of_blocks(again, z, z), of_blocks(model, z, z))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"dlm_paradigm": "prefix"}, "dlm_paradigm='prefix'; only bidirectional, block_diff, auto"),
        ({"rope_parameters": None}, "config.json lacks rope_parameters"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "truncate=False for rotary positions"),
        (
            {"rope_parameters": {**YARN, "rope_type": "longrope"}},
            "by 'longrope', .* and 'yarn'",
        ),
        (
            {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 for rotary positions",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            "config.json lacks low_freq_factor",
        ),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"hidden_size": 64}, "says hidden_size=64, but its arrays have 32"),
        ({"mask_token_id": 300}, "the mask is 300 .*, but must be below .* of 128"),
        ({"model_type": "nemotron_labs_diffusion_vlm"}, "has an unsupported architecture"),
    ],
)
def test_what_is_not_known_is_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, "nemotron", **changes))


@pytest.mark.parametrize(
    "rope, scaling, gain",
    [
        ({}, (4.0, 0.05, 1.0, 8.0), (1 + 0.1 * np.log(4)) / (1 + 0.05 * np.log(4))),
        ({"mscale": None}, (4.0, 0.05, 1.0, 8.0), 1 + 0.1 * np.log(4)),
        ({"attention_factor": 0.5}, (4.0, 0.05, 1.0, 8.0), 0.5),
        ({"factor": 0.25}, (0.25, 0.05, 1.0, 8.0), 1.0),
        ({"factor": None, "mscale_all_dim": 1.0}, (8.0, 0.05, 1.0, 8.0), 1.0),
        (
            {"beta_fast": None, "beta_slow": None, "original_max_position_embeddings": 2048},
            (4.0, 1.0, 32.0, 2048.0),
            (1 + 0.1 * np.log(4)) / (1 + 0.05 * np.log(4)),
        ),
    ],
)
@pytest.mark.cases(3)
def test_what_config_json_says_of_yarn(rope, scaling, gain, tmp_path):
    """As transformers 5.24 reads it."""
    network = md4_jax.load(peer_folder(tmp_path, "nemotron", rope_parameters={**YARN, **rope}))
    network = network.config["network"]
    assert tuple(network["rotary_scaling"]) == scaling
    assert network["rotary_gain"] == pytest.approx(gain) and network["rotary_base"] == 100.0


def test_scaled_positions_of_a_qwen_are_those_of_yarn(tmp_path):
    """Without a scaling of queries, whatever else config.json says of positions."""
    rope = {"type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}
    network = md4_jax.load(peer_folder(tmp_path, "qwen2", rope_scaling=rope)).config["network"]
    assert tuple(network["rotary_scaling"]) == (4.0, 1.0, 32.0, 64.0)
    assert network["rotary_gain"] == pytest.approx(1.138629) and not network["query_scaling"]


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"network.causal": True}, "causal_context=True .* needs network.causal=False, not True"),
        ({"network.local_width": 3}, "needs network.local_width=0, not 3"),
        ({"network.query_scaling": (0.1,)}, r"query_scaling=\(0.1,\) must be empty, or"),
        ({"network.rotary_gain": 0.0}, "rotary_gain=0.0 must be above 0"),
        ({"network.rotary_base": 1.0}, "rotary_ramp='pairs' needs network.rotary_base above 1"),
        ({"network.rotary_ramp": "none"}, "network.rotary_ramp must be turns or pairs, not 'none'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, "nemotron"), config=keys)


def test_tokens_outside_of_a_block_are_not_computed_with_it(model):
    with pytest.raises(UserError, match="dual_cache=True needs network.causal_context=False"):
        model.sample(num=1, length=8, steps=4, dual_cache=True)


def test_guidance_reads_clean_tokens_from_the_left():
    """Both of its networks do."""
    options = dict(classes=2, causal_context=True, time_conditioning=False)
    network, params = tiny_networks.built(**options)
    both = {"network": jax.tree.map(jnp.asarray, params), "process": Masking(5)}
    z, label = jnp.asarray([[1, 4, 0], [2, 2, 3]]), {"label": jnp.asarray([0, 1])}

    def following(denoiser):
        """After a text of two tokens, behind a place that is no part of it."""
        blocks = denoiser.blocks
        cache = blocks.beginning(blocks.empty_cache(2, 3), jnp.ones(2, jnp.int32))
        cache = blocks.read(z, jnp.zeros(2), cache)
        return jax.nn.log_softmax(denoiser.unembed(blocks.following(cache)[0]))

    told, free = (following(network.denoiser(both, context)) for context in (label, {}))
    found = following(guided(network, both, label, 2.5)[0])
    np.testing.assert_allclose(found, jax.nn.log_softmax(2.5 * told - 1.5 * free), atol=1e-5)


@pytest.mark.campaign
def test_training_goes_on(tmp_path):
    folder = peer_folder(tmp_path, "nemotron")
    run = trained_on(folder, tmp_path, {"network.scan_blocks": False})
    model = md4_jax.load(run)
    assert model.step == 2 and model.config["network"]["causal_context"]
