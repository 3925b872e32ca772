"""Exact laws of the example process whose noise is partly the mask and partly uniform."""

import itertools

import exact
import jax
import jax.numpy as jnp
import numpy as np
from extension.process import Hybrid

from md4_jax.protocols import Array, Denoiser


def single(process: Hybrid, alpha: float) -> np.ndarray:
    """q(z | x) of one token by hand, float64 [V, V + 1]."""
    size = process.vocab_size
    noise = np.full(size + 1, (1.0 - process.masked) / size)
    noise[size] = process.masked
    return alpha * np.eye(size, size + 1) + (1.0 - alpha) * noise


def perfect(process: Hybrid, p: np.ndarray) -> Denoiser:
    """log P(x_n = k | z_t) [B, L, V] for data p, by Bayes over all sequences."""
    x = exact.sequences(p.shape[0], p.ndim)
    picks = np.eye(p.shape[0])[x]

    def features(z: Array, t: Array) -> Array:
        law, rows = process.marginal(t), jnp.arange(len(z))[:, None, None]
        joint = p.ravel() * jnp.prod(law[rows, x[None], z[:, None]], axis=-1)
        return jnp.log(jnp.einsum("bx,xlk->blk", joint, picks))

    return Denoiser(features, lambda h: h)


def products(laws: np.ndarray) -> np.ndarray:
    """The products over positions of laws [Z, L, S] of single tokens: [Z, S^L]."""
    after = exact.sequences(laws.shape[2], laws.shape[1])
    each = [laws[:, n][:, after[:, n]] for n in range(laws.shape[1])]
    return np.prod(each, axis=0)


def transition(denoiser: Denoiser, process: Hybrid, s: float, t: float, length: int) -> np.ndarray:
    """p(z_s | z_t) of all sequences, float64 [Z, Z]."""
    z = jnp.asarray(exact.sequences(process.vocab_size + 1, length))
    before, now = jnp.full(len(z), s), jnp.full(len(z), t)
    logits = process.reverse_logits(denoiser(z, now), z, before, now)
    return products(np.asarray(jax.nn.softmax(logits), np.float64))


def model_law(denoiser: Denoiser, process: Hybrid, grid: np.ndarray, length: int) -> np.ndarray:
    """The law [Z] over all noised sequences of the steps of the grid, from the prior."""
    law = products(np.tile(np.asarray(process.noise, np.float64), (1, length, 1)))[0]
    for s, t in itertools.pairwise(grid[::-1]):
        law = law @ transition(denoiser, process, float(t), float(s), length)
    return law


def finished(denoiser: Denoiser, process: Hybrid, law: np.ndarray, length: int) -> np.ndarray:
    """The law over clean sequences [V^L] after what noise is left at t = 0 is taken away."""
    z, zeros = exact.sequences(process.vocab_size + 1, length), jnp.zeros(law.shape)
    logits = process.clean_logits(denoiser(jnp.asarray(z), zeros), z, zeros)
    return law @ products(np.asarray(jax.nn.softmax(logits), np.float64))
