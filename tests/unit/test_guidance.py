"""Guidance towards one of two classes, by enumeration of symbols, states and steps."""

import functools

import exact
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
import tiny_networks

from md4_jax.options import MeshOptions, SampleOptions
from md4_jax.processes.masking import Masking
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import LogLinear
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, Network, Prompt
from md4_jax.runtime.mesh import make_mesh
from md4_jax.samplers import SAMPLERS
from md4_jax.samplers.ancestral import Ancestral, reveal_by_symbol
from md4_jax.samplers.batches import draw_samples, make_sampler
from md4_jax.samplers.blocks import Blocks
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.guidance import calls, guided
from md4_jax.samplers.live import Live, Request
from md4_jax.samplers.loop import sample
from md4_jax.samplers.particles import SteeringOptions
from md4_jax.samplers.steering import Programs, Steering, draw_steered

pytestmark = pytest.mark.slow

# p(y), and p(x | y) of one pixel of three levels and of two pixels.
CLASSES = np.array([0.4, 0.6])
PIXEL = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
PAIR = np.stack([exact.P_V3L2, exact.P_V3L2[::-1, [1, 2, 0]]])
WEIGHTS = [0.0, 1.0, 2.0, 3.0]
every_weight = pytest.mark.parametrize("weight", WEIGHTS)
FORMS = ("joint", "mixture")


def tilted(of_class: np.ndarray, weight: float) -> np.ndarray:
    """p(x) p(y | x)^w of class 1, normalised, from the joint law of x and y."""
    joint = of_class * CLASSES.reshape(2, *[1] * (of_class.ndim - 1))
    law = joint.sum(axis=0) * (joint[1] / joint.sum(axis=0)) ** weight
    return law / law.sum()


def network_of(process, of_class: np.ndarray, denoiser_of) -> tuple[Network, dict]:
    """(network that is exact with label 1 and without a label, its parameters)."""
    mixed = np.tensordot(CLASSES, of_class, 1)

    def bind(params, context, keys):
        return denoiser_of(of_class[1] if "label" in context else mixed)

    network = Network(lambda key: {}, bind, time_free=False)
    return network, {"network": {}, "process": process}


def bound_to(process, of_class, denoiser_of, weight: float):
    network, params = network_of(process, of_class, denoiser_of)
    return guided(network, params, {"label": jnp.ones(1, int)}, weight)


def of_masks(p: np.ndarray) -> Denoiser:
    return exact.denoiser_of(exact.perfect_logits(p))


def steps_back(denoiser, process, s: np.ndarray, t: np.ndarray, length: int) -> np.ndarray:
    """p(z_s | z_t) of T pairs of times, over all sequences without a mask: [T, Z, Z]."""
    z = exact.sequences(process.vocab_size, length)
    rows = jnp.tile(z, (len(s), 1))
    before, now = (jnp.repeat(jnp.asarray(time), len(z)) for time in (s, t))
    each = jax.nn.softmax(process.reverse_logits(denoiser(rows, now), rows, before, now))
    each = np.asarray(each).reshape(len(s), *z.shape, -1)
    return np.prod([each[:, :, n][..., z[:, n]] for n in range(length)], axis=0)


def law_of(denoiser, process, grid: np.ndarray, length: int) -> np.ndarray:
    """The law of ancestral sampling from uniform symbols along the grid."""
    law = np.full(process.vocab_size**length, 1.0 / process.vocab_size**length)
    for step in steps_back(denoiser, process, grid[-2::-1], grid[:0:-1], length):
        law = law @ step
    return law


def noised(p: np.ndarray, noise: float) -> np.ndarray:
    """p_t over all sequences, [Z]."""
    z = exact.sequences(p.shape[0], p.ndim)
    same = z[:, None] == z[None]
    return p.ravel() @ ((1.0 - noise) * same + noise / p.shape[0]).prod(axis=-1)


def guided_marginal(of_class: np.ndarray, noise: float, weight: float) -> np.ndarray:
    """p_t(z | y)^w p_t(z)^(1 - w), normalised."""
    return tilted(np.stack([noised(p, noise) for p in of_class]), weight)


