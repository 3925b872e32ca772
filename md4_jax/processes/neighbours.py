"""Graph of sequences that differ in one token: docs/families/concrete_score.md."""

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import HasScore
from md4_jax.protocols import Array

# Smallest time for ratios. At 0 a logarithm may be infinite. At this time noise changes a ratio by
# at most the rounding error of float32, 2^-24.
SMALLEST_TIME = 2.0**-24


def degree(positions: int | Array, vocab_size: int) -> int | Array:
    """Returns |N(z)| = n (V - 1), where n positions may change."""
    return positions * (vocab_size - 1)


def log_ratios(process: HasScore, outputs: Array, z: Array, t: Array) -> Array:
    """Computes log p_t(z with y at n) / p_t(z) [B, L, V] from the network's outputs, t >= 0."""
    return process.log_score(outputs, z, jnp.maximum(t, SMALLEST_TIME))


def random_move(keys: Array, z: Array, vocab_size: int, movable: Array) -> tuple[Array, Array]:
    """Draws a uniform neighbour of each row of z [B, L]: (position, symbol), each int32 [B].

    It differs from z at one of the positions marked by movable, bool [B, L]; it is z if none is.
    """

    def one(key: Array, row: Array, movable: Array) -> tuple[Array, Array]:
        where, what = jax.random.split(key)
        marked = jnp.argsort(jnp.logical_not(movable), stable=True)
        n = marked[jax.random.randint(where, (), 0, jnp.maximum(1, jnp.sum(movable)), jnp.int32)]
        shift = jax.random.randint(what, (), 1, vocab_size, jnp.int32)
        shift = jnp.where(jnp.any(movable), shift, 0)
        return n, (row[n] + shift) % vocab_size

    return jax.vmap(one)(keys, z, movable)


def moved(z: Array, where: Array, symbol: Array) -> Array:
    """Returns z [B, L] with symbol[b] at position where[b]."""
    return jnp.where(jnp.arange(z.shape[1]) == where[:, None], symbol[:, None], z)
