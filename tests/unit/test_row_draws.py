"""Draws from rows of matrices: their law, and what has no probability."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from md4_jax.processes.draws import _passed, _scaled, draw_rows


@pytest.mark.parametrize("states", [2, 5, 16, 17])
def test_symbols_have_the_law_of_their_row(states):
    """Chi-squared of 40,000 draws from each of two rows of two matrices, p > 1e-4."""
    law = np.random.default_rng(states).dirichlet(np.ones(states), size=(2, 3))
    law[:, :, 1] = 0.0
    law /= law.sum(axis=-1, keepdims=True)
    x = np.repeat([[0, 2], [2, 1]], 40_000, axis=1)
    drawn = np.asarray(jax.jit(draw_rows)(exact.keys_for(0, 2), jnp.asarray(law), jnp.asarray(x)))
    assert drawn.dtype == np.int32
    for b in range(2):
        for row in set(x[b]):
            found = np.bincount(drawn[b, x[b] == row], minlength=states)
            assert found[1] == 0 and found.sum() == 40_000
            possible = law[b, row] > 0
            if possible.sum() > 1:
                expected = 40_000 * law[b, row][possible]
                assert stats.chisquare(found[possible], expected).pvalue > 1e-4


def test_a_number_of_32_bits_is_scaled_without_overflow():
    """floor(bits total / 2^32), against whole numbers of Python."""
    rng = np.random.default_rng(0)
    bits = np.concatenate([rng.integers(0, 2**32, 1000), [0, 2**32 - 1, 2**32 - 1, 2**16]])
    total = np.concatenate([rng.integers(1, 2**32, 1000), [7, 2**32 - 1, 1, 2**31]])
    pairs = zip(bits, total, strict=True)
    found = _scaled(jnp.asarray(bits, jnp.uint32), jnp.asarray(total, jnp.uint32))
    np.testing.assert_array_equal(found, [int(b) * int(t) // 2**32 for b, t in pairs])


def test_the_ends_of_symbols():
    """A number on the sum before a symbol is its own; symbols without a share are passed."""
    ends = jnp.asarray([[[3, 3, 5, 9, 9]]], jnp.uint32)
    numbers = jnp.arange(9, dtype=jnp.uint32)[None]
    found = _passed(ends, jnp.zeros((1, 9), jnp.int32), numbers)
    np.testing.assert_array_equal(found, [[0, 0, 0, 2, 2, 3, 3, 3, 3]])