@every_weight
@pytest.mark.parametrize("steps", [1, 5])
def test_one_pixel_of_masks_has_the_tilted_law_in_any_number_of_steps(weight, steps, x64):
    process = Masking(3)
    denoiser, same = bound_to(process, PIXEL, of_masks, weight)
    assert same is process
    law = exact.ancestral_law(denoiser, process, uniform(steps), 1)
    np.testing.assert_allclose(law, [*tilted(PIXEL, weight), 0.0], atol=1e-14)


@every_weight
def test_masks_reveal_tokens_by_the_tilted_conditionals(weight, x64):
    """At every state of two pixels, and the same from the features of one position."""
    denoiser, _ = bound_to(Masking(3), PAIR, of_masks, weight)
    z, zeros = exact.sequences(4, 2), jnp.zeros(16)
    found = np.asarray(jax.nn.softmax(denoiser(z, zeros)))
    alone = jax.nn.softmax(denoiser.unembed(denoiser.features_at(z, zeros, jnp.ones((16, 1), int))))
    np.testing.assert_array_equal(alone[:, 0], found[:, 1])
    for row, (first, second) in enumerate(z):
        if second == 3:
            seen = PAIR.sum(axis=1) if first == 3 else PAIR[:, first]
            # p(y) given the first pixel, so that only p(x | y, seen) and p(x | seen) count.
            joint = CLASSES[:, None] * seen
            mixed, of_class = joint.sum(axis=0) / joint.sum(), seen[1] / seen[1].sum()
            law = of_class**weight * mixed ** (1.0 - weight)
            np.testing.assert_allclose(found[row, 1], law / law.sum(), atol=1e-14)


@every_weight
def test_one_pixel_of_masks_by_symbol_has_the_tilted_law(weight, x64):
    """GenMD4's exact denoiser is p(k) t^{w_k}; guided it is that of the tilted law."""
    process = StateDependent(3, raw_power=jnp.asarray([0.2, 1.0, 2.0]))

    def perfect(p: np.ndarray) -> Denoiser:
        def features(z, t):
            return jnp.log(p) + process.power * jnp.log(t)[:, None, None] * jnp.ones((*z.shape, 1))

        return Denoiser(features, lambda h: h)

    denoiser, _ = bound_to(process, PIXEL, perfect, weight)
    z, s, t = jnp.full((1, 1), 3), jnp.asarray(0.4), jnp.asarray(0.7)
    each = process.reveal_probabilities(s, t)
    logits, revealed = reveal_by_symbol(denoiser(z, t[None]), each)
    law = tilted(PIXEL, weight)
    masked = law * np.asarray(t) ** np.asarray(process.power)
    want = masked / masked.sum() * np.asarray(each)
    np.testing.assert_allclose(revealed[0, 0], want.sum(), rtol=1e-12)
    np.testing.assert_allclose(jax.nn.softmax(logits)[0, 0], want / want.sum(), rtol=1e-12)


def processes():
    return {
        **{f"uniform, {form}": Uniform(3, parametrisation=form) for form in FORMS},
        "transition": Transition(3, timesteps=1, kernel="uniform", parametrisation="mixture"),
        "rates": Rates(3, parametrisation="mixture"),
    }


def of_noise(process, p: np.ndarray) -> Denoiser:
    """What is exact for uniform noise of the linear schedule, in the process's form."""
    return exact.uniform_outputs(Uniform(3, parametrisation=process.parametrisation), p)


@every_weight
@pytest.mark.parametrize("name", processes())
@pytest.mark.cases(8)
def test_one_pixel_in_one_step_has_the_tilted_law_on_uniform_noise(name, weight, x64):
    process = processes()[name]
    denoiser, steps = bound_to(process, PIXEL, functools.partial(of_noise, process), weight)
    law = law_of(denoiser, steps, uniform(1), 1)
    np.testing.assert_allclose(law, tilted(PIXEL, weight), atol=1e-12)


