"""Guidance by a classifier: exact laws by enumeration, and the recorded answers of its authors."""

import functools
import itertools
import json
import types
from pathlib import Path

import exact
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from md4_jax.config import guide_checks
from md4_jax.data.domains import TextDomain
from md4_jax.data.tokenizers import Characters
from md4_jax.evals import guides
from md4_jax.objectives.classifier import Classifier
from md4_jax.options.guide import ClassifierOptions
from md4_jax.processes.capabilities import RevealsBySymbol
from md4_jax.processes.hybrid import Hybrid
from md4_jax.processes.masking import Masking
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, Mixture, UserError
from md4_jax.samplers import SAMPLERS, classifier
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.classifier import exact_gains, taylor_gains, towards
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.transforms import Transform

# p(y), and p(x | y) of one token and of two, over three symbols.
CLASSES = np.array([0.4, 0.6])
ONE = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
TWO = np.stack([exact.P_V3L2, exact.P_V3L2[::-1, [1, 2, 0]]])
MIXED = {1: CLASSES @ ONE, 2: np.tensordot(CLASSES, TWO, 1)}
both = pytest.mark.parametrize("of_class", [ONE, TWO], ids=["one token", "two tokens"])
RECORDED = json.loads(
    (Path(__file__).parents[1] / "published" / "classifier_guidance.json").read_text()
)


def masked_table(of_class: np.ndarray) -> np.ndarray:
    """log p(y = 1 | z) of every state with masks, by enumeration: [(V + 1)^L]."""
    length = of_class.ndim - 1
    x, found = exact.sequences(3, length), []
    for z in exact.sequences(4, length):
        agrees = ((z == 3) | (x == z)).all(axis=1)
        joint = CLASSES * (of_class.reshape(2, -1) * agrees).sum(axis=1)
        found.append(np.log(joint[1] / joint.sum()))
    return np.array(found)


def posterior_of_masks(of_class: np.ndarray):
    """The exact classifier of masked sequences, (z, t) -> log p(y = 1 | z)."""
    table, digits = jnp.asarray(masked_table(of_class)), 4 ** np.arange(of_class.ndim - 1)[::-1]
    return lambda z, t: table[jnp.sum(z * digits, axis=1)]


def posterior_of_noise(process, of_class: np.ndarray):
    """The exact classifier of uniform noise, (z, t) -> log p(y = 1 | z, t), by enumeration."""
    x = exact.sequences(3, of_class.ndim - 1)

    def log_probability(z, t):
        alpha, noise = process.schedule.alpha(t), process.schedule.one_minus_alpha(t)
        same = jnp.asarray(x)[None] == z[:, None]
        law = (alpha[:, None, None] * same + noise[:, None, None] / 3).prod(axis=-1)
        joint = CLASSES * (law @ of_class.reshape(2, -1).T)
        return jnp.log(joint[:, 1] / joint.sum(axis=1))

    return log_probability


def guided(denoiser, process, log_probability, strength=1.0, step=None, gains=exact_gains):
    step = step or Ancestral()
    return towards(denoiser, process, step, functools.partial(gains, log_probability), strength)


def of_masks(of_class: np.ndarray) -> Denoiser:
    """The exact denoiser of a model that knows no classes."""
    return exact.denoiser_of(exact.perfect_logits(np.tensordot(CLASSES, of_class, 1)))


def tilted(strength: float) -> np.ndarray:
    law = MIXED[1] * (CLASSES[1] * ONE[1] / MIXED[1]) ** strength
    return law / law.sum()


def law_along(law: np.ndarray, each: np.ndarray, z: np.ndarray) -> np.ndarray:
    """The law [Z] after steps whose probabilities of single tokens are each [T, Z, L, S]."""
    for step in each:
        law = law @ np.prod([step[:, n][:, z[:, n]] for n in range(z.shape[1])], axis=0)
    return law


