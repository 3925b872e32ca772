"""Generators of continuous-time noise and their spectra, in float64: docs/equations.md, Rates."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.protocols import Array

# Sums over a spectrum leave about this many units of rounding in an entry of exp(s R).
NOISE_UNITS = 4.0


class Kernel(NamedTuple):
    """A generator R with spectral gap 1 and what its exponential is made of.

    generator   [S, S], R[x, y] = rate from x to y, rows sum to 0
    stationary  pi [S], the law that noise ends in
    rates       lambda [K] > 0, the eigenvalues of -R besides 0, smallest first; [1.0] alone
                where R = 1 pi^T - I, which has one rate for everything
    right, left U [S, K] and W [K, S]: exp(s R) = 1 pi^T + U exp(-lambda s) W; None where R =
                1 pi^T - I, whose exponential needs no sum
    """

    generator: np.ndarray
    stationary: np.ndarray
    rates: np.ndarray
    right: np.ndarray | None
    left: np.ndarray | None

    def exponential(self, time: float) -> np.ndarray:
        """exp(time R) [S, S] in float64; time may be inf."""
        size = len(self.stationary)
        if self.right is None:
            return np.exp(-time) * np.eye(size) - np.expm1(-time) * self.stationary
        change = (self.right * np.expm1(-self.rates * time)) @ self.left
        return np.maximum(np.eye(size) + change, 0.0)

    def exponentials(self, time: Array) -> tuple[Array, Array]:
        """(exp(time R) [B, S, S], the size of its rounding errors [B, 1, 1]) in time's dtype."""
        time = time[:, None, None]
        eye = jnp.eye(len(self.stationary), dtype=time.dtype)
        stationary = jnp.asarray(self.stationary, time.dtype)
        if self.right is None:
            return jnp.exp(-time) * eye - jnp.expm1(-time) * stationary, jnp.zeros_like(time)
        rates, right, left = (
            jnp.asarray(part, time.dtype) for part in (self.rates, self.right, self.left)
        )
        # From the nearer end, so that what is small has digits: I at first, 1 pi^T at last.
        early = time < 1.0
        decay = jnp.where(early, jnp.expm1(-rates * time), jnp.exp(-rates * time))
        change = jnp.matmul(right * decay, left, precision=jax.lax.Precision.HIGHEST)
        largest = jnp.max(jnp.abs(decay), axis=-1, keepdims=True)
        noise = NOISE_UNITS * jnp.finfo(time.dtype).eps * largest
        return jnp.where(early, eye, stationary) + change, noise


def _redraw(stationary: np.ndarray) -> Kernel:
    """R = 1 pi^T - I: a symbol is redrawn from pi at rate 1."""
    generator = stationary[None, :] - np.eye(len(stationary))
    return Kernel(generator, stationary, np.ones(1), None, None)


@functools.lru_cache
def uniform(vocab_size: int) -> Kernel:
    """R = 1 1^T / V - I: SEDD-uniform, D3PM-uniform in continuous time."""
    return _redraw(np.full(vocab_size, 1.0 / vocab_size))


@functools.lru_cache
def absorbing(vocab_size: int) -> Kernel:
    """Every symbol becomes the mask V at rate 1; the mask stays."""
    return _redraw(np.eye(vocab_size + 1)[vocab_size])


@functools.lru_cache
def gaussian(vocab_size: int, rate_width: float, stationary_width: float) -> Kernel:
    """Symbols on a line move to near ones and end in a discretised Gaussian.

    After the Gaussian rates of tauLDR (arXiv:2205.14987, appendix):

        R[x, y] = c exp(-(x - y)^2 / (2 rate_width^2)) sqrt(pi_y / pi_x),   x != y,
        pi_x prop exp(-(x - centre)^2 / (2 (stationary_width V)^2)),

    so that pi_x R[x, y] is symmetric, and sqrt(pi) R / sqrt(pi) is a symmetric
    matrix with real eigenvalues. c makes the smallest rate 1.
    """
    symbol = np.arange(vocab_size)
    away = (symbol - symbol.mean()) / (stationary_width * vocab_size)
    stationary = np.exp(-0.5 * away**2)
    stationary /= stationary.sum()
    root = np.sqrt(stationary)
    near = np.exp(-0.5 * ((symbol[:, None] - symbol) / rate_width) ** 2)
    np.fill_diagonal(near, 0.0)
    symmetric = near - np.diag(near @ root / root)
    values, vectors = np.linalg.eigh(symmetric)
    # The last is 0, of the vector root; the one before it is the gap.
    rates, vectors = -values[-2::-1], vectors[:, -2::-1]
    generator = symmetric * root / root[:, None] / rates[0]
    right, left = vectors / root[:, None], (vectors * root[:, None]).T
    return Kernel(generator, stationary, rates / rates[0], right, left)