@every_weight
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of_class", [PIXEL, PAIR], ids=["one pixel", "two pixels"])
def test_uniform_noise_steps_by_the_rule_of_the_paper(of_class, form, weight, x64):
    """Each position's p(z_s | z_t, y)^w p(z_s | z_t)^(1 - w), by Bayes over all sequences."""
    process, length = Uniform(3, parametrisation=form), of_class.ndim - 1
    denoiser, steps = bound_to(process, of_class, functools.partial(of_noise, process), weight)
    mixed = np.tensordot(CLASSES, of_class, 1)
    told, free = (exact.uniform_marginals(p, 0.3, 0.6) for p in (of_class[1], mixed))
    each = told**weight * free ** (1.0 - weight)
    each /= each.sum(axis=-1, keepdims=True)
    z = exact.sequences(3, length)
    want = np.prod([each[:, n][:, z[:, n]] for n in range(length)], axis=0)
    found = steps_back(denoiser, steps, np.array([0.3]), np.array([0.6]), length)
    np.testing.assert_allclose(found[0], want, rtol=1e-10)


def test_many_steps_on_uniform_noise_keep_the_law_of_w_0_and_1_alone(x64):
    """The guided marginals p_t(z | y)^w p_t(z)^(1 - w) are no forward process of their end.

    So one pixel in many steps tends to another law than the tilted one; it goes the same way.
    """
    process = Uniform(3, parametrisation="mixture")
    far = {}
    for weight in (0.0, 1.0, 2.0, 3.0):
        denoiser, steps = bound_to(process, PIXEL, functools.partial(of_noise, process), weight)
        law, twice = (law_of(denoiser, steps, np.arange(n + 1) / n, 1) for n in (256, 512))
        assert np.abs(law - twice).max() < 1e-3
        far[weight] = 0.5 * np.abs(twice - tilted(PIXEL, weight)).sum()
    assert far[0.0] < 1e-12 and far[1.0] < 1e-12
    assert far[2.0] == pytest.approx(0.0160, abs=1e-4)
    assert far[3.0] == pytest.approx(0.0243, abs=1e-4)


@every_weight
@pytest.mark.parametrize("form", [*FORMS, "score"])
def test_scores_and_rates_are_those_of_the_tilted_marginal(form, weight, x64):
    """So Metropolis has its law at a level, and a corrector leaves it unchanged."""
    schedule = LogLinear() if form == "score" else Uniform(3).schedule
    process = Uniform(3, schedule, form)
    denoiser, steps = bound_to(
        process, PAIR, functools.partial(exact.uniform_outputs, process), weight
    )
    t = jnp.full(9, 0.5)
    law = guided_marginal(PAIR, float(process.schedule.one_minus_alpha(t[0])), weight)
    z, whole = exact.sequences(3, 2), law.reshape(3, 3)
    outputs = denoiser(z, t)
    moved = np.stack([whole[:, z[:, 1]].T, whole[z[:, 0]]], axis=1) / law[:, None, None]
    np.testing.assert_allclose(steps.log_score(outputs, z, t), np.log(moved), atol=1e-8)
    rates = np.asarray(steps.reverse_rates(outputs, z, t))
    rates = rates + float(steps.beta(t[0])) * np.asarray(steps.forward_rates(z))
    flow = -law * rates.sum(axis=(1, 2))
    for row, state in enumerate(z):
        for n in range(2):
            for y in range(3):
                to = state.copy()
                to[n] = y
                flow[3 * to[0] + to[1]] += law[row] * rates[row, n, y]
    np.testing.assert_allclose(flow, 0.0, atol=1e-8)


def test_a_symbol_that_either_law_excludes_stays_excluded():
    with_label, without = jnp.log(jnp.asarray([[0.5, 0.5, 0.0]])), jnp.log(jnp.asarray([1, 0, 0]))
    network, params = network_of(
        Masking(3),
        PIXEL,
        lambda p: Denoiser(
            lambda z, t: jnp.broadcast_to(
                with_label if p is PIXEL[1] or (p == PIXEL[1]).all() else without, (*z.shape, 3)
            ),
            lambda h: h,
        ),
    )
    denoiser, _ = guided(network, params, {"label": jnp.ones(1, int)}, 3.0)
    found = jax.nn.softmax(denoiser(jnp.full((1, 1), 3), jnp.ones(1)))
    np.testing.assert_array_equal(found[0, 0], [1, 0, 0])