def law_of_masks(denoiser, process, grid, length: int) -> np.ndarray:
    """The law of ancestral sampling by the process's own reveal probabilities, [(V + 1)^L]."""
    z, steps = exact.sequences(4, length), len(grid) - 1
    rows = jnp.tile(z, (steps, 1))
    before, now = (jnp.repeat(jnp.asarray(t), len(z)) for t in (grid[-2::-1], grid[:0:-1]))
    outputs = denoiser(rows, now)
    reveal = process.revealed(outputs, before[:, None], now[:, None])[..., None]
    moved = jnp.concatenate([reveal * jax.nn.softmax(outputs), 1 - reveal], axis=-1)
    kernel = jnp.where((rows == 3)[..., None], moved, jax.nn.one_hot(rows, 4))
    each = np.asarray(kernel).reshape(steps, *z.shape, 4)
    return law_along(np.eye(len(z))[-1], each, z)


def law_of_noise(denoiser, process, grid, length: int) -> np.ndarray:
    """The law of ancestral sampling from uniform symbols, [V^L]."""
    z, steps = exact.sequences(3, length), len(grid) - 1
    rows = jnp.tile(z, (steps, 1))
    before, now = (jnp.repeat(jnp.asarray(t), len(z)) for t in (grid[-2::-1], grid[:0:-1]))
    each = jax.nn.softmax(process.reverse_logits(denoiser(rows, now), rows, before, now))
    return law_along(np.full(len(z), 1 / len(z)), np.asarray(each).reshape(steps, *z.shape, 3), z)


def test_tokens_that_are_drawn_one_by_one_have_the_law_of_the_class(x64):
    """In both orders, whatever position is first: p(x | y) and not p(x)."""
    denoiser, _, _ = guided(of_masks(TWO), Masking(3), posterior_of_masks(TWO))
    z = exact.sequences(4, 2)
    mu = np.asarray(jax.nn.softmax(denoiser(jnp.asarray(z), jnp.full(len(z), 0.5))))
    code = lambda first, second: 4 * first + second  # noqa: E731
    for order in ((0, 1), (1, 0)):
        law = np.zeros((3, 3))
        for x in itertools.product(range(3), repeat=2):
            half = code(*(x[n] if n == order[0] else 3 for n in range(2)))
            law[x] = mu[code(3, 3), order[0], x[order[0]]] * mu[half, order[1], x[order[1]]]
        np.testing.assert_allclose(law, TWO[1], atol=1e-13)


@pytest.mark.parametrize("name", ["first_hitting", "any_order"])
def test_the_samplers_of_one_token_at_a_time_draw_from_it(name):
    """20,000 draws, chi-squared: through features of single positions, and compiled."""
    step = SAMPLERS[name]()
    denoiser, process, plain = guided(of_masks(TWO), Masking(3), posterior_of_masks(TWO), step=step)
    keys = exact.keys_for(0, laws.N)
    z, evaluations = exact.drawn(denoiser, process, plain, uniform(2), keys)
    assert laws.accepted(laws.counted(np.asarray(z), 3), TWO[1])
    assert not laws.accepted(laws.counted(np.asarray(z), 3), MIXED[2])
    assert (np.asarray(evaluations) == 2).all()


def test_ancestral_steps_draw_what_their_probabilities_say():
    """20,000 draws of a step from masks, gamma 2: whether one is revealed depends on the class."""
    parts = guided(of_masks(TWO), Masking(3), posterior_of_masks(TWO), 2.0)
    denoiser, process, step = parts
    z = laws.after_step(step, denoiser, process, np.full((laws.N, 2), 3, np.int32), 0.4, 1.0)
    law = law_of_masks(denoiser, process, np.array([0.4, 1.0]), 2)
    assert laws.accepted(laws.counted(z, 4), law)
    free = exact.ancestral_law(of_masks(TWO), Masking(3), np.array([0.4, 1.0]), 2)
    assert not laws.accepted(laws.counted(z, 4), free)


