"""Laws of what Duo's curriculum draws, beside draws of all V normal variables; seeds are fixed."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from md4_jax.processes import duality

N, VOCAB, GAMMA = 20_000, 5, 0.5


def leaders(count):
    x = jnp.full((N, 1), 3)
    symbols, heights = jax.jit(duality.leaders, static_argnums=(3, 4))(
        exact.keys_for(0, N), x, jnp.full(N, GAMMA), VOCAB, count
    )
    return np.asarray(symbols)[:, 0], np.asarray(heights, np.float64)[:, 0]


def direct():
    """Heights of x and of the others in falling order, from all normal variables."""
    draws = np.random.default_rng(1).normal(size=(N, VOCAB))
    return draws[:, 0] + np.exp(-0.5 * GAMMA), -np.sort(-draws[:, 1:], axis=-1)


def test_the_largest_entry_has_the_law_of_uniform_noise():
    """Chi-squared, n = 20,000, p > 1e-4."""
    symbols, heights = leaders(2)
    z = symbols[np.arange(N), heights.argmax(axis=-1)]
    alpha = float(duality.level(jnp.float32(GAMMA), VOCAB).alpha)
    law = alpha * (np.arange(VOCAB) == 3) + (1.0 - alpha) / VOCAB
    assert stats.chisquare(np.bincount(z, minlength=VOCAB), N * law).pvalue > 1e-4


def test_each_other_symbol_is_as_likely_at_every_rank():
    """Chi-squared of the pairs (first, second), n = 20,000, p > 1e-4."""
    symbols, _ = leaders(2)
    pairs = np.bincount(symbols[:, 1] * VOCAB + symbols[:, 2], minlength=VOCAB**2)
    possible = [a != b and 3 not in (a, b) for a in range(VOCAB) for b in range(VOCAB)]
    assert pairs[np.logical_not(possible)].sum() == 0
    assert stats.chisquare(pairs[possible]).pvalue > 1e-4


def test_heights_have_the_law_of_order_statistics():
    """Kolmogorov-Smirnov of each rank, of the gaps, and of the lead of x; p > 1e-4 each."""
    _, heights = leaders(4)
    own, others = direct()
    pairs = [(heights[:, 0], own), (heights[:, 0] - heights[:, 1], own - others[:, 0])]
    pairs += [(heights[:, 1 + k], others[:, k]) for k in range(4)]
    pairs += [
        (heights[:, 1 + k] - heights[:, 2 + k], others[:, k] - others[:, k + 1]) for k in (0, 2)
    ]
    for found, expected in pairs:
        assert stats.ks_2samp(found, expected).pvalue > 1e-4