MESH, ROWS = make_mesh(MeshOptions(data=1)), 6
FREE = Prompt(np.zeros(6, np.int32), np.zeros(6, bool))


@functools.cache
def tokens(process, loop, weight: float, label: int, name: str = "ancestral"):
    """Samples of a small transformer with two classes, and their network calls."""
    causal = name == "left_to_right"
    network, params = tiny_networks.built(classes=2, depth=1, causal=causal)
    sampler = make_sampler(network, loop, uniform(3), MESH, guidance=weight)
    options = SampleOptions(num=ROWS, batch_size=ROWS, label=label)
    params = {"network": params, "process": process}
    drawn = draw_samples(sampler, params, SAMPLERS[name](), options, [FREE], window=6)
    return drawn.tokens, drawn.evaluations


BLOCKS = Blocks(block=3, window=6)


@pytest.mark.parametrize(
    "process, loop",
    [
        pytest.param(Masking(5), sample, id="masks"),
        pytest.param(Uniform(5), sample, id="uniform", marks=pytest.mark.slow),
        pytest.param(Masking(5), BLOCKS, id="blocks", marks=pytest.mark.slow),
        pytest.param(Uniform(5), BLOCKS, id="blocks of uniform noise", marks=pytest.mark.slow),
    ],
)
@pytest.mark.cases(1)
def test_samples_at_0_and_1_are_those_without_and_with_the_label(process, loop):
    """Bit for bit; other weights call the network twice as often."""
    free, told = tokens(process, loop, 1.0, -1), tokens(process, loop, 1.0, 1)
    assert (free[0] != told[0]).any()
    for weight, same in ((0.0, free), (1.0, told)):
        for found, want in zip(tokens(process, loop, weight, 1), same, strict=True):
            np.testing.assert_array_equal(found, want)
    found, evaluations = tokens(process, loop, 4.0, 1)
    assert (found != told[0]).any() and (found >= 0).all() and (found < 5).all()
    assert (evaluations % 2 == 0).all()
    assert [calls(weight) for weight in (0.0, 0.5, 1.0, 2.0)] == [1, 2, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("process", [Masking(5), Uniform(5)], ids=["masks", "uniform"])
@pytest.mark.cases(1)
def test_blocks_keep_two_caches(process):
    recomputed = Blocks(block=3, window=6, cached=False)
    cached, again = (tokens(process, loop, 4.0, 1)[0] for loop in (BLOCKS, recomputed))
    np.testing.assert_array_equal(cached, again)


@pytest.mark.campaign
def test_a_causal_network_keeps_two_caches(monkeypatch):
    """One token at a time is read, and samples are those without the caches."""
    network, params = tiny_networks.built(classes=2, depth=1, causal=True)
    params, context = {"network": params, "process": Masking(5)}, {"label": jnp.ones(3, int)}
    denoiser, process = guided(network, params, context, 2.0)
    cached = []
    step = SAMPLERS["left_to_right"]
    fill = step.fill_cached
    monkeypatch.setattr(step, "fill_cached", lambda *a: cached.append(1) or fill(*a))
    told, again = (
        exact.drawn(
            each, process, SAMPLERS["left_to_right"](), uniform(3), exact.keys_for(0, 3), length=6
        )
        for each in (denoiser, denoiser._replace(blocks=None))
    )
    np.testing.assert_array_equal(told[0], again[0])
    assert len(cached) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "process, name",
    [
        (Masking(5), "first_hitting"),
        (Uniform(5), "predictor_corrector"),
        *(
            pytest.param(process, name, marks=pytest.mark.campaign)
            for process, name in (
                *((Masking(5), name) for name in ("confidence", "left_to_right")),
                *((Uniform(5), name) for name in ("euler", "metropolis")),
            )
        ),
        (Rates(5, kernel="gaussian_target"), "tau_leaping"),
        (StateDependent(5, raw_power=jnp.ones(5)), "ancestral"),
    ],
    ids=lambda case: case if isinstance(case, str) else type(case).__name__,
)
@pytest.mark.cases(1)
def test_samplers_of_every_kind_take_guidance(process, name):
    """From a label that is obeyed to one that is more than obeyed."""
    draw = tokens.__wrapped__  # a process with arrays is no key of a cache
    told, found = (draw(process, sample, weight, 1, name)[0] for weight in (1.0, 6.0))
    assert (found < 5).all() and (found >= 0).all()
    # This law is so narrow that the chain of `metropolis` ends in one state.
    assert name == "metropolis" or (found != told).any()


