"""Bounds on images of 2 x 2 pixels with 3 levels, by enumeration of images, masks and orders."""

import functools
import itertools

import exact
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.processes.masking import Masking
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform

SHAPE, LEVELS = (2, 2, 1), 3
LENGTH = int(np.prod(SHAPE))
# Neighbouring pixels are alike: p(x) prop exp(-sum of differences), and bright images are rarer.
IMAGES = exact.sequences(LEVELS, LENGTH).reshape(-1, 2, 2)
ENERGY = sum(np.abs(np.diff(IMAGES, axis=axis)).sum(axis=(1, 2)) for axis in (1, 2))
P = np.exp(-1.0 * ENERGY - 0.2 * IMAGES.sum(axis=(1, 2)))
P = (P / P.sum()).reshape((LEVELS,) * LENGTH)
# The darkest, the brightest, and two with an edge.
X = np.array([[0, 0, 0, 0], [2, 2, 2, 2], [0, 2, 0, 2], [1, 0, 2, 1]])
WRONG = special.log_softmax(exact.table_logits(LEVELS, LENGTH), axis=-1)


@functools.cache
def perfect():
    return exact.perfect_logits(P)


def over_orders(logits: np.ndarray) -> np.ndarray:
    """The mean over the 24 orders of -log prod_n mu(x_n | pixels before it), from log mu: [X]."""
    digits = (LEVELS + 1) ** np.arange(LENGTH)[::-1]
    total = np.zeros(len(X))
    for order in itertools.permutations(range(LENGTH)):
        z = np.full_like(X, LEVELS)
        for n in order:
            total -= logits[z @ digits, n, X[:, n]]
            z[:, n] = X[:, n]
    return total / 24


def of_score(denoiser, process):
    """Of the score mu alpha / (1 - alpha), whose outputs are log mu + log V."""
    t, weight = exact.quadrature()
    scores = exact.of_outputs(lambda z, t: denoiser(z, t) + np.log(LEVELS))
    loss_at = exact.bind(ScoreEntropy(), scores, process)
    masked = process.schedule.one_minus_alpha(jnp.asarray(t))
    return exact.expected(loss_at, process.mask_id, X, t, masked) @ weight


WAYS = {
    "md4": lambda denoiser, process: exact.continuous(denoiser, process, X),
    "any_order": lambda denoiser, process: exact.any_order(denoiser, process, X),
    "score_entropy": of_score,
}


@pytest.mark.parametrize("way", WAYS)
def test_masks_cost_the_mean_over_orders_of_pixels(way, x64):
    """Of a wrong denoiser; and the exact one costs -log p(x), by Bayes over all 81 images."""
    process = Masking(LEVELS)
    found = WAYS[way](exact.denoiser_of(WRONG), process)
    np.testing.assert_allclose(found, over_orders(WRONG), rtol=1e-9)
    found = WAYS[way](exact.denoiser_of(perfect()), process)
    np.testing.assert_allclose(found, -np.log(P[tuple(X.T)]), rtol=1e-9)


@pytest.mark.parametrize("form", ["joint", "mixture"])
def test_uniform_noise_costs_minus_log_p_with_the_exact_denoiser(form, x64):
    process = Uniform(LEVELS, parametrisation=form)
    denoiser = exact.uniform_outputs(process, P)
    found = exact.uniform_integral(UniformELBO(), denoiser, process, X[2:])
    np.testing.assert_allclose(found, -np.log(P[tuple(X[2:].T)]), rtol=1e-6)


def test_the_gaussian_steps_of_d3pm_spread_as_a_gaussian(x64):
    """256 levels, the first 50 of 1000 steps with beta from 1e-4 to 0.02.

    A step's variance is (V - 1)^2 beta / 8; far from the borders they add up.
    """
    beta = np.linspace(1e-4, 0.02, 1000)[:50]
    process = Transition(256, timesteps=50, beta_start=beta[0], beta_end=beta[-1])
    products = process._tables.products
    away = (np.arange(256) - 128.0) ** 2
    for step in (1, 10, 50):
        variance = products[step, 128] @ away
        np.testing.assert_allclose(variance, (255**2 / 8 * beta[:step]).sum(), rtol=1e-4)


@pytest.mark.slow
def test_a_thousand_gaussian_steps_leave_little_of_an_image():
    process = Transition(256)
    np.testing.assert_allclose(process._tables.products.sum(axis=2), 1.0, rtol=1e-5)
    assert 0 < process.prior_nats(jnp.arange(256)).max() < 1e-5
