"""The draws of the masking process, each with its n and its tolerance in standard errors."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from md4_jax.objectives.draws import draws
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine, Linear

pytestmark = pytest.mark.slow

N = 20_000


@pytest.mark.parametrize("t, masked", [(0.2, 0.30901699), (0.7, 0.89100652)])
def test_each_token_is_masked_with_probability_one_minus_alpha(t, masked):
    """1 - alpha = sin(pi t / 2); 2^3 patterns, independent: chi-squared, n = 20,000, p > 1e-4."""
    process = Masking(2, Cosine())
    x = np.tile(np.array([[0, 1, 1]]), (N, 1))
    z = jax.jit(process.corrupt)(exact.keys_for(0, N), x, jnp.full(N, t))
    pattern = np.asarray((z == 2) @ np.array([4, 2, 1]))
    counts = np.bincount(pattern, minlength=8)
    expected = np.where(exact.patterns(3), masked, 1.0 - masked).prod(axis=1) * N
    assert stats.chisquare(counts, expected).pvalue > 1e-4
    assert (np.where(z == 2, x, z) == x).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_exact_masks_are_uniform_subsets_and_their_alpha_is_beta(count):
    """L = 4; n = 20,000: subsets by chi-squared, 1 - alpha by Kolmogorov-Smirnov, p > 1e-4.

    The two are independent: the mean of 1 - alpha is the same on every subset,
    within 5 standard errors.
    """
    x = np.zeros((N, 4), np.int32)
    mask = jax.jit(Masking(2).mask_exactly)
    z, masked = mask(exact.keys_for(count, N), x, jnp.full(N, count), x == 0)
    pattern = np.asarray((z == 2) @ np.array([8, 4, 2, 1]))
    kinds, counts = np.unique(pattern, return_counts=True)
    assert len(kinds) == {1: 4, 2: 6, 3: 4}[count]
    assert stats.chisquare(counts).pvalue > 1e-4
    law = stats.beta(count, 4 - count + 1)
    assert stats.kstest(masked, law.cdf).pvalue > 1e-4
    for kind, size in zip(kinds, counts, strict=True):
        mean = np.asarray(masked)[pattern == kind].mean()
        assert abs(mean - law.mean()) < 5 * law.std() / np.sqrt(size)


@pytest.mark.parametrize("t", [0.2, 0.7])
def test_m14_what_was_masked_has_a_law_that_does_not_depend_on_time(t):
    """P(x_0 | z = (m, 1)) = (1, 5, 1) / 7 at alpha = 0.8 and 0.3: chi-squared, n = 40,000."""
    count, rng = 40_000, np.random.default_rng(0)
    x = exact.sequences(3, 2)[rng.choice(9, count, p=exact.P_V3L2.ravel())]
    z = jax.jit(Masking(3, Linear()).corrupt)(exact.keys_for(5, count), x, jnp.full(count, t))
    seen = np.asarray((z == np.array([3, 1])).all(axis=1))
    counts = np.bincount(x[seen, 0], minlength=3)
    expected = np.array([0.14285714286, 0.71428571429, 0.14285714286]) * counts.sum()
    assert counts.sum() > 1500 and stats.chisquare(counts, expected).pvalue > 1e-4


def test_the_offsets_of_the_strata_are_uniform_over_steps():
    """2,000 steps: u_0 by Kolmogorov-Smirnov p > 1e-4, each row's u as well."""
    u = jax.jit(jax.vmap(lambda step: draws(7, step, 4)[0]))(jnp.arange(2000))
    assert (np.sort(np.floor(np.asarray(u)[:, ::2] * 2), axis=1) == np.arange(2)).all()
    for row in np.asarray(u).T:
        assert stats.kstest(row, "uniform").pvalue > 1e-4


def test_noise_of_different_rows_and_steps_is_uncorrelated():
    """1,000 steps x 8 rows: every correlation of two rows within 5 / sqrt(1000)."""

    def noise(step):
        _, keys = draws(7, step, 8)
        return jax.vmap(jax.random.uniform)(keys)

    found = np.asarray(jax.jit(jax.vmap(noise))(jnp.arange(1000)))
    between = np.corrcoef(found.T) - np.eye(8)
    along = np.corrcoef(found[1:].ravel(), found[:-1].ravel())[0, 1]
    assert np.abs(between).max() < 5 / np.sqrt(1000) and abs(along) < 5 / np.sqrt(8000)
    assert stats.kstest(found.ravel(), "uniform").pvalue > 1e-4
