"""Discrete flow matching: the numbers of flow_matching_numbers.py beside ours."""

import exact
import jax.numpy as jnp
import numpy as np
import pytest
from flow_matching_numbers import (
    ALL_MASKED,
    CROSS_ENTROPY,
    DRAWS,
    FROM_MASK,
    FROM_TOKEN,
    LOGITS,
    ONE_SHOWN,
    SCHEDULES,
    STAYED,
    UNIFORM,
    VELOCITY,
    WITH_MASK,
    X,
    Z,
)  # fmt: skip

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.cross_entropy import CrossEntropy
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.token_nats import masked_nats
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Linear
from md4_jax.processes.uniform import Uniform
from md4_jax.samplers import reveal
from md4_jax.samplers.jumps import Euler, TauLeaping
from md4_jax.samplers.predictor_corrector import PredictorCorrector

pytestmark = pytest.mark.usefixtures("x64")
every_time = pytest.mark.parametrize("n, t", sorted(ALL_MASKED))


def loss_at(objective, process, z, t) -> float:
    """Our integrand at their time t, of the logits without the mask's."""
    denoiser = exact.of_outputs(lambda z, t: jnp.asarray(LOGITS[None, :, :3]))
    batch, ours = exact.batch_of(X), jnp.asarray([1.0 - t])
    return float(objective.loss_at(denoiser, process, batch, jnp.asarray(z), ours)[0])


def softmax(logits) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)


def weight_of(n, t) -> float:
    """kappa' / (1 - kappa)."""
    return n * t ** (n - 1) / (1.0 - t**n)


def their_nats(weight, mu, z, x) -> float:
    """The page's formula for a token."""
    return weight * ((1.0 - mu[z]) if z == x else -np.log(mu[x]) - mu[z])


@every_time
def test_on_masks_their_loss_is_md4_s_integrand(n, t):
    """A token that is shown costs them weight (1 - mu_z), and us nothing."""
    process = Masking(3, SCHEDULES[n])
    found = loss_at(MD4(), process, [[3, 3, 3]], t)
    assert found == pytest.approx(sum(ALL_MASKED[n, t]), rel=1e-9)
    first, shown, last = ONE_SHOWN[n, t]
    assert loss_at(MD4(), process, [[3, 0, 3]], t) == pytest.approx(first + last, rel=1e-9)
    theirs = weight_of(n, t) * (1.0 - softmax(LOGITS[1, :3])[0])
    assert shown == pytest.approx(theirs, rel=1e-9)


@every_time
def test_an_output_for_the_mask_costs_them_more(n, t):
    """weight (-log(1 - p) - p), where p is the probability that it gives to the mask."""
    p = softmax(LOGITS)[[0, 2], 3]
    more = np.array(WITH_MASK[n, t])[[0, 2]] - np.array(ONE_SHOWN[n, t])[[0, 2]]
    np.testing.assert_allclose(more, weight_of(n, t) * (-np.log1p(-p) - p), rtol=1e-9)


@every_time
def test_on_uniform_noise_our_rates_are_theirs_and_an_exchange(n, t):
    """The rest goes to all symbols alike; of the right outputs it is in balance with q(z | x)."""
    process, time = Uniform(3, SCHEDULES[n], "mixture"), jnp.asarray([1.0 - t])
    rates = np.asarray(
        process.reverse_rates(jnp.asarray(LOGITS[None, :, :3]), jnp.asarray(Z), time)
    )
    away = np.arange(3) != Z[0, :, None]
    rest = (rates[0] - VELOCITY[n, t])[away].reshape(3, 2)
    np.testing.assert_allclose(rest[:, 0], rest[:, 1], rtol=1e-9)
    right = jnp.asarray(np.where(np.arange(3) == 2, 0.0, -1e4)) * jnp.ones((1, 3, 1))
    rates = np.array(process.reverse_rates(right, jnp.array([[0, 1, 2]]), time))[0]
    rates[:2, 2] -= weight_of(n, t)
    law = (1.0 - t**n) / 3.0 + t**n * (np.arange(3) == 2)
    flow = law[:, None] * rates
    assert (flow[~np.eye(3, dtype=bool)] > 0).all()
    np.testing.assert_allclose(flow, flow.T, rtol=1e-9)


