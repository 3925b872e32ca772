"""SEDD's score entropy with absorption against identities S01 and S02 and MD4's bound."""

import exact
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser
from md4_jax.schedules import Clipped, Cosine, Linear, Polynomial

pytestmark = pytest.mark.usefixtures("x64")


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
        value = ScoreEntropy(scaled).given_z(denoiser, Masking(3), batch, z, t)
        return float(value[0]) * 0.6 * 0.4  # masked with probability 0.6, sigma = 1 / 0.4

    assert dse(c) == pytest.approx(0.32433024951, rel=1e-9)
    assert dse(c) - dse(c / c.sum()) == pytest.approx(0.015054294213, rel=1e-9)


def normalised(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_s01_a_normalised_score_is_md4_pointwise():
    logits = normalised(exact.table_logits(3, 2))
    scores = exact.denoiser_of(logits + np.log(3))
    given_z = exact.bind(ScoreEntropy(), scores, Masking(3))
    # Per unit of sigma, alpha = 0.5: alpha' = -1, sigma = 1 / 0.5.
    value = exact.expected(given_z, 3, np.array([[1, 2]]), [0.5], [0.5])
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
    value = ScoreEntropy().given_z(
        denoiser, Masking(3), exact.batch_of([[0]]), jnp.array([[3]]), jnp.array([0.5])
    )
    assert float(value[0]) * 0.5 == pytest.approx(np.log(2.0), abs=3e-7)
