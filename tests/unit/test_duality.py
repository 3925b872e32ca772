"""Gaussian noise behind uniform noise: its level, and the draws of its largest entries."""

import math

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from md4_jax.processes import duality
from md4_jax.protocols import Mixture

# The published window of gamma: with 50,257 symbols alpha falls from 0.945 to 0.049 in it.
LOW, HIGH = -3.55, -1.85


def integral(of_log, gamma):
    """E[of_log(log Phi(a / s + e))] by adaptive quadrature in float64."""
    ratio = math.exp(-0.5 * gamma)

    def integrand(e):
        return stats.norm.pdf(e) * of_log(stats.norm.logcdf(ratio + e))

    return integrate.quad(integrand, -12.0, 12.0, limit=500, epsabs=1e-14)[0]


@pytest.mark.parametrize("vocab", [2, 3, 27, 50257])
@pytest.mark.parametrize("gamma", [LOW, -2.7, HIGH, 0.0])
def test_the_level_is_that_of_the_integral(vocab, gamma):
    """P(argmax = x) by quadrature, to 2e-6 of alpha (or 1e-7) and of 1 - alpha."""
    found = duality.level(jnp.float32(gamma), vocab)
    right = integral(lambda log: math.exp((vocab - 1) * log), gamma)
    wrong = integral(lambda log: -math.expm1((vocab - 1) * log), gamma)
    np.testing.assert_allclose(found.alpha, (vocab * right - 1) / (vocab - 1), rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(found.noise, wrong * vocab / (vocab - 1), rtol=2e-6)


def test_two_symbols_have_a_closed_form():
    """alpha = erf(a / (2 s)): the difference of two normal variables is one."""
    gamma = np.linspace(-4.0, 6.0, 21).astype(np.float32)
    found = duality.level(jnp.asarray(gamma), 2)
    half = 0.5 * np.exp(-0.5 * gamma.astype(np.float64))
    np.testing.assert_allclose(found.alpha, [math.erf(x) for x in half], rtol=2e-6)
    np.testing.assert_allclose(found.noise, [math.erfc(x) for x in half], rtol=1e-5)
    slope = -half * np.exp(-(half**2)) / math.sqrt(math.pi)
    np.testing.assert_allclose(found.slope, slope, rtol=1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("vocab", [3, 27, 50257])
def test_the_slope_is_the_derivative_of_alpha(vocab):
    gamma = jnp.linspace(LOW, 1.0, 30)
    found = duality.level(gamma, vocab)
    above, below = (duality.level(gamma + h, vocab).alpha for h in (1e-4, -1e-4))
    np.testing.assert_allclose(found.slope, (above - below) / 2e-4, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("vocab, count", [(2, 1), (5, 4), (5, 2), (50257, 4)])
@pytest.mark.cases(2)
def test_every_symbol_is_drawn_at_most_once(vocab, count):
    rows = 400
    x = jnp.arange(3 * rows).reshape(rows, 3) % vocab
    gamma = jnp.linspace(LOW, HIGH, rows)
    symbols, heights = duality.leaders(exact.keys_for(0, rows), x, gamma, vocab, count)
    assert symbols.shape == heights.shape == (rows, 3, count + 1)
    np.testing.assert_array_equal(symbols[..., 0], x)
    ordered = np.sort(symbols, axis=-1)
    assert (np.diff(ordered) > 0).all() and ordered.min() >= 0 and ordered.max() < vocab
    others = np.asarray(heights[..., 1:])
    assert np.isfinite(heights).all() and (np.diff(others) <= 0).all()


def test_draws_at_the_end_of_the_unit_interval_are_finite(monkeypatch):
    """An exponential variable of 0 would be an infinite height."""
    monkeypatch.setattr(jax.random, "exponential", lambda key, shape: jnp.zeros(shape))
    x = jnp.zeros((2, 3), jnp.int32)
    _, heights = duality.leaders(exact.keys_for(0, 2), x, jnp.zeros(2), 50257, 4)
    assert np.isfinite(heights).all()


def test_the_strongest_symbol_of_a_mixture():
    mixture = Mixture(jnp.array([[[4, 2], [1, 0]]]), jnp.array([[[0.2, 0.8], [0.5, 0.5]]]))
    np.testing.assert_array_equal(duality.strongest(mixture), [[2, 1]])
    z = jnp.array([[1, 2]])
    assert duality.strongest(z) is z