@pytest.mark.parametrize("strength", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.cases(3)
def test_one_masked_token_has_the_tilted_law_in_any_number_of_steps(strength, steps, x64):
    denoiser, process, _ = guided(of_masks(ONE), Masking(3), posterior_of_masks(ONE), strength)
    law = law_of_masks(denoiser, process, uniform(steps), 1)
    np.testing.assert_allclose(law, [*tilted(strength), 0.0], atol=1e-13)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.cases(1)
def test_one_noisy_token_has_the_law_of_the_class_in_any_number_of_steps(steps, x64):
    """So the classifier is asked at the time of z_s: at that of z_1 it knows nothing."""
    process = Uniform(3, parametrisation="mixture")
    denoiser, steered, _ = guided(
        exact.uniform_outputs(process, MIXED[1]), process, posterior_of_noise(process, ONE)
    )
    law = law_of_noise(denoiser, steered, uniform(steps), 1)
    np.testing.assert_allclose(law, ONE[1], atol=1e-12)


@pytest.mark.campaign
def test_two_tokens_tend_to_the_law_of_the_class_with_the_number_of_steps(x64):
    """The error is of first order: with four times the steps it is a quarter."""
    process = Uniform(3, parametrisation="mixture")
    free, read = exact.uniform_outputs(process, MIXED[2]), posterior_of_noise(process, TWO)
    noisy = guided(free, process, read)
    masked = guided(of_masks(TWO), Masking(3), posterior_of_masks(TWO))
    for (denoiser, steered, _), law_of in ((noisy, law_of_noise), (masked, law_of_masks)):
        errors = []
        for steps in (32, 128):
            law = law_of(denoiser, steered, np.arange(steps + 1) / steps, 2)
            law = law.reshape(4, 4)[:3, :3] if len(law) == 16 else law.reshape(3, 3)
            errors.append(np.abs(law - TWO[1]).max())
        assert errors[1] < 4e-3 and errors[0] / errors[1] == pytest.approx(4.0, rel=0.15)


@both
def test_rates_are_those_of_a_model_of_the_class(of_class, x64):
    """R(z -> z' | y) = R(z -> z') p(y | z') / p(y | z), of masks and of uniform noise."""
    length = of_class.ndim - 1
    noise, t = Uniform(3, parametrisation="mixture"), 0.4
    z = jnp.asarray(exact.sequences(3, length))
    times = jnp.full(len(z), t)
    denoiser, steered, _ = guided(
        exact.uniform_outputs(noise, MIXED[length]), noise, posterior_of_noise(noise, of_class)
    )
    want = noise.reverse_rates(exact.uniform_outputs(noise, of_class[1])(z, times), z, times)
    found = steered.reverse_rates(denoiser(z, times), z, times)
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12)
    z = jnp.asarray(exact.sequences(4, length))
    times = jnp.full(len(z), t)
    denoiser, steered, _ = guided(of_masks(of_class), Masking(3), posterior_of_masks(of_class))
    of_label = exact.denoiser_of(exact.perfect_logits(of_class[1]))
    # alpha = 1 - t, so that a mask is revealed at the rate 1 / t.
    want = jax.nn.softmax(of_label(z, times)) / t * (z == 3)[..., None]
    found = steered.reverse_rates(denoiser(z, times), z, times)
    np.testing.assert_allclose(found[..., :3], want, rtol=1e-9)
    np.testing.assert_array_equal(found[..., 3], 0.0)


def recorded_classifier(symbols: int):
    """The classifier of the record: log p of its class, of tokens or of a mixture of all."""
    first, second = (jnp.asarray(RECORDED[name]) for name in ("first", "second"))

    def log_probability(z, t):
        weights = z.weights if isinstance(z, Mixture) else jax.nn.one_hot(z, symbols)
        hidden = jnp.tanh(jnp.einsum("bls,lsh->bh", weights, first[:, :symbols]))
        return jax.nn.log_softmax(hidden @ second)[:, RECORDED["label"]]

    return log_probability


