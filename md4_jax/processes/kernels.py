"""Generators of continuous-time noise and their spectra, in float64: docs/families/tauldr.md."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.protocols import Array

# Rounding error of an entry of exp(s R), in units of the float's epsilon.
NOISE_UNITS = 4.0


class Kernel(NamedTuple):
    """Generator R with spectral gap 1, and its spectrum.

    generator   [S, S], R[x, y] = rate from x to y, rows sum to 0
    stationary  pi [S], the stationary distribution
    rates       lambda [K] > 0, the eigenvalues of -R besides 0, ascending; [1.0] if R = 1 pi^T - I
    right, left U [S, K] and W [K, S] in exp(s R) = 1 pi^T + U exp(-lambda s) W; None if
                R = 1 pi^T - I, whose exponential has a closed form
    gap         spectral gap of the rates before scaling, those with c = 1 below
    """

    generator: np.ndarray
    stationary: np.ndarray
    rates: np.ndarray
    right: np.ndarray | None
    left: np.ndarray | None
    gap: float = 1.0

    def exponential(self, time: float) -> np.ndarray:
        """Computes exp(time R) [S, S] in float64; time may be inf."""
        size = len(self.stationary)
        if self.right is None:
            return np.exp(-time) * np.eye(size) - np.expm1(-time) * self.stationary
        change = (self.right * np.expm1(-self.rates * time)) @ self.left
        return np.maximum(np.eye(size) + change, 0.0)

    def exponentials(self, time: Array) -> tuple[Array, Array]:
        """Computes (exp(time R) [B, S, S], its rounding error [B, 1, 1]) in time's dtype."""
        time = time[:, None, None]
        eye = jnp.eye(len(self.stationary), dtype=time.dtype)
        stationary = jnp.asarray(self.stationary, time.dtype)
        if self.right is None:
            return jnp.exp(-time) * eye - jnp.expm1(-time) * stationary, jnp.zeros_like(time)
        rates, right, left = (
            jnp.asarray(part, time.dtype) for part in (self.rates, self.right, self.left)
        )
        # As a difference from I early and from 1 pi^T late, so that small entries are accurate.
        early = time < 1.0
        decay = jnp.where(early, jnp.expm1(-rates * time), jnp.exp(-rates * time))
        change = jnp.matmul(right * decay, left, precision=jax.lax.Precision.HIGHEST)
        largest = jnp.max(jnp.abs(decay), axis=-1, keepdims=True)
        noise = NOISE_UNITS * jnp.finfo(time.dtype).eps * largest
        return jnp.where(early, eye, stationary) + change, noise


def _redraw(stationary: np.ndarray) -> Kernel:
    """Makes R = 1 pi^T - I: a symbol is redrawn from pi at rate 1."""
    generator = stationary[None, :] - np.eye(len(stationary))
    return Kernel(generator, stationary, np.ones(1), None, None)


@functools.lru_cache
def uniform(vocab_size: int) -> Kernel:
    """Makes R = 1 1^T / V - I: SEDD-uniform, D3PM-uniform in continuous time."""
    return _redraw(np.full(vocab_size, 1.0 / vocab_size))


@functools.lru_cache
def absorbing(vocab_size: int) -> Kernel:
    """Makes R with rate 1 from every symbol to the mask V, which is absorbing."""
    return _redraw(np.eye(vocab_size + 1)[vocab_size])


@functools.lru_cache
def gaussian_target(vocab_size: int, rate_width: float, stationary_width: float) -> Kernel:
    """Makes R for ordinal symbols, mostly inward jumps, with a discretised Gaussian as pi.

    tauLDR's rates for images (arXiv:2205.14987, appendix; GaussianTargetRate in its code),
    there with rate_width = 6 and stationary_width V = 512 of V = 256 symbols:

        R[x, y] = c exp(-(|x - y| - 1)^2 / rate_width^2)   inward: from the outer of x and y,
        R[y, x] = R[x, y] pi_x / pi_y                      outward, by detailed balance,
        pi_x prop exp(-(x + 1 - V / 2)^2 / (2 (stationary_width V)^2)).

    The outer one of x < y is x where x + y < V, else y. c makes the smallest rate 1.
    """
    symbol = np.arange(vocab_size)
    stationary = _discretised(symbol + 1 - vocab_size / 2, stationary_width * vocab_size)
    x, y = symbol[:, None], symbol
    outer = np.where(x + y < vocab_size, np.minimum(x, y), np.maximum(x, y))
    inward = np.exp(-(((np.abs(x - y) - 1) / rate_width) ** 2))
    root = np.sqrt(stationary)
    return _reversible(inward * stationary[outer] / (root[:, None] * root), stationary)


@functools.lru_cache
def gaussian_symmetric(vocab_size: int, rate_width: float, stationary_width: float) -> Kernel:
    """Makes R for ordinal symbols, to near ones, with a discretised Gaussian as pi.

        R[x, y] = c exp(-(x - y)^2 / (2 rate_width^2)) sqrt(pi_y / pi_x),   x != y,
        pi_x prop exp(-(x - centre)^2 / (2 (stationary_width V)^2)).

    tauLDR's matrix with the same pi is `gaussian_target`. c makes the smallest rate 1.
    """
    symbol = np.arange(vocab_size)
    stationary = _discretised(symbol - symbol.mean(), stationary_width * vocab_size)
    near = np.exp(-0.5 * ((symbol[:, None] - symbol) / rate_width) ** 2)
    return _reversible(near, stationary)


def _discretised(away: np.ndarray, width: float) -> np.ndarray:
    """Normalises a Gaussian's density at these distances from its centre: [S]."""
    density = np.exp(-0.5 * (away / width) ** 2)
    return density / density.sum()


def _reversible(symmetric: np.ndarray, stationary: np.ndarray) -> Kernel:
    """Makes R with sqrt(pi_x) R[x, y] / sqrt(pi_y) prop symmetric[x, y] for x != y, and gap 1.

    The symmetric matrix with R's diagonal has R's eigenvalues, so that they are real.
    """
    root = np.sqrt(stationary)
    symmetric = np.where(np.eye(len(root), dtype=bool), 0.0, symmetric)
    symmetric = symmetric - np.diag(symmetric @ root / root)
    values, vectors = np.linalg.eigh(symmetric)
    # The last eigenvalue is 0, with the eigenvector root; the one before it is the gap.
    rates, vectors = -values[-2::-1], vectors[:, -2::-1]
    generator = symmetric * root / root[:, None] / rates[0]
    right, left = vectors / root[:, None], (vectors * root[:, None]).T
    return Kernel(generator, stationary, rates / rates[0], right, left, float(rates[0]))
