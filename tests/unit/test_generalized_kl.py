"""The bound and the sampler of discrete flow matching on uniform noise, by enumeration."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_matching_numbers import DRAWS, FROM_TOKEN, LOGITS, SAMPLED, SCHEDULES, UNIFORM, X, Z
from wrong_denoiser import wrong_outputs

from md4_jax.auditor import audit
from md4_jax.auditor.report import text
from md4_jax.objectives.generalized_kl import GeneralizedKL
from md4_jax.processes.masking import Masking
from md4_jax.processes.metric_path import MetricPath
from md4_jax.processes.schedules import Cosine, Geometric, Linear, Power
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, UserError
from md4_jax.samplers.flow import Flow

P, ALL, V = exact.P_V3L2, exact.sequences(3, 2), 3
# Right outputs for P_V3L1: the mean of their loss by quadrature of their own code.
THEIRS = 1.31475
of_mu = pytest.mark.parametrize("parametrisation", ["joint", "mixture"])
in_float64 = pytest.mark.usefixtures("x64")


def bound(denoiser, process, x=ALL, **rule) -> np.ndarray:
    """The whole bound as the objective adds it up, its integral by enumeration: [X]."""
    objective, u = GeneralizedKL(), jnp.full(len(x), 0.5)
    _, parts = objective(denoiser, process, exact.batch_of(x), u, exact.keys_for(0, len(x)))
    ends = np.asarray(parts["prior"] + parts["reconstruction"])
    return exact.uniform_integral(objective, denoiser, process, x, **rule) + ends


def posterior_of(denoiser, process, z):
    """t -> p(x_n | z_t = z), [Z, L, V]."""
    z = jnp.asarray(z)

    @jax.jit
    def posterior(t):
        times = jnp.full(len(z), t)
        return jax.nn.softmax(process.clean_logits(denoiser(z, times), z, times), axis=-1)

    return lambda t: np.asarray(posterior(t))


def chain_law(denoiser, process, grid, *, frozen: bool = False) -> np.ndarray:
    """The law over V^L of the steps of `flow` down a grid to t = 0, from uniform symbols: [Z].

    From their definition, for schedules from alpha = 1 to 0: mu_y times the chance of a jump.
    """
    law, noise = np.full(len(ALL), 1.0 / len(ALL)), process.schedule.one_minus_alpha
    posterior = posterior_of(denoiser, process, ALL)
    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        chance = 1.0 - float(noise(jnp.asarray(s))) / float(noise(jnp.asarray(t)))
        if frozen and s > 0.0:
            slope = float(process.schedule.dalpha(jnp.asarray(t)))
            chance = 1.0 - np.exp((t - s) * slope / float(noise(jnp.asarray(t))))
        step = chance * posterior(t) + (1.0 - chance) * np.eye(V)[ALL]
        law = law @ np.prod([step[:, n][:, ALL[:, n]] for n in range(2)], axis=0)
    return law


@in_float64
@of_mu
@pytest.mark.parametrize("schedule", [Linear(), Power(2.0), Cosine()])
@pytest.mark.cases(3)
def test_right_outputs_have_the_number_of_their_loss(parametrisation, schedule):
    """Above the entropy, 1.02965, and the same in both forms and for every schedule."""
    process, p = Uniform(3, schedule, parametrisation), exact.P_V3L1
    values = bound(exact.uniform_outputs(process, p), process, exact.sequences(3, 1))
    assert p @ values == pytest.approx(THEIRS, abs=1e-5)


@in_float64
@pytest.mark.parametrize("n, t", sorted(UNIFORM))
def test_the_integrand_is_their_loss_of_fixed_logits(n, t):
    denoiser = Denoiser(lambda z, t: jnp.asarray(LOGITS[None, :, :3]), lambda h: h)
    process, times = Uniform(3, SCHEDULES[n], "mixture"), jnp.asarray([1.0 - t])
    batch = exact.batch_of(X)
    found = float(GeneralizedKL().loss_at(denoiser, process, batch, jnp.asarray(Z), times)[0])
    assert found == pytest.approx(sum(UNIFORM[n, t]), rel=1e-9)


@in_float64
@of_mu
def test_it_is_the_divergence_of_the_paths_of_small_steps(parametrisation):
    """KL of the chain given x from the model's, step by step, by enumeration: first order in 1/N.

    One token. Given x, the token becomes x with (alpha_s - alpha_t) / (1 - alpha_t).
    """
    process, p = Uniform(3, Linear(), parametrisation), exact.P_V3L1
    denoiser, found = exact.uniform_outputs(process, np.array([0.2, 0.2, 0.6])), {}
    posterior = posterior_of(denoiser, process, exact.sequences(3, 1))
    for steps in (400, 800):
        total = np.zeros(3)
        for i in range(steps, 0, -1):
            t, chance = i / steps, 1.0 / i
            model = chance * posterior(t)[:, 0] + (1.0 - chance) * np.eye(3)
            for x in range(3):
                law = (1.0 - t) * np.eye(3)[x] + t / 3.0
                given = chance * np.eye(3)[x] + (1.0 - chance) * np.eye(3)
                nats = np.where(given > 0, given * np.log(np.maximum(given, 1e-300) / model), 0.0)
                total[x] += law @ nats.sum(axis=1)
        found[steps] = p @ total
    ours = p @ bound(denoiser, process, exact.sequences(3, 1))
    assert abs(found[800] - ours) < 2e-3
    assert 2.0 * found[800] - found[400] == pytest.approx(ours, abs=1e-4)


@pytest.mark.quick(1)
@in_float64
@of_mu
def test_no_text_is_less_likely_than_it_says(parametrisation):
    """The sampler's law by enumeration, of many steps of wrong outputs, and the bound: [X]."""
    process = Uniform(3, Linear(), parametrisation)
    law = chain_law(wrong_outputs(), process, np.linspace(0.0, 1.0, 401) ** 3)
    # A mixture that is never sure has an infinite bound: left out is what comes before 1e-4.
    low = 1e-4 if parametrisation == "mixture" else 0.0
    values = bound(wrong_outputs(), process, low=low)
    assert law.sum() == pytest.approx(1.0)
    assert (values > -np.log(law) + 0.01).all()
    assert (values < 20.0).all()