@pytest.mark.parametrize("method", ["exact", "taylor"])
@pytest.mark.parametrize("kind", ["masking", "uniform"])
@pytest.mark.cases(2)
def test_steps_are_those_of_its_authors(kind, method, x64):
    """Probabilities of z_s that kuleshov-group/discrete-diffusion-guidance computes."""
    process = Masking(3) if kind == "masking" else Uniform(3)
    symbols, gains = 3 + (kind == "masking"), {"exact": exact_gains, "taylor": taylor_gains}
    logits, z = jnp.asarray(RECORDED["logits"]), jnp.asarray(RECORDED[kind]["z"])
    given = Denoiser(lambda z, t: logits, lambda h: h)
    denoiser, steered, _ = guided(
        given, process, recorded_classifier(symbols), RECORDED["gamma"], gains=gains[method]
    )
    s, t = (jnp.full(len(z), 1.0 - RECORDED[name]) for name in ("alpha_s", "alpha_t"))
    outputs = denoiser(z, t)
    if kind == "masking":
        reveal = steered.revealed(outputs, s[0], t[0])[..., None]
        each = jnp.concatenate([reveal * jax.nn.softmax(outputs), 1.0 - reveal], axis=-1)
        each = jnp.where((z == 3)[..., None], each, jax.nn.one_hot(z, 4))
    else:
        each = jax.nn.softmax(steered.reverse_logits(outputs, z, s, t))
    # Its one-hot vectors are float32, and the record has eight digits.
    np.testing.assert_allclose(each, RECORDED[kind][method], atol=3e-7)


def linear(z, t):
    """A log-probability that is linear in the one-hot vectors, and falls with time."""
    slope = jnp.sin(1.0 + 2.3 * jnp.arange(12.0)).reshape(3, 4)
    weights = z.weights if isinstance(z, Mixture) else jax.nn.one_hot(z, 4)
    return jnp.sum(weights * slope, axis=(1, 2)) * (2.0 - t)


def test_to_first_order_is_exact_where_the_log_probability_is_linear(x64):
    z, t = jnp.asarray(exact.sequences(4, 3)), jnp.linspace(0.0, 1.0, 64)
    found, want = (gains(linear, z, t, 4) for gains in (taylor_gains, exact_gains))
    np.testing.assert_allclose(found, want, atol=1e-14)
    assert np.abs(want).max() > 1
    index = jnp.asarray(np.random.default_rng(0).integers(0, 3, (64, 2)))
    for gains in (taylor_gains, exact_gains):
        some = gains(linear, z, t, 4, index)
        np.testing.assert_allclose(
            some, jnp.take_along_axis(want, index[..., None], axis=1), atol=1e-14
        )


@pytest.mark.parametrize("rows", [1, 7, 40, 1000])
def test_every_changed_sequence_is_read_once_whatever_fits_into_memory(rows, monkeypatch, x64):
    monkeypatch.setattr(classifier, "ROWS", rows)
    read = recorded_classifier(4)
    z, t = np.array([[0, 3, 2, 1], [3, 3, 3, 0], [1, 1, 2, 2]]), jnp.asarray([0.1, 0.5, 1.0])
    found = np.asarray(exact_gains(read, jnp.asarray(z), t, 4))
    for n, v in itertools.product(range(4), range(4)):
        changed = z.copy()
        changed[:, n] = v
        want = read(jnp.asarray(changed), t) - read(jnp.asarray(z), t)
        np.testing.assert_allclose(found[:, n, v], want, atol=1e-13)


