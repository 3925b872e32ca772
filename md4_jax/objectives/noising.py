"""Draws of z_t for losses, and the tokens that stay clean."""

import jax.numpy as jnp

from md4_jax.protocols import Array, Batch, Process

# The smallest time of a draw. It replaces u = 0, where the weight 1/t and no masks give inf * 0.
# u = 0 stands for the float32 cell [0, 2^-23), so that no part of the integral is left out.
SMALLEST_TIME = 2.0**-24


def noised(process: Process, batch: Batch, u: Array, keys: Array) -> tuple[Array, Array]:
    """Draws (z_t, t) at t = u, at least SMALLEST_TIME; tokens that do not count stay clean."""
    t = jnp.maximum(u, SMALLEST_TIME)
    return prompted(batch, process.corrupt(keys, batch.tokens, t)), t


def prompted(batch: Batch, z: Array) -> Array:
    """Puts clean tokens into z at the positions that do not count."""
    return jnp.where(batch.loss_mask, z, batch.tokens)


def masked(process: Process, z: Array) -> Array:
    """Returns the fraction of positions that hold a mask [B], for the log."""
    return jnp.mean(process.is_noise(z), axis=1, dtype=jnp.float32)
