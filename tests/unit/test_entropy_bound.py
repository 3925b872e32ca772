"""Sampling of uniform noise by entropy bounds: the decisions of transformers, and when it ends."""

import itertools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import answers, peer_folder

import md4_jax
from md4_jax.processes.schedules import LogLinear
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, UserError
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.entropy_bound import EntropyBound, entropy, least
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import no_prompt, sample, with_memory
from md4_jax.samplers.transforms import Transform

CANVAS, KEYS = 4, exact.keys_for(0, 2)


def start(canvas) -> Chain:
    z, none = jnp.asarray(canvas), jnp.zeros(2, jnp.int32)
    return Chain(z, jnp.zeros(z.shape, bool), jnp.zeros(z.shape), none)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return md4_jax.load(peer_folder(tmp_path_factory.mktemp("gemma"), "diffusiongemma"))


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("run", answers("diffusiongemma")["generate"])
def test_steps_decide_as_those_of_transformers(model, run):
    """Each canvas of a recorded run is given; what is drawn in it is left to chance."""
    denoiser, process = model.experiment.network.denoiser(model.params), model.experiment.process
    blocks, zeros, steps = denoiser.blocks, jnp.zeros(2), run["max_denoising_steps"]
    step = EntropyBound(
        run["entropy_bound"], run["stability_threshold"], run["confidence_threshold"],
        cooling=run["t_min"] / run["t_max"], transform=Transform(run["t_max"]),
    )  # fmt: skip
    read = jax.jit(lambda z, cache: blocks.append_block(z, zeros, cache)[1])
    cache = blocks.beginning(blocks.empty_cache(2, 16), jnp.ones(2, jnp.int32))
    known = np.pad(np.asarray(run["sequences"]), ((0, 0), (1, 0)))
    assert run["prompt"] == 7
    cache = read(known[:, 4:8], read(known[:, :4], cache))

    @jax.jit
    def take(chain: Chain, t, cache) -> Chain:
        within = denoiser._replace(features=lambda z, t: blocks.append_block(z, t, cache)[0])
        return step(within, process, with_memory(within, process, step, chain), t, t, KEYS)

    decided = []
    for told in run["steps"]:
        if told["step"] == steps:
            chain, settled = start(told["canvas"]), np.zeros(2, bool)
        chain = chain._replace(z=jnp.asarray(told["canvas"]))
        chain = take(chain, jnp.float32(told["step"] / steps), cache)
        fresh = ~settled
        found = np.asarray(chain.confidence > 0)[fresh]
        np.testing.assert_array_equal(found, np.asarray(told["accepted"], bool)[fresh])
        likeliest = np.asarray(chain.memory.likeliest[:, -1])[fresh]
        np.testing.assert_array_equal(likeliest, np.asarray(told["likeliest"])[fresh])
        settled = settled | np.asarray(told["stops"], bool)
        np.testing.assert_array_equal(chain.memory.settled, settled)
        decided.append(found)
        if told is run["steps"][-1] or settled.all():
            text = np.asarray(step.finish(denoiser, process, chain, KEYS).z)
            begin = known.shape[1] - (CANVAS if told is run["steps"][-1] else 2 * CANVAS)
            np.testing.assert_array_equal(text, known[:, begin : begin + CANVAS])
            cache = read(text, cache)
        elif told["step"] == 1:
            cache = read(known[:, 8:12], cache)
    share = np.mean(np.concatenate([x.ravel() for x in decided]))
    assert 0.2 < share < 0.95  # some are accepted, and some are not


def of_table(table) -> Denoiser:
    """A denoiser whose logits [L, V] depend on nothing."""
    return Denoiser(lambda z, t: jnp.zeros((*z.shape, 1)), lambda h: jnp.log(table) + 0.0 * h)


def test_the_most_tokens_are_accepted_whose_entropies_fit():
    rng = np.random.default_rng(0)
    values, bound = rng.uniform(size=(50, 5)).round(2), 0.8
    found = np.asarray(least(jnp.asarray(values), bound))
    for row, marked in zip(values, found, strict=True):
        fits = [
            set(chosen)
            for count in range(1, 6)
            for chosen in itertools.combinations(range(5), count)
            if sum(row[list(chosen)]) - max(row[list(chosen)]) <= bound
        ]
        assert marked.sum() == max(map(len, fits))
        assert row[marked].max() <= row[~marked].min(initial=np.inf)


def test_the_entropy_is_that_of_the_softmax_in_nats():
    chances = np.array([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]])
    found = entropy(jnp.log(jnp.asarray(chances)))
    np.testing.assert_allclose(found, [1.5 * np.log(2), 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "used"),
    [
        (dict(stability_threshold=1, confidence_threshold=0.7), 2),
        (dict(stability_threshold=3, confidence_threshold=0.7), 4),
        (dict(stability_threshold=0, confidence_threshold=0.7), 1),
        (dict(stability_threshold=1, confidence_threshold=0.6), 8),
        (dict(stability_threshold=1, confidence_threshold=0.0), 8),
    ],
)
@pytest.mark.cases(2)
def test_a_text_is_done_when_its_tokens_are_stable_and_sure(keys, used):
    """Entropies of log 2 = 0.693 nats and 0: a mean of 0.347 with two tokens, of 0.693 with one."""
    table = jnp.asarray([[0.5, 0.5, 0.0]] * 3)
    step = EntropyBound(cooling=1.0, **keys)
    chain, _ = sample(
        of_table(table), Uniform(3, parametrisation="mixture"), step, grid=uniform(8), keys=KEYS,
        prompt=no_prompt(2, 3),
    )  # fmt: skip
    np.testing.assert_array_equal(chain.evaluations, used)
    assert np.asarray(chain.z).max() == 0  # the likeliest of both, as argmax has it