@in_float64
@of_mu
def test_it_is_a_bound_for_a_schedule_with_ends(parametrisation):
    """With the terms of both ends; without them it has the mass of more than one model."""
    process = Uniform(3, Geometric(0.05, 0.5), parametrisation)
    outputs = exact.uniform_outputs(process, P)
    assert np.exp(-bound(outputs, process)).sum() < 1.0
    assert np.exp(-exact.uniform_integral(GeneralizedKL(), outputs, process, ALL)).sum() > 1.0


@pytest.mark.slow
@in_float64
def test_right_outputs_are_best():
    """No other outputs of a table have a smaller mean; a slope of 0 at the right ones."""
    process = Uniform(3, Linear(), "joint")
    t, weights = exact.quadrature(nodes=8)
    denoiser, law = exact.uniform_outputs(process, P), exact.noise_law(process, ALL, t)

    def mean(shift):
        moved = Denoiser(
            lambda z, t: denoiser(z, t) + shift * jnp.cos(z[..., None] + 2.0 * jnp.arange(3)),
            lambda h: h,
        )
        x, z = np.repeat(ALL, 9, axis=0), jnp.asarray(np.tile(ALL, (9, 1)))
        total = 0.0
        for i, weight in enumerate(weights):
            times = jnp.full(81, t[i])
            nats = GeneralizedKL().loss_at(moved, process, exact.batch_of(x), z, times)
            total += weight * jnp.sum((P.ravel()[:, None] * law[:, i]).ravel() * nats)
        return total

    assert abs(jax.grad(mean)(0.0)) < 1e-9
    assert min(mean(0.3), mean(-0.3)) > mean(0.0) + 1e-3


@of_mu
@pytest.mark.parametrize("t", [2.0**-24, 1e-4, 0.5, 1.0 - 2.0**-24])
@pytest.mark.cases(1)
def test_a_large_vocabulary_in_float32(parametrisation, t):
    """4,000 symbols, in chunks of logits or not: finite slopes, and the number of float64."""
    outputs = np.sin(np.arange(3.0 * 4000)).reshape(1, 3, 4000).astype(np.float32)
    outputs[0, 0, 0] = 30.0
    x, z, found = [[0, 0, 5]], np.array([[0, 7, 5]]), []
    for dtype in (np.float64, np.float32):
        with jax.enable_x64(dtype == np.float64):

            def nats(h, dtype=dtype):
                process = Uniform(4000, Linear(), parametrisation)
                denoiser, times = Denoiser(lambda z, t: h, lambda h: h), jnp.asarray([t], dtype)
                found = GeneralizedKL().loss_at(
                    denoiser, process, exact.batch_of(x), jnp.asarray(z), times
                )
                return jnp.sum(found)

            value, slope = jax.value_and_grad(nats)(jnp.asarray(outputs, dtype))
            assert np.isfinite(slope).all()
            found.append(float(value))
    assert found[1] == pytest.approx(found[0], rel=2e-5 if t < 0.9999 else 1e-3)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "process",
    [
        Uniform(3),
        *(
            pytest.param(each, marks=pytest.mark.campaign)
            for each in (Uniform(3, Geometric(1e-3, 10.0), "mixture"), MetricPath(3))
        ),
    ],
)
def test_the_auditor_calls_it_a_bound_that_misses_the_entropy(process):
    found = audit(GeneralizedKL(), process, problems=((3, 2),), steps=40)
    assert found.claims and found.is_bound and found.passed and not found.is_tight
    assert "as the objective says" in text(found) and "counterexample" not in text(found)


