"""SEDD's score entropy, masks and uniform noise, against identities S01 to S10 and MD4's bound."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.objectives.token_nats import uniform_score_nats
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Clipped, Cosine, Geometric, Linear, LogLinear, Polynomial
from md4_jax.processes.uniform import PARAMETRISATIONS, Uniform
from md4_jax.protocols import Denoiser

pytestmark = pytest.mark.usefixtures("x64")

UP_TO_15 = LogLinear(float(np.exp(-1.5)))  # sigma_bar from 0 to 1.5
GPT2 = 50257


def constant(outputs) -> Denoiser:
    """A denoiser that puts out the same numbers everywhere."""
    return Denoiser(
        lambda z, t: jnp.broadcast_to(jnp.asarray(outputs), (*z.shape, len(outputs))), lambda h: h
    )


def outputs_of(c: np.ndarray, alpha: float, *, scaled: bool) -> np.ndarray:
    """What the network puts out for the score s = k c."""
    return np.log(c) + (np.log(len(c)) if scaled else np.log(alpha / (1 - alpha)))


@pytest.mark.parametrize("scaled", [True, False])
def test_s02_an_unnormalised_score_pays_a_penalty(scaled):
    """One token, alpha = 0.4, per unit of sigma, which is 1 / 0.4 with the linear schedule."""
    c, t = np.array([0.5, 0.2, 0.6]), jnp.array([0.6])
    batch, z = exact.batch_of([[2]]), jnp.array([[3]])

    def dse(c):
        denoiser = constant(outputs_of(c, 0.4, scaled=scaled))
        value = ScoreEntropy(scaled).loss_at(denoiser, Masking(3), batch, z, t)
        return float(value[0]) * 0.6 * 0.4  # masked with probability 0.6, sigma = 1 / 0.4

    assert dse(c) == pytest.approx(0.32433024951, rel=1e-9)
    assert dse(c) - dse(c / c.sum()) == pytest.approx(0.015054294213, rel=1e-9)


def normalised(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_s01_a_normalised_score_is_md4_pointwise():
    logits = normalised(exact.table_logits(3, 2))
    scores = exact.denoiser_of(logits + np.log(3))
    loss_at = exact.bind(ScoreEntropy(), scores, Masking(3))
    # Per unit of sigma, alpha = 0.5: alpha' = -1, sigma = 1 / 0.5.
    value = exact.expected(loss_at, 3, np.array([[1, 2]]), [0.5], [0.5])
    np.testing.assert_allclose(value * 0.5, 1.302248364, rtol=1e-9)


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Polynomial(2.0)])
def test_s01_the_bound_is_md4s_for_every_schedule(schedule):
    logits, x = normalised(exact.table_logits(3, 2)), exact.sequences(3, 2)
    process = Masking(3, schedule)
    scores, denoiser = exact.denoiser_of(logits + np.log(3)), exact.denoiser_of(logits)
    t, weight = exact.quadrature(nodes=60)
    masked = schedule.one_minus_alpha(jnp.asarray(t))
    score = exact.expected(exact.bind(ScoreEntropy(), scores, process), 3, x, t, masked) @ weight
    np.testing.assert_allclose(score, exact.continuous(denoiser, process, x, nodes=60), rtol=1e-9)
    assert ScoreEntropy().is_bound(process) and MD4().is_bound(process)


def test_a_part_of_the_integral_is_not_a_bound():
    assert not ScoreEntropy().is_bound(Masking(3, Clipped()))


def test_a_nearly_normalised_score_keeps_its_digits_in_float32():
    """C = 1 + 1e-6: the penalty C - 1 - log C = 5e-13 must not become rounding noise of 1e-7."""
    c = np.array([0.5, 0.3, 0.2]) * (1 + 1e-6)
    denoiser = constant(outputs_of(c, 0.5, scaled=True).astype(np.float32))
    value = ScoreEntropy().loss_at(
        denoiser, Masking(3), exact.batch_of([[0]]), jnp.array([[3]]), jnp.array([0.5])
    )
    assert float(value[0]) * 0.5 == pytest.approx(np.log(2.0), abs=3e-7)


def one_token(outputs, process, z: int, x: int, t: float = 0.0) -> float:
    """The integrand of one token over sigma."""
    schedule, time = process.schedule, jnp.array([t], outputs.dtype)
    nats = ScoreEntropy().loss_at(
        constant(outputs), process, exact.batch_of([[x]]), jnp.array([[z]]), time
    )
    return float(nats[0] / (-schedule.dalpha(time) / schedule.alpha(time))[0])


@pytest.mark.parametrize("x, value", [(2, 0.48269854028), (4, 1.3392526172)])
def test_s04_both_branches(x, value):
    """V = 5, sigma_bar = 0.7, z = 2. The entry at z is not the network's to choose."""
    process = Uniform(5, Geometric(0.7, 9.0), "score")
    outputs = jnp.array([0.0, 0.3, -0.8, 0.15, -0.2])
    assert one_token(outputs, process, 2, x) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("x", [2, 4])
def test_s04_it_is_zero_at_the_true_ratio(x):
    stay, move = np.exp(-0.7) + (1 - np.exp(-0.7)) / 5, (1 - np.exp(-0.7)) / 5
    law = np.where(np.arange(5) == x, stay, move)
    process = Uniform(5, Geometric(0.7, 9.0), "score")
    assert abs(one_token(jnp.log(jnp.asarray(law / law[2])), process, 2, x)) < 1e-14