def test_masks_of_hybrid_noise_are_symbols_too(x64):
    """z_s may be the mask, and the last step, to clean tokens, never is."""
    process, read = Hybrid(3), recorded_classifier(4)
    given = Denoiser(lambda z, t: jnp.zeros((*z.shape, 3)) + jnp.arange(3.0), lambda h: h)
    denoiser, steered, _ = guided(given, process, read, 1.5)
    z, s, t = jnp.asarray([[3, 0, 3, 2]]), jnp.asarray([0.3]), jnp.asarray([0.6])
    outputs = denoiser(z, t)
    gain = 1.5 * exact_gains(read, z, t, 4)
    for found, free in (
        (steered.reverse_logits(outputs, z, s, t), process.reverse_logits(outputs, z, s, t)),
        (steered.clean_logits(outputs, z, t), process.clean_logits(outputs, z, t)),
    ):
        want = jax.nn.softmax(free) * jnp.exp(gain[..., : free.shape[-1]])
        want = want / want.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(jax.nn.softmax(found), want, atol=1e-12)


def test_a_temperature_is_that_of_the_model_and_not_of_the_classifier(x64):
    """With masks as with other noise, whose outputs are transformed before the step."""
    cold = Ancestral(transform=Transform(temperature=0.5, top_k=2))
    denoiser, process, step = guided(of_masks(ONE), Masking(3), posterior_of_masks(ONE), step=cold)
    assert step.transform == Transform()
    found = law_of_masks(denoiser, process, uniform(1), 1)[:3]
    law = np.where(MIXED[1] > MIXED[1].min(), MIXED[1] ** 2, 0.0) * ONE[1] / MIXED[1]
    np.testing.assert_allclose(found, law / law.sum(), atol=1e-12)


def guidable(process) -> bool:
    """Whether a classifier of its states can be trained."""
    return exact.fits(Classifier(), process) and not isinstance(process, RevealsBySymbol)


# (process, sampler) of all that a classifier can guide.
GUIDED = [
    (kind, name)
    for kind, make in exact.PROCESS_CASES.items()
    for name, sampler in exact.samplers_for(make(3).init()).items()
    if issubclass(sampler, guide_checks.GUIDED) and guidable(make(3).init())
]


def zeros(z, t):
    """Is sure of a class of which every token is 0, whatever the time."""
    weights = z.weights[..., 0] if isinstance(z, Mixture) else z == 0
    return 40.0 * jnp.sum(weights.astype(jnp.float32), axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", GUIDED, ids=[", ".join(pair) for pair in GUIDED])
@pytest.mark.cases(1)
def test_every_sampler_follows_the_classifier(kind, name):
    process, step = exact.PROCESS_CASES[kind](3).init(), SAMPLERS[name]()
    given = Denoiser(lambda z, t: jnp.zeros((*z.shape, 3)), lambda h: h)
    keys, grid = exact.keys_for(0, 32), uniform(process.timesteps or 6)
    free = exact.drawn(given, process, step, grid, keys)[0]
    assert (np.asarray(free) != 0).mean() > 0.3
    found = exact.drawn(*guided(given, process, zeros, step=step), grid, keys)[0]
    np.testing.assert_array_equal(found, 0)


def test_a_classifier_of_other_classes_is_refused():
    """A label would be another class for the classifier than for the model."""

    def run(*labels):
        return types.SimpleNamespace(
            domain=TextDomain(Characters("ab"), 4, labels),
            network=types.SimpleNamespace(classifies=True, time_free=True),
            process=Masking(2),
            config={"network": {"classes": len(labels)}},
            data=types.SimpleNamespace(length=4),
            sample=types.SimpleNamespace(length=0),
            guide=types.SimpleNamespace(label=1, options=ClassifierOptions("runs/classifier")),
        )

    for own in (run("no", "yes"), run()):
        guides.check(own, run("no", "yes"))
    with pytest.raises(UserError, match="on other classes .* class 0 is 'a' instead of 'no'"):
        guides.check(run("no", "yes"), run("a", "no"))