def test_repeated_rows_keep_both_predictions():
    network, params = tiny_networks.built(classes=2, depth=1)
    z, t, label = tiny_networks.Z, tiny_networks.T, jnp.asarray([0, 1, 1])

    @jax.jit
    def call(params):
        both = {"network": params, "process": Masking(5)}
        denoiser, _ = guided(network, both, {"label": label}, 2.0)
        twice = denoiser.repeated(2)(jnp.repeat(z, 2, axis=0), jnp.repeat(t, 2))
        each = [network.denoiser(both, context)(z, t) for context in ({"label": label}, {})]
        return denoiser(z, t), twice, *each

    once, twice, told, free = (np.asarray(x) for x in call(params))
    np.testing.assert_allclose(twice, np.repeat(once, 2, axis=0), atol=2e-5)
    np.testing.assert_allclose(once, 2.0 * told - free, atol=2e-5)


GIVEN = Prompt(np.array([1, 0]), np.array([True, False]))


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_a_prompt_is_obeyed_more_or_less(weight):
    """p(x_1 | x_0 = 1)^w p(x_1)^(1 - w), normalised: chi-squared, n = 20,000, p > 1e-4."""
    process, keys = Masking(3), exact.keys_for(0, laws.N)
    denoiser = exact.denoiser_of(exact.perfect_logits(exact.P_V3L2))
    network = Network(lambda key: {}, lambda params, context, keys: denoiser, time_free=True)
    prompt = Prompt(*(np.repeat(x[None], laws.N, axis=0) for x in GIVEN))

    @jax.jit
    def draw(keys):
        own, _ = guided(network, {"network": {}, "process": process}, {}, weight, prompt)
        return sample(own, process, Ancestral(), grid=uniform(3), keys=keys, prompt=prompt)[0]

    chain = draw(keys)
    law = (exact.P_V3L2[1] / exact.P_V3L2[1].sum()) ** weight
    law = law * exact.P_V3L2.sum(axis=0) ** (1.0 - weight)
    counts = np.bincount(np.asarray(chain.z)[:, 1], minlength=3)
    assert (np.asarray(chain.z)[:, 0] == 1).all() and laws.accepted(counts, law)
    for other in {0.0, 1.0, 2.5} - {weight}:
        wrong = (exact.P_V3L2[1] / exact.P_V3L2[1].sum()) ** other
        assert not laws.accepted(counts, wrong * exact.P_V3L2.sum(axis=0) ** (1.0 - other))


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.cases(1)
def test_without_the_prompt_a_causal_network_sees_none_of_it(weight):
    """At weight 0 what is drawn behind a prompt is the same whatever the prompt is."""
    network, params = tiny_networks.built(depth=1, causal=True)
    sampler = make_sampler(network, sample, uniform(3), MESH, guidance=weight)
    step, options = SAMPLERS["left_to_right"](), SampleOptions(num=8, batch_size=8)
    given = [
        Prompt(np.array(x), np.arange(6) < 3) for x in ([0, 1, 2, 0, 0, 0], [4, 3, 4, 0, 0, 0])
    ]
    params = {"network": params, "process": Masking(5)}
    one, other = (
        draw_samples(sampler, params, step, options, [prompt], window=6).tokens for prompt in given
    )
    assert (one[:, :3] == given[0].tokens[:3]).all() and (other[:, :3] == given[1].tokens[:3]).all()
    assert (one[:, 3:] == other[:, 3:]).all() == (weight == 0.0)