@pytest.mark.quick(1)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.cases(1)
def test_a_frozen_step_has_the_frequencies_of_their_solver(n):
    """Of a million draws, from symbol 0 at their t = 0.5 to 0.75."""
    step, process, count = Flow("frozen"), Uniform(3, SCHEDULES[n], "mixture"), 1_000_000
    denoiser = Denoiser(lambda z, t: jnp.broadcast_to(LOGITS[0, :3], (*z.shape, 3)), lambda h: h)
    chain = exact.chain_of(np.zeros((1000, count // 1000)))
    times = jnp.float32(0.25), jnp.float32(0.5)
    z = step(denoiser, process, chain, *times, exact.keys_for(n, 1000)).z
    theirs = np.array(FROM_TOKEN[n])
    found = np.bincount(np.asarray(z).ravel(), minlength=3) / count
    assert (np.abs(found - theirs) < 4.5 * np.sqrt(theirs * (1.0 - theirs) / count)).all()


@in_float64
@pytest.mark.parametrize("n", [1, 2])
def test_samples_of_their_solver_have_the_law_of_frozen_steps(n):
    """Three steps, the last of which draws every token: 4 million samples, to 4 standard errors."""
    process, theirs = Uniform(3, SCHEDULES[n], "mixture"), np.array(SAMPLED[n])

    def gap(frozen: bool) -> float:
        law = chain_law(wrong_outputs(), process, np.array([0.0, 0.3, 0.7, 1.0]), frozen=frozen)
        return np.max(np.abs(law - theirs) / np.sqrt(law * (1.0 - law) / DRAWS))

    assert gap(True) < 4.0 < gap(False)


# Joint outputs show whether tokens and jumps share their draws; mixtures do not.
@pytest.mark.parametrize(
    "parametrisation, rate",
    [
        ("joint", "integrated"),
        ("mixture", "frozen"),
        pytest.param("joint", "frozen", marks=pytest.mark.campaign),
        pytest.param("mixture", "integrated", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.cases(1)
def test_samples_have_the_law_of_the_steps(parametrisation, rate):
    process, grid = Uniform(3, Power(2.0), parametrisation), np.float32([0.0, 0.3, 0.7, 1.0])
    law, count = chain_law(wrong_outputs(), process, grid, frozen=rate == "frozen"), 40_000
    z, evaluations = exact.drawn(
        wrong_outputs(), process, Flow(rate), grid, exact.keys_for(1, count)
    )
    found = np.bincount(np.asarray(z) @ [3, 1], minlength=9) / count
    assert (np.abs(found - law) < 4.5 * np.sqrt(law * (1.0 - law) / count)).all()
    assert (np.asarray(evaluations) == 3).all()


@in_float64
def test_integrated_steps_are_exact_for_one_token():
    """The right posterior has the law of the data after steps of any size, and frozen has not."""
    process, p, noise = Uniform(3, Power(2.0), "mixture"), exact.P_V3L1, Power(2.0).one_minus_alpha
    denoiser, symbols = exact.uniform_outputs(process, p), jnp.arange(3)[:, None]
    for rate in ("integrated", "frozen"):
        law = np.full(3, 1 / 3)
        for s, t in ((0.6, 1.0), (0.2, 0.6), (0.0, 0.2)):
            mu = jax.nn.softmax(denoiser(symbols, jnp.full(3, t)))[:, 0]
            # The step itself, asked for how often a token with every x becomes it.
            many, keys = jnp.zeros((1, 200_000), int), exact.keys_for(int(10 * t), 1)
            times = jnp.full(1, s), jnp.full(1, t)
            jumped = process.flow_step(keys, many, many + 1, times, rate == "frozen")
            exactly = 1.0 - float(noise(jnp.asarray(s)) / noise(jnp.asarray(t)))
            chance = float(jnp.mean(jumped))
            if rate == "integrated":
                assert abs(chance - exactly) < 4.5 * np.sqrt(0.25 / 200_000)
                chance = exactly
            law = chance * (law @ np.asarray(mu)) + (1.0 - chance) * law
        gap = np.abs(law - p).max()
        assert gap < 1e-12 if rate == "integrated" else gap > 1e-3


def test_what_it_does_not_take():
    assert not exact.fits(GeneralizedKL(), Masking(3)) and not exact.fits(Flow(), Masking(3))
    assert not exact.fits(GeneralizedKL(), Uniform(3, Geometric(1e-3, 20.0), "score"))
    with pytest.raises(UserError, match="sample.rate must be one of integrated, frozen"):
        Flow("euler")