def test_s05_models_differ_by_as_much_as_in_explicit_score_matching():
    """One token, V = 3, sigma_bar = 0.6: 1.0000454059 and 0.78382739797 up to a constant."""
    process, z = Uniform(3, Geometric(0.6, 9.0), "score"), np.arange(3)
    law = exact.noise_law(process, exact.sequences(3, 1), np.array([0.0]))[:, 0]

    def mean(phase):
        scores = np.sin(phase + 1.7 * np.arange(9).reshape(3, 3))
        values = [[one_token(jnp.asarray(scores[z]), process, z, x) for z in range(3)] for x in z]
        return exact.P_V3L1 @ (law * np.array(values)).sum(axis=1)

    assert mean(0.0) - mean(1.0) == pytest.approx(1.0000454059 - 0.78382739797, rel=1e-9)


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_s06_the_perfect_score_on_uniform_noise(parametrisation):
    """Integral over sigma_bar in [0, 1.5], and with KL(q_T || p_T) it is -log p(x)."""
    process = Uniform(3, UP_TO_15, parametrisation)
    denoiser = exact.uniform_outputs(process, exact.P_V3L2)
    x = np.array([[0, 0], [1, 0]])
    value = exact.uniform_integral(ScoreEntropy(), denoiser, process, x)
    np.testing.assert_allclose(value, [1.5238016903, 3.8224108792], rtol=1e-9)
    kl = np.array([0.085636222173, 0.089612126245])
    np.testing.assert_allclose(value + kl, -np.log([0.20, 0.02]), rtol=1e-9)


@pytest.mark.parametrize("scaled", [True, False])
def test_s06_the_perfect_score_with_masks(scaled):
    process, x = Masking(3, UP_TO_15), np.array([[0, 0], [1, 0]])
    logits = exact.perfect_logits(exact.P_V3L2)
    t, weight = exact.quadrature(nodes=60)
    masked = UP_TO_15.one_minus_alpha(jnp.asarray(t))
    log_k = jnp.log(UP_TO_15.alpha(jnp.asarray(t)) / masked)

    def loss_at(batch, z, time):
        shift = np.log(3) if scaled else jnp.interp(time, t, log_k)[:, None, None]
        score = Denoiser(lambda z, t: exact.denoiser_of(logits).features(z, t) + shift, lambda h: h)
        return ScoreEntropy(scaled).loss_at(score, process, batch, z, time)

    value = exact.expected(loss_at, 3, x, t, masked) @ weight
    np.testing.assert_allclose(value, [1.1749825411, 3.3629286726], rtol=1e-9)
    kl = np.array([0.43445537133, 0.54909433278])
    np.testing.assert_allclose(value + kl, -np.log([0.20, 0.02]), rtol=1e-9)


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_s07_its_mean_is_the_entropy_of_x_given_the_noise(parametrisation):
    process = Uniform(3, UP_TO_15, parametrisation)
    denoiser = exact.uniform_outputs(process, exact.P_V3L1)
    value = exact.uniform_integral(ScoreEntropy(), denoiser, process, exact.sequences(3, 1))
    assert exact.P_V3L1 @ value == pytest.approx(0.98599006401, rel=1e-9)


def test_s08_it_is_a_generalised_kl_divergence():
    """V = 2, s = 0.7 where the ratio is 1 / rho = 1.9, so half of D(1.9, 0.7), not D(0.7, 1.9)."""
    log_score, log_rho = jnp.log(jnp.array([1.0, 0.7])), -jnp.log(jnp.array(1.9))
    value = uniform_score_nats(log_score, jnp.array(0), jnp.array(1), log_rho)
    assert 2 * float(value) == pytest.approx(0.69720477721, rel=1e-9)


@pytest.mark.parametrize("x", [0, 7])
def test_s10_it_keeps_its_digits_in_float32(x):
    """V = 50257, sigma_bar = 1e-4: against float64, for the true ratio with an error of 1e-3."""
    process = Uniform(GPT2, Geometric(1e-4, 20.0), "score")
    log_ratio = np.full(GPT2, np.log(1.989872057e-09) if x == 0 else 0.0)
    log_ratio[7] += 0.0 if x == 0 else -np.log(1.989872057e-09)
    outputs = np.float32(log_ratio + 1e-3 * np.sin(np.arange(GPT2)))
    wide = one_token(jnp.asarray(outputs, jnp.float64), process, 0, x)
    with jax.enable_x64(False):
        narrow = one_token(jnp.asarray(outputs), process, 0, x)
    assert narrow == pytest.approx(wide, rel=1e-2) and 0.0 < wide < 1e3
    plain = one_token(jnp.zeros(GPT2, jnp.float64), process, 0, x)
    with jax.enable_x64(False):
        assert one_token(jnp.zeros(GPT2), process, 0, x) == pytest.approx(plain, rel=1e-6)


def test_scaled_has_no_meaning_on_uniform_noise():
    process, x = Uniform(3, LogLinear(), "score"), exact.sequences(3, 2)
    denoiser = exact.uniform_outputs(process, exact.P_V3L2)
    values = [
        exact.uniform_integral(ScoreEntropy(scaled), denoiser, process, x)
        for scaled in (True, False)
    ]
    np.testing.assert_array_equal(*values)
    assert ScoreEntropy().is_bound(process)
