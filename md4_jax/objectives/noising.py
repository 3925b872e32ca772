"""Draws of z_t for losses, and the tokens that stay clean."""

import jax.numpy as jnp

from md4_jax.protocols import Array, Batch, Process

# Smallest time of a draw. It replaces u = 0, where the weight 1/t times no masks is inf * 0.
# u = 0 represents the float32 cell [0, 2^-23), so no part of the integral is omitted.
SMALLEST_TIME = 2.0**-24


def noised(process: Process, batch: Batch, u: Array, keys: Array) -> tuple[Array, Array]:
    """Draws (z_t, t) at t = u, at least SMALLEST_TIME; tokens that do not count stay clean."""
    t = jnp.maximum(u, SMALLEST_TIME)
    return prompted(batch, process.corrupt(keys, batch.tokens, t)), t


def prompted(batch: Batch, z: Array) -> Array:
    """Returns z with clean tokens at the positions that do not count."""
    return jnp.where(batch.loss_mask, z, batch.tokens)


def masked(process: Process, z: Array) -> Array:
    """Returns the fraction of masked positions [B], for the log."""
    return jnp.mean(process.is_noise(z), axis=1, dtype=jnp.float32)