def test_the_temperature_falls_to_a_part_of_it():
    """With one of two tokens at odds of e^x, the entropy at temperature T is that of x / T."""
    x, seen = 1.0, []
    table = jnp.asarray([[np.exp(x), 1.0]])

    class Recording(EntropyBound):
        def _done(self, before, now, entropies, prompt):
            jax.debug.callback(lambda e: seen.append(float(e[0, 0])), entropies)
            return super()._done(before, now, entropies, prompt)

    step = Recording(confidence_threshold=0.0, cooling=0.25, transform=Transform(0.8))
    chain, _ = sample(
        of_table(table), Uniform(2, parametrisation="mixture"), step, grid=uniform(4), keys=KEYS,
        prompt=no_prompt(2, 1),
    )  # fmt: skip
    jax.block_until_ready(chain)
    chance = [1 / (1 + np.exp(-x / (0.8 * (0.25 + 0.75 * t)))) for t in (1, 0.75, 0.5, 0.25)]
    expected = [-p * np.log(p) - (1 - p) * np.log(1 - p) for p in chance]
    np.testing.assert_allclose(seen, expected, rtol=1e-4)


def test_cooling_is_of_the_distribution_that_ratios_tell():
    """The same tokens, entropies and ends from the ratios of a law as from the law itself."""
    law, found = np.multiply.outer(exact.P_V3L2, [0.5, 0.3, 0.2]), {}
    for form in ("mixture", "score"):
        process = Uniform(3, LogLinear(), form)
        denoiser = exact.uniform_outputs(process, law)
        chain, _ = sample(
            denoiser, process, EntropyBound(entropy_bound=0.5, cooling=0.25), grid=uniform(4),
            keys=exact.keys_for(0, 40), prompt=no_prompt(40, 3),
        )  # fmt: skip
        found[form] = chain
    np.testing.assert_array_equal(found["score"].z, found["mixture"].z)
    np.testing.assert_array_equal(found["score"].evaluations, found["mixture"].evaluations)
    np.testing.assert_allclose(found["score"].confidence, found["mixture"].confidence, rtol=1e-4)


def test_given_tokens_count_neither_as_stable_nor_as_sure():
    table = jnp.asarray([[0.5, 0.5], [1.0, 0.0], [1.0, 0.0]])
    prompt = no_prompt(2, 3)
    given = prompt._replace(mask=np.array([[True, False, False]] * 2))
    step = EntropyBound(confidence_threshold=1e-6, cooling=1.0)
    process = Uniform(2, parametrisation="mixture")
    used = [
        sample(of_table(table), process, step, grid=uniform(8), keys=KEYS, prompt=asked)[0]
        for asked in (given, prompt)
    ]
    np.testing.assert_array_equal(used[0].evaluations, 2)
    np.testing.assert_array_equal(used[1].evaluations, 8)
    # The mean of log 2 and 0 is above 0.3, and that of all three would be below it.
    table = jnp.asarray([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]])
    step = EntropyBound(confidence_threshold=0.3, cooling=1.0)
    chain, _ = sample(of_table(table), process, step, grid=uniform(8), keys=KEYS, prompt=given)
    np.testing.assert_array_equal(chain.evaluations, 8)


def test_accepted_tokens_stay_and_the_others_are_noise_again():
    """With a bound of 0, the sure token and one of three that are alike are accepted."""
    rows = 2000
    table = jnp.asarray([[0.0, 0.0, 1.0]] + [[0.5, 0.5, 0.0]] * 3)
    step = EntropyBound(entropy_bound=0.0, cooling=1.0)
    chain = Chain(
        jnp.zeros((rows, 4), jnp.int32), jnp.zeros((rows, 4), bool), jnp.zeros((rows, 4)),
        jnp.zeros(rows, jnp.int32),
    )  # fmt: skip
    denoiser, process = of_table(table), Uniform(3, parametrisation="mixture")
    chain = with_memory(denoiser, process, step, chain)
    z = np.asarray(step(denoiser, process, chain, 0.5, 0.5, exact.keys_for(0, rows)).z)
    share = (z == 2).mean(axis=0)
    np.testing.assert_array_equal(share[:2], [1.0, 0.0])
    np.testing.assert_allclose(share[2:], 1 / 3, atol=4 * np.sqrt(2 / 9 / rows))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(entropy_bound=-0.1), "sample.entropy_bound must not be negative, not -0.1"),
        (dict(confidence_threshold=-1.0), "sample.confidence_threshold must not be negative"),
        (dict(stability_threshold=-1), "sample.stability_threshold must not be negative, not -1"),
        (dict(cooling=1.5), r"sample.cooling must lie in \[0, 1\], not 1.5"),
    ],
)
def test_options_that_have_no_meaning(keys, said):
    with pytest.raises(UserError, match=said):
        EntropyBound(**keys)
