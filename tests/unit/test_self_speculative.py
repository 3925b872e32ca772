"""Self-speculative decoding: drafts from masks, and the tokens of left-to-right decoding."""

import itertools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_networks
from noisy_blocks import drawn
from peer_folders import answers, peer_folder

import md4_jax
from md4_jax.evals.samples import drawn_samples
from md4_jax.model.answers import drawn as draw_answers
from md4_jax.objectives.sdlm import SDLM
from md4_jax.perf.work import positions_cached, positions_of_evaluation
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Prompt, UserError, batch_of
from md4_jax.samplers import loop
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.self_speculative import SelfSpeculative
from md4_jax.samplers.transforms import Transform

SYMBOLS, MASK, V = 123, 121, 3
TOLD = answers("nemotron")
WINDOWS = answers("sdlm")
NAME = {"name": "self_speculative"}


def own(entries) -> np.ndarray:
    """Entries of Nemotron's vocabulary as symbols here, where the mask is the last."""
    entries = np.asarray(entries)
    return np.where(entries == MASK, SYMBOLS, entries - (entries > MASK))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(name, keys) -> a loaded model, once."""
    made = {}

    def load(name: str, **keys):
        asked = (name, *keys.items())
        if asked not in made:
            folder = peer_folder(tmp_path_factory.mktemp(name), name)
            made[asked] = md4_jax.load(folder, {f"network.{k}": v for k, v in keys.items()})
        return made[asked]

    return load


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", range(len(TOLD["speculative"])))
def test_the_tokens_and_evaluations_of_its_own_code(number, models):
    """Of Nemotron-Labs-Diffusion, also with the end of a text, and of a shifted network."""
    told = TOLD["speculative"][number]
    model = models("nemotron", **({"shifted": True} if told["shifted"] else {}))
    length = len(told["prompt"]) + told["length"]
    options = dict(NAME, width=told["block"], steps=1)
    if "end" in told:
        options["stop"] = model.domain.decode(own([told["end"]]))
    found, used = drawn(model, own(told["prompt"]), length, **options)
    expected = own(told["tokens"]).tolist()[:length]
    assert found[: len(expected)] == expected and used == told["evaluations"]
    assert "end" in told or len(expected) == length


@pytest.mark.slow
def test_rounds_keep_the_tokens_of_its_own_code(models):
    """A text that ends where a round of theirs ends takes the evaluations up to there."""
    told = TOLD["speculative"][0]
    model = models("nemotron")
    for number, count in enumerate(told["read"][1:3], 1):
        asked = dict(NAME, width=told["block"], steps=1)
        found, used = drawn(model, own(told["prompt"]), count + 1, **asked)
        assert found == own(told["tokens"]).tolist()[: count + 1]
        assert used == 1 + 2 * number


@pytest.mark.slow
def test_windows_keep_what_its_own_code_verifies(models):
    """SDLM's code reports a token one evaluation later: that which is verified already."""
    told = WINDOWS["samples"][0]
    prompt, model = told["prompt"], models("sdlm")
    for number, seen in enumerate(WINDOWS["speculative"][:-1], 1):
        # One more token is certain after `number` evaluations of windows, and one before.
        found, used = drawn(model, prompt, len(prompt) + len(seen) + 1, **NAME, steps=1)
        assert found[len(prompt) : -1] == seen and used == number + 1
    assert found[-1] == WINDOWS["speculative"][-1][len(seen)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name, width", [("nemotron", 4), ("sdlm", 4), ("sdlm", 3)])
def test_greedy_tokens_are_those_from_left_to_right(name, width, models):
    """Those of blocks of one token, each the next one, and of windows of which one is kept."""
    model = models(name)
    prompt = np.random.default_rng(width).integers(0, 119, 5).astype(np.int32)
    plain = dict(name="confidence", block=1, next_token=True, steps=1)
    if name == "sdlm":
        plain = dict(name="longest_prefix", limit=1.0, width=width, steps=1)
    expected, _ = drawn(model, prompt, 24, **plain)
    found, used = drawn(model, prompt, 24, **NAME, width=width, steps=1)
    assert found == expected and used <= (19 if name == "sdlm" else 1 + 2 * 18)


def texts(model, prompts, **options):
    """Draws texts of 20 tokens with given ones, one of each (tokens, given)."""
    experiment = model.sampling({**NAME, "num": 1, "length": 20, "steps": 3, **options})
    return drawn_samples(experiment, model.params, {}, prompts)


@pytest.mark.quick(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "name, keys",
    [
        ("nemotron", {}),
        ("nemotron", {"shifted": True}),
        ("nemotron", {"scan_blocks": False}),
        ("sdlm", {}),
    ],
)
@pytest.mark.cases(2)
def test_drafts_change_no_token(name, keys, temperature, models):
    """Neither at any temperature, nor beside given tokens and longer prompts of other texts."""
    model = models(name, **keys)
    rng = np.random.default_rng(3)
    tokens, given = rng.integers(0, 119, (4, 20)).astype(np.int32), np.zeros((4, 20), bool)
    given[1, :7], given[2, :2], given[2, 4:13], given[3, 18:] = True, True, True, True
    prompts = [Prompt(*row) for row in zip(tokens, given, strict=True)]
    options = dict(temperature=temperature, top_p=0.9, exclude=model.domain.decode(np.array([5])))
    wide = [texts(model, prompts, width=width, **options) for width in (4, 7)]
    one = texts(model, prompts, width=4, cached=False, **options)
    np.testing.assert_array_equal(wide[0].tokens, one.tokens)
    if name == "nemotron":  # the distribution of a window depends on its size
        np.testing.assert_array_equal(wide[1].tokens, one.tokens)
    np.testing.assert_array_equal(one.tokens[given], tokens[given])
    assert (one.evaluations == 20).all() and not (one.tokens == 5)[~given].any()
    alone = texts(model, prompts[1:2], width=4, **options | {"seed": 0})
    if temperature == 0.0:
        np.testing.assert_array_equal(alone.tokens[0], wide[0].tokens[1])
        assert alone.evaluations[0] == wide[0].evaluations[1]


@pytest.fixture(scope="module")
def flat(models):
    """Draws 3 texts of 21 tokens in rounds of 5, without a text to see: every draft is right."""
    model = models("nemotron")
    params = {**model.params, "network": jax.tree.map(jnp.zeros_like, model.params["network"])}
    options = {**NAME, "num": 3, "length": 21, "width": 5, "steps": 1}

    def draw(prompts=None, **keys):
        return drawn_samples(model.sampling({**options, **keys}), params, {}, prompts)

    return draw


def test_the_noise_of_a_draft_is_that_of_its_verification(flat):
    found = flat()
    # A token from a mask, and four rounds of 5.
    assert (found.evaluations == 1 + 2 * 4).all() and len(np.unique(found.tokens)) > 20


def test_given_tokens_are_not_verified(flat):
    """They are not those that the model would draw, and cost no round."""
    tokens, given = np.full((1, 21), 7, np.int32), np.zeros((1, 21), bool)
    given[0, [3, 9, 10, 16]] = True
    found = flat([Prompt(tokens[0], given[0])], num=1)
    assert (found.evaluations == 1 + 2 * 4).all() and (found.tokens[given] == 7).all()
    assert len(np.unique(found.tokens[~given])) > 10


def test_a_text_that_has_ended_needs_no_more_rounds(flat, models):
    """The end is drawn in the second round of a text; no other text has this token."""
    free = flat()
    (text, place) = next(
        (text, place)
        for text, place in itertools.product(range(3), range(6, 11))
        if np.sum(free.tokens == free.tokens[text, place]) == 1
    )
    stop = models("nemotron").domain.decode(free.tokens[text, place : place + 1])
    expected = np.full(3, 1 + 2 * 4)
    expected[text] = 1 + 2 * 2
    np.testing.assert_array_equal(flat(stop=stop).evaluations, expected)


@pytest.fixture(scope="module")
def tiny():
    """(denoiser, process, chances of the 81 texts of 4 symbols) of blocks, and of windows."""
    made = {}
    for kind, keys in (("blocks", {"causal_context": True}), ("windows", {})):
        network, params = tiny_networks.built(vocab_size=V, time_conditioning=False, **keys)
        denoiser, process = network.bind(jax.tree.map(jnp.asarray, params)), Masking(V)
        x = jnp.asarray(list(itertools.product(range(V), repeat=4)))
        if kind == "windows":
            chances = np.exp(-SDLM(2, "token")(denoiser, process, batch_of(x), None, None)[0])
        else:
            mask = jnp.full((len(x), 1), V)
            first = denoiser.blocks.features(mask, jnp.ones((len(x), 1)), mask, 1)
            rest = denoiser.blocks.reading(x, jnp.zeros(len(x)))[:, :-1]
            logits = denoiser.unembed(jnp.concatenate([first, rest], axis=1))
            logs = jnp.take_along_axis(jax.nn.log_softmax(logits), x[..., None], axis=-1)
            chances = np.exp(np.sum(logs[..., 0], axis=1))
        made[kind] = denoiser, process, np.asarray(chances)
    return made


@pytest.mark.parametrize("kind", ["blocks", "windows"])
def test_the_distribution_is_that_of_the_model_from_left_to_right(kind, tiny):
    """By enumeration; 6000 draws, within 4.5 standard errors."""
    (denoiser, process, chances), many = tiny[kind], 6000
    np.testing.assert_allclose(chances.sum(), 1.0, rtol=1e-5)
    step = SelfSpeculative(width=2, in_windows=kind == "windows", transform=Transform())
    run = jax.jit(lambda keys: loop.sample(
        denoiser, process, step, grid=uniform(2), keys=keys, prompt=loop.no_prompt(many, 4)
    )[0])  # fmt: skip
    chain = run(exact.keys_for(6, many))
    found = np.bincount(np.asarray(chain.z) @ [27, 9, 3, 1], minlength=81) / many
    often, error = chances * many > 5, np.sqrt(chances * (1 - chances) / many)
    assert often.sum() > 20 and np.abs((found - chances) / error)[often].max() < 4.5
    logs = np.log(np.asarray(chain.confidence)).sum(axis=1)
    np.testing.assert_allclose(
        np.exp(logs), chances[np.asarray(chain.z) @ [27, 9, 3, 1]], rtol=1e-4
    )
    assert np.unique(chain.evaluations).tolist() == ([3, 4] if kind == "windows" else [5, 7])


@pytest.mark.slow
def test_the_network_may_know_the_time_and_positions(models):
    """A draft is told the part of its masks; what is verified has no noise."""
    options = dict(causal_context=True, time_conditioning=True, positions=16, vocab_size=V)
    network, params = tiny_networks.built(**options)
    denoiser, keys = network.bind(jax.tree.map(jnp.asarray, params)), exact.keys_for(2, 8)
    found = []
    for width, cached in ((1, True), (4, True), (4, False)):
        step = SelfSpeculative(width=width, cached=cached)
        chain, _ = loop.sample(
            denoiser, Masking(V), step, grid=uniform(2), keys=keys, prompt=loop.no_prompt(8, 10)
        )
        found.append(np.asarray(chain.z))
        assert width > 1 or (chain.evaluations == 10).all()
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron", "sdlm"])
def test_an_answer_is_drawn_as_if_nothing_came_after_it(name, models):
    model = models(name)
    prompt = np.random.default_rng(9).integers(0, 119, 19).astype(np.int32)
    (found,) = draw_answers(model, [prompt], 6, NAME | {"temperature": 0.0})
    expected, _ = drawn(model, prompt, 25, **NAME, steps=1)
    assert found.tolist() == expected[19:]


def test_its_width_is_that_of_the_training_and_so_is_its_cost(models):
    for name, each, most in (("nemotron", 4, 2 * 4 * 20), ("sdlm", 4 * 5, 4 * 5 * 20)):
        model = models(name)
        experiment = model.sampling({**NAME, "length": 20})
        assert experiment.sampler_step.size == 4
        assert positions_of_evaluation(experiment, model.params, 20) == each
        assert positions_cached(experiment, model.params, 20) == most
    one = model.sampling({**NAME, "length": 20, "cached": False})
    assert positions_cached(one, model.params, 20) is None


@pytest.mark.parametrize(
    "name, asked, match",
    [
        ("nemotron", {"block": 4}, "sample.block=4 cannot be used with sample.name='self_spec"),
        ("nemotron", {"memory": 8}, "sample.memory=8 cannot be used .* Set sample.memory=0"),
        ("nemotron", {"next_token": True}, "sample.next_token=True cannot be used with"),
        ("nemotron", {"guidance": 2.0}, "sample.guidance=2.0 cannot be used with .* one network"),
        ("sdlm", {"width": 1}, "sample.width must be 0, or at least 2, for a model of windows"),
        ("nemotron", {"width": -1}, "sample.width must be 0, or at least 1, not -1"),
        (
            "nemotron",
            {"reward": {"name": "pattern", "pattern": "a"}},
            "sample.reward.name=pattern cannot be used with sample.name='self_speculative'",
        ),
        (
            "llada",
            {"width": 4},
            "'self_speculative' needs a network that reads clean tokens from left",
        ),
        ("sdar", {}, "needs .*network.causal_context=True with objective.name='block'"),
    ],
)
def test_what_does_not_fit_is_refused(name, asked, match, models):
    with pytest.raises(UserError, match=match):
        models(name).sampling({**NAME, **asked})


def test_a_model_without_blocks_needs_a_width(models):
    keys = {"objective.name": "md4", "sample.name": "self_speculative"}
    with pytest.raises(UserError, match="sample.width=0 is the size of the blocks of the training"):
        md4_jax.load(models("nemotron").origin, keys)
