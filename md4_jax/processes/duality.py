"""Gaussian noise whose largest entry is distributed as uniform noise: docs/families/uniform.md."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import log_ndtr, ndtr, ndtri

from md4_jax.protocols import Array, Mixture

# Trapezoid rule for a mean over a normal variable, accurate to float32.
NODES = np.linspace(-9.0, 9.0, 289)
WEIGHTS = np.exp(-0.5 * NODES**2) / math.sqrt(2.0 * math.pi) * (NODES[1] - NODES[0])


class Level(NamedTuple):
    """Noise level of the uniform process that corresponds to a Gaussian one; each like gamma.

    alpha  probability that a token is kept
    noise  1 - alpha, without cancellation
    slope  d alpha / d gamma
    """

    alpha: Array
    noise: Array
    slope: Array


def level(gamma: Array, vocab_size: int) -> Level:
    """Returns the level of z = argmax(w), where w = a onehot(x) + s noise over V symbols.

    gamma = log(s^2 / a^2). z is x with probability P = E[Phi(a / s + e)^(V - 1)], e normal, and
    each other symbol with (1 - P) / (V - 1), so that z is distributed as with uniform noise at
    alpha = P - (1 - P) / (V - 1) (Duo, arXiv:2506.10892).
    """
    ratio, others = jnp.exp(-0.5 * gamma)[..., None], vocab_size - 1
    heights = ratio + NODES.astype(ratio.dtype)
    # log Phi; log_ndtr loses digits between 0 and 5.
    below = jnp.where(heights > 0, jnp.log1p(-ndtr(-heights)), log_ndtr(heights))
    wrong = _mean(-jnp.expm1(others * below))
    noise = wrong * vocab_size / others
    density = jnp.exp(-0.5 * heights**2) / math.sqrt(2.0 * math.pi)
    of_ratio = _mean(vocab_size * jnp.exp((others - 1) * below) * density)
    alpha = (1.0 - wrong) - wrong / others
    return Level(alpha, noise, -0.5 * ratio[..., 0] * of_ratio)


def _mean(values: Array) -> Array:
    # Not a matrix product, whose rounding would depend on the number of rows.
    return jnp.sum(values * WEIGHTS.astype(values.dtype), axis=-1)


def leaders(
    keys: Array, x: Array, gamma: Array, vocab_size: int, count: int
) -> tuple[Array, Array]:
    """Draws the entries of w / s at x and at the `count` largest other symbols, in this order.

    x [B, L], keys [B] and gamma [B] -> symbols int32 and heights float32, [B, L, 1 + count]. The
    distribution is that of V normal variables, but only these are drawn: the largest of n uniform
    variables is exp(-E / n), the next one exp(-E / n - E' / (n - 1)), with exponential E, E'.
    """
    others = vocab_size - 1
    shape = (x.shape[1], count)

    def of_row(key: Array) -> tuple[Array, Array, Array]:
        at_x, spacing, symbol = jax.random.split(key, 3)
        left = jnp.arange(others, others - count, -1)
        return (
            jax.random.normal(at_x, (x.shape[1],)),
            jnp.cumsum(jax.random.exponential(spacing, shape) / left, axis=-1),
            jax.random.randint(symbol, shape, 0, left),
        )

    at_x, depth, chosen = jax.vmap(of_row)(keys)
    own = jnp.exp(-0.5 * gamma)[:, None] + at_x
    tiny = float(jnp.finfo(jnp.float32).tiny)
    heights = -ndtri(-jnp.expm1(-jnp.maximum(depth, tiny)))
    symbols = _different(x, chosen)
    return symbols, jnp.concatenate([own[..., None], heights], axis=-1)


def trajectory(keys: Array, x: Array, gammas: Sequence[Array], vocab_size: int) -> list[Array]:
    """Draws argmax(a onehot(x) + s noise) at several levels of the same noise: int32 [B, L] each.

    x [B, L], keys [B] and each gamma [B]. Of the other symbols only the largest can ever exceed x.
    So a position has the symbol x below some noise level, and that other symbol above it.
    """
    level = jnp.full(x.shape[:1], jnp.inf)  # at which nothing is left of x
    symbols, heights = leaders(keys, x, level, vocab_size, 1)
    return [
        jnp.where(
            jnp.exp(-0.5 * gamma)[:, None] + heights[..., 0] >= heights[..., 1], x, symbols[..., 1]
        )
        for gamma in gammas
    ]


def _different(x: Array, chosen: Array) -> Array:
    """Returns x and K different other symbols, given by their ranks among those not yet chosen.

    chosen [..., K]: the ranks; the j-th lies in 0..V-2-j.
    """
    found, taken = [x], x[..., None]
    for j in range(chosen.shape[-1]):
        symbol = chosen[..., j]
        for other in jnp.moveaxis(taken, -1, 0):  # in increasing order
            symbol = symbol + (symbol >= other)
        found.append(symbol)
        taken = jnp.sort(jnp.concatenate([taken, symbol[..., None]], axis=-1), axis=-1)
    return jnp.stack(found, axis=-1).astype(jnp.int32)


def strongest(z: Array | Mixture) -> Array:
    """Returns the symbol of largest weight at each position, or z if it is not a mixture."""
    if not isinstance(z, Mixture):
        return z
    best = jnp.argmax(z.weights, axis=-1)[..., None]
    if z.symbols.ndim == 1:
        return z.symbols[best[..., 0]]
    return jnp.take_along_axis(z.symbols, best, axis=-1)[..., 0]