@pytest.mark.campaign
def test_hidden_positions_are_masks_to_the_network():
    """In a transformer, whole, at some positions, and with repeated rows."""
    network, params = tiny_networks.built(depth=1)
    z, t, mask = tiny_networks.Z, tiny_networks.T, np.arange(tiny_networks.Z.shape[1]) < 2
    process = Masking(int(z.max()) + 1)
    both = {"network": params, "process": process}
    prompt = Prompt(np.asarray(z), np.broadcast_to(mask, z.shape))
    free, _ = guided(network, both, {}, 0.0, prompt)
    plain = network.denoiser(both)
    seen = jnp.where(mask, process.mask_id, z)
    np.testing.assert_array_equal(free(z, t), plain(seen, t))
    assert (np.asarray(plain(seen, t)) != np.asarray(plain(z, t))).any()
    index = jnp.asarray(np.broadcast_to([1, 3], (len(z), 2)))
    np.testing.assert_array_equal(free.features_at(z, t, index), plain.features_at(seen, t, index))
    twice = free.repeated(2)(jnp.repeat(z, 2, axis=0), jnp.repeat(t, 2))
    np.testing.assert_allclose(twice, np.repeat(free(z, t), 2, axis=0), atol=2e-5)


def steered(network, params, is_clean):
    """Samples by particles whose rewards are all 0, which leaves the law as it is."""
    programs = Programs(network, uniform(4), MESH, 1.0, is_clean)
    steering = Steering(
        SteeringOptions(every=2), lambda tokens, domain: np.zeros(len(tokens)), (3, 2)
    )
    options = SampleOptions(num=laws.N, batch_size=4 * laws.N)
    return draw_steered(programs, params, Ancestral(), options, [GIVEN], steering).tokens


def plain(network, params, is_clean):
    sampler = make_sampler(network, sample, uniform(4), MESH, clean_prompts=is_clean)
    options = SampleOptions(num=laws.N, batch_size=laws.N)
    return draw_samples(sampler, params, Ancestral(), options, [GIVEN], window=2).tokens


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("drawn", [plain, steered])
@pytest.mark.cases(1)
def test_a_prompt_that_training_kept_clean_is_shown_clean(drawn, is_clean):
    """A network that read clean prompts has p(x_1 | x_0 = 1) only if it sees them so.

    Chi-squared, n = 20,000, p > 1e-4; steps are exact for a single token.
    """
    process = Uniform(3, parametrisation="mixture")
    of_prompt = jnp.log(exact.P_V3L2 / exact.P_V3L2.sum(axis=1, keepdims=True))

    def features(z, t):
        alpha = process.schedule.alpha(t)[:, None]
        noised = (1.0 - alpha) / 3 + alpha * jax.nn.one_hot(z[:, 1], 3)
        logits = of_prompt[z[:, 0]] + jnp.log(noised)
        return jnp.stack([jnp.zeros_like(logits), logits], axis=1)

    denoiser = Denoiser(features, lambda h: h)
    network = Network(lambda key: {}, lambda params, context, keys: denoiser, time_free=False)
    tokens = drawn(network, {"network": {}, "process": process}, is_clean)
    assert (tokens[:, 0] == 1).all()
    law = exact.P_V3L2[1] / exact.P_V3L2[1].sum()
    assert laws.accepted(np.bincount(tokens[:, 1], minlength=3), law) == is_clean


@pytest.mark.campaign
def test_a_live_sample_shows_the_prompt_clean_too():
    """It is the first sample of a batch; with the prompt's noise it is another one."""
    network, params = tiny_networks.built(depth=1)
    params = {"network": params, "process": Uniform(5)}
    given = Prompt(np.array([0, 4, 2, 1, 0, 0]), np.arange(6) < 4)
    options, grid, step = SampleOptions(num=ROWS, batch_size=ROWS), uniform(6), Ancestral()
    found = {}
    for is_clean in (True, False):
        sampler = make_sampler(network, sample, grid, MESH, clean_prompts=is_clean)
        found[is_clean] = draw_samples(sampler, params, step, options, [given], window=6).tokens
    assert (found[True] != found[False]).any()
    for is_clean, expected in found.items():
        live = Live(network, MESH, is_clean)
        request = Request(step, grid, options.seed, given, {}, 1.0)
        *_, last = live.watch(params, request)
        assert (last.z == expected[0]).all()