@every_time
def test_on_uniform_noise_their_loss_is_another_number(n, t):
    """Its formula on the page is right, and `uniform_elbo` differs."""
    mu = softmax(LOGITS[:, :3])
    each = [their_nats(weight_of(n, t), mu[i], Z[0, i], X[0, i]) for i in range(3)]
    np.testing.assert_allclose(each, UNIFORM[n, t], rtol=1e-9)
    ours = loss_at(UniformELBO(), Uniform(3, SCHEDULES[n], "mixture"), Z, t)
    assert abs(ours / sum(UNIFORM[n, t]) - 1.0) > 0.01


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=["kappa t", "kappa t^2"])
def test_with_the_right_outputs_ours_is_the_entropy_and_theirs_more(schedule):
    """One token: 1.02965 and 1.31475 nats, the latter by quadrature of their own code too."""
    process, p = Uniform(3, schedule, "mixture"), exact.P_V3L1
    outputs = exact.uniform_outputs(process, p)
    ours = p @ exact.uniform_integral(UniformELBO(), outputs, process, exact.sequences(3, 1))
    assert ours == pytest.approx(-p @ np.log(p), rel=1e-6)
    theirs, (times, parts) = 0.0, exact.quadrature(nodes=60, power=3)
    kept, slope = schedule.alpha(jnp.asarray(times)), schedule.dalpha(jnp.asarray(times))
    for alpha, change, part in zip(np.asarray(kept), np.asarray(slope), parts, strict=True):
        law = alpha * np.eye(3) + (1.0 - alpha) / 3.0
        mu, weight = p[:, None] * law / (p @ law), -change / (1.0 - alpha)
        nats = [[their_nats(weight, mu[:, z], z, x) for z in range(3)] for x in range(3)]
        theirs += part * p @ (law * nats).sum(axis=1)
    assert theirs == pytest.approx(1.31475, abs=1e-5)


def test_cross_entropy_is_their_mean_times_the_length():
    found = loss_at(CrossEntropy(), Uniform(3, Linear(), "mixture"), Z, 0.5)
    assert found == pytest.approx(3.0 * CROSS_ENTROPY, rel=1e-9)


def test_any_order_without_weights_is_twice_the_sum_over_masks():
    """Their cross-entropy at masks, kappa = t: integrated over t and every pattern of masks."""
    process, denoiser = Masking(3), exact.denoiser_of(exact.table_logits(3, 2))
    found = exact.any_order(denoiser, process, exact.sequences(3, 2), AnyOrder(weight_power=0.0))

    def unweighted(batch, z, t):
        return masked_nats(denoiser, process, batch, z, t)

    times, parts = exact.quadrature(nodes=8)
    x = exact.sequences(3, 2)
    theirs = exact.expected(unweighted, 3, x, times, times) @ parts
    np.testing.assert_allclose(found, 2.0 * theirs, rtol=1e-9)


@pytest.mark.parametrize("n", [1, 2])
def test_their_step_on_masks_is_that_of_tau_leaping(n):
    process, s, t = Masking(3, SCHEDULES[n]), jnp.asarray(0.25), jnp.asarray(0.5)

    def gap(step) -> float:
        """The largest difference of the laws, in standard errors."""
        jump = float(step.reveal_probability(process, s, t))
        law = np.append(jump * softmax(LOGITS[0, :3]), 1.0 - jump)
        return np.max(np.abs(law - FROM_MASK[n]) / np.sqrt(law * (1.0 - law) / DRAWS))

    assert gap(TauLeaping()) < 4.0 < gap(TauLeaping("reject"))
    assert gap(Euler()) > 4.0


@pytest.mark.parametrize("n", [1, 2])
def test_their_step_on_uniform_noise_moves_less_than_tau_leaping(n):
    """A symbol y is reached with probability mu_y (1 - exp(-h weight))."""
    mu, h = softmax(LOGITS[0, :3]), 0.25
    law = mu * -np.expm1(-h * weight_of(n, 0.5))
    law[0] = 1.0 - law[1:].sum()
    assert np.max(np.abs(law - FROM_TOKEN[n]) / np.sqrt(law * (1.0 - law) / DRAWS)) < 4.0
    process, outputs = Uniform(3, SCHEDULES[n], "mixture"), jnp.asarray(LOGITS[None, :1, :3])
    rates = process.reverse_rates(outputs, jnp.zeros((1, 1), int), jnp.asarray([0.5]))
    ours = float(TauLeaping().jump_probability(h * jnp.sum(rates)))
    assert ours > 1.0 - law[0] + 0.01


@pytest.mark.parametrize("n", [1, 2])
def test_the_corrector_on_masks_has_the_rates_of_their_divergence_free_term(monkeypatch, n):
    """Of the mask theirs are twice the predictor's weight, of a token sigma alone."""
    chances = []
    monkeypatch.setattr(reveal, "exchange", lambda *a, **k: chances.extend(map(float, a[4])))
    small = 1e-7
    step, process = PredictorCorrector(size=1.0), Masking(3, SCHEDULES[n])
    step.correct(None, process, exact.chain_of([[3]]), jnp.asarray(0.5), small, None)
    remasks, reveals = np.array(chances) / small
    stayed = np.array(STAYED[n])
    theirs = -np.log(stayed) / 0.25
    error = np.sqrt((1.0 - stayed) / (stayed * DRAWS)) / 0.25
    assert np.all(np.abs([reveals + weight_of(n, 0.5), remasks] - theirs) < 4.0 * error)
