"""The bounds on uniform noise: -log p for exact outputs, who minimises what, float32."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.cross_entropy import CrossEntropy
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.processes.schedules import Clipped, Cosine, Geometric, Linear, LogLinear, Polynomial
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser

pytestmark = pytest.mark.slow

P, X = exact.P_V3L2, exact.sequences(3, 2)
GPT2 = 50257
of_mu = pytest.mark.parametrize("parametrisation", ["joint", "mixture"])
every_bound = pytest.mark.parametrize("objective", [ScoreEntropy(), UniformELBO()])


def wrong_outputs(seed: float = 0.0) -> Denoiser:
    """Outputs that depend on z and t, and are right for no data."""

    def features(z, t):
        phase = 1.0 + seed + 2.1 * jnp.sum(z * jnp.array([3, 1]), axis=1) + 3.0 * t
        return jnp.sin(phase[:, None, None] + 3.7 * jnp.arange(2)[:, None] + 5.3 * jnp.arange(3))

    return Denoiser(features, lambda h: h)


def bound(objective, denoiser, process, x=X, **rule) -> np.ndarray:
    """The whole bound as the objective adds it up, its integral by enumeration: [X]."""
    total, parts = objective(
        denoiser, process, exact.batch_of(x), jnp.full(len(x), 0.5), exact.keys_for(0, len(x))
    )
    assert set(parts) == {"prior", "reconstruction"} and objective.is_bound(process)
    ends = np.asarray(parts["prior"] + parts["reconstruction"])
    assert (np.asarray(total) >= ends).all()
    return exact.uniform_integral(objective, denoiser, process, x, **rule) + ends


@pytest.mark.usefixtures("x64")
@every_bound
@of_mu
@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Polynomial(2.0)])
@pytest.mark.cases(3)
def test_m05_exact_outputs_have_the_nats_of_the_data(objective, parametrisation, schedule):
    """From alpha = 1 to 0 no other term is left: -log p(x) for every x."""
    process = Uniform(3, schedule, parametrisation)
    values = bound(objective, exact.uniform_outputs(process, P), process)
    np.testing.assert_allclose(values[[0, 5]], [1.6094379124, 2.5257286443], rtol=1e-9)
    assert P.ravel() @ values == pytest.approx(1.9934181681, rel=1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "schedule", [LogLinear(0.05), Geometric(0.01, 3.0), Clipped(Linear(), 0.1)]
)
@pytest.mark.parametrize("parametrisation", ["joint", "mixture", "score"])
def test_it_is_a_bound_for_every_schedule(parametrisation, schedule):
    """No more than mass 1 and, at its best, over the entropy by what the ends cost: a little."""
    process = Uniform(3, schedule, parametrisation)
    best = bound(ScoreEntropy(), exact.uniform_outputs(process, P), process)
    assert np.exp(-best).sum() < 1.0
    excess = P.ravel() @ best - 1.9934181681
    each = process.prior_nats(X[:1]) + process.reconstruction_nats(X[:1])
    ends = float(each.sum())
    assert 0.0 < excess < ends
    assert np.exp(-bound(ScoreEntropy(), wrong_outputs(), process)).sum() < 1.0


@pytest.mark.usefixtures("x64")
def test_the_ends_are_not_in_the_integral():
    """With geometric from 0.01 to 3, the integral alone has the mass of more than one model."""
    process = Uniform(3, Geometric(0.01, 3.0), "score")
    values = exact.uniform_integral(ScoreEntropy(), exact.uniform_outputs(process, P), process, X)
    assert np.exp(-values).sum() > 1.0


@pytest.mark.usefixtures("x64")
@of_mu
@pytest.mark.parametrize("schedule", [Linear(), Geometric(1e-3, 20.0), Polynomial(0.5)])
def test_both_forms_of_the_bound_are_the_same_number(parametrisation, schedule):
    """At every z, x and t, whatever the outputs; to 1e-9, or as near 0 as 1e-12."""
    process, t = Uniform(3, schedule, parametrisation), np.array([1e-6, 0.01, 0.3, 0.8, 0.999])
    for denoiser in (wrong_outputs(), exact.uniform_outputs(process, P)):
        values = [
            exact.over_states(exact.bind(objective, denoiser, process), 3, X, t)
            for objective in (ScoreEntropy(), UniformELBO())
        ]
        np.testing.assert_allclose(*values, rtol=1e-9, atol=1e-12)
        assert values[0].min() > -1e-12 and values[0].max() > 1.0


@of_mu
@pytest.mark.parametrize("t", [2.0**-24, 1e-5, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0 - 2.0**-24])
@pytest.mark.cases(2)
def test_a_large_vocabulary_in_float32(parametrisation, t):
    """V = 50257, four tokens: both forms to 2e-5 of float64, near t = 1 to 1e-3 of it.

    Sigma is 2^24 there, and all scores are nearly 1. Outputs spread, and sharp at x or not.
    """
    outputs = np.sin(np.arange(4.0 * GPT2)).reshape(1, 4, GPT2).astype(np.float32)
    outputs[0, 0, 0], outputs[0, 3, 0] = 20.0, 30.0
    # Sure of a wrong token: 1 - mu_z = 5e-9 is what the cost of the right one depends on.
    outputs[0, 1, -1], outputs[0, 1, 0] = 30.0, -30.0
    x, z, found = np.zeros((1, 4)), np.array([[1, GPT2 - 1, 0, 0]]), {}
    for dtype in (np.float64, np.float32):
        with jax.enable_x64(dtype == np.float64):
            cast = jnp.asarray(outputs, dtype)
            denoiser = Denoiser(lambda z, t, cast=cast: cast, lambda h: h)
            found[dtype] = [
                float(
                    objective.loss_at(
                        denoiser,
                        Uniform(GPT2, Linear(), parametrisation),
                        exact.batch_of(x),
                        jnp.asarray(z),
                        jnp.asarray([np.float32(t)], dtype),
                    )[0]
                )
                for objective in (ScoreEntropy(), UniformELBO())
            ]
    wide, narrow = found.values()
    assert wide[0] == pytest.approx(wide[1], rel=1e-9) and wide[0] > 10.0
    np.testing.assert_allclose(narrow, wide, rtol=2e-5 if t < 0.9999 else 1e-3)


def slope(objective, denoiser, process, t: float) -> float:
    """The largest derivative in a common shift of an output of the mean over x and z at t."""
    z, batch = exact.sequences(3, 2), exact.batch_of(np.repeat(X, 9, axis=0))
    law = P.ravel()[:, None] * exact.noise_law(process, X, np.array([t]))[:, 0]
    states, times = jnp.tile(z, (9, 1)), jnp.full(81, t)

    def mean(shift):
        # One shift for each z, position and symbol.
        rows = jnp.sum(states * jnp.array([3, 1]), axis=1)
        moved = denoiser(states, times) + shift[rows]
        fixed = Denoiser(lambda z, t: moved, lambda h: h)
        return jnp.sum(law.ravel() * objective.loss_at(fixed, process, batch, states, times))

    return float(jnp.abs(jax.grad(mean)(jnp.zeros((9, 2, 3)))).max())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("t", [0.05, 0.5, 0.95])
@pytest.mark.parametrize(
    "objective, parametrisation, best, minimised",
    [
        (ScoreEntropy(), "joint", "joint", True),
        (ScoreEntropy(), "mixture", "mixture", True),
        (ScoreEntropy(), "score", "score", True),
        (UniformELBO(), "joint", "joint", True),
        (UniformELBO(), "mixture", "mixture", True),
        (UniformELBO(), "joint", "mixture", False),
        (UniformELBO(), "mixture", "joint", False),
        (CrossEntropy(), "mixture", "mixture", True),
        (CrossEntropy(), "mixture", "joint", False),
    ],
)
@pytest.mark.cases(12)
def test_which_outputs_minimise_what(objective, parametrisation, best, minimised, t):
    """joint: the law of x_n given the other tokens; mixture: given all of z. At every t."""
    process = Uniform(3, LogLinear(), parametrisation)
    other = Uniform(3, LogLinear(), best)
    size = slope(objective, exact.uniform_outputs(other, P), process, t)
    assert size < 1e-12 if minimised else size > 1e-4


@pytest.mark.usefixtures("x64")
def test_cross_entropy_at_its_best_is_the_entropy_of_each_token_given_the_noise():
    """One level, 1 - alpha = 0.6: sum_n H(x_n | z), from the joint law of x and z."""
    process, levels = Uniform(3, Linear(), "mixture"), np.array([0.6])
    denoiser, law = exact.uniform_outputs(process, P), exact.noise_law(process, X, levels)[:, 0]
    values = exact.over_states(exact.bind(CrossEntropy(), denoiser, process), 3, X, levels)[:, 0]
    joint = (P.ravel()[:, None] * law).reshape(3, 3, 9)

    def entropy(table):
        return -np.sum(table * np.log(table))

    by_hand = sum(entropy(joint.sum(axis=1 - n)) - entropy(joint.sum(axis=(0, 1))) for n in (0, 1))
    assert P.ravel() @ (values * law).sum(axis=1) == pytest.approx(by_hand, rel=1e-9)


def test_cross_entropy_is_for_training_with_the_mixture():
    objective = CrossEntropy()
    assert not exact.fits(objective, Uniform(3)) and not UniformELBO().needs.time
    assert exact.fits(objective, Uniform(3, parametrisation="mixture"))
    assert not objective.is_bound(Uniform(3, parametrisation="mixture"))
    assert not exact.fits(UniformELBO(), Uniform(3, LogLinear(), "score"))


@every_bound
@of_mu
@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-24])
@pytest.mark.cases(2)
def test_gradients_are_finite_at_the_ends_of_time(objective, parametrisation, u):
    """float32, and outputs of a bfloat16 network; V = 2 leaves no symbol but z and x."""
    for schedule in (Linear(), Cosine(), Polynomial(3.0), LogLinear(), Geometric(1e-3, 200.0)):
        process = Uniform(2, schedule, parametrisation)

        def loss(table, process=process):
            denoiser = Denoiser(lambda z, t: jnp.broadcast_to(table, (*z.shape, 2)), lambda h: h)
            x = exact.batch_of(np.tile([[0, 1, 1]], (8, 1)))
            nats = objective(denoiser, process, x, jnp.full(8, u), exact.keys_for(1, 8))[0]
            return nats.sum()

        for dtype in (jnp.float32, jnp.bfloat16):
            value, gradient = jax.value_and_grad(loss)(jnp.asarray([9.0, -9.0], dtype))
            assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
            assert value.dtype == jnp.float32


@pytest.mark.usefixtures("x64")
@every_bound
def test_flat_outputs_cost_log_v_a_token_as_joint_and_without_end_as_a_mixture(objective):
    """A mixture that stays flat at t = 0 costs as log(1/t): each 1e3 adds as much again."""
    flat = Denoiser(lambda z, t: jnp.zeros((*z.shape, 3)), lambda h: h)
    joint = bound(objective, flat, Uniform(3, Linear(), "joint"))
    np.testing.assert_allclose(joint, 2 * np.log(3.0), rtol=1e-9)
    costs = [
        bound(objective, flat, Uniform(3, Geometric(first, 20.0), "mixture"), X[:1])[0]
        for first in (1e-3, 1e-6, 1e-9)
    ]
    assert costs[0] > 4 * joint[0]
    assert costs[2] - costs[1] == pytest.approx(costs[1] - costs[0], rel=1e-2)
