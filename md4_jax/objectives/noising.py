"""Draws of z_t for losses, the tokens that stay clean, and the weight of a mask."""

import jax.numpy as jnp

from md4_jax.protocols import Array, Batch, Process, Schedule

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


def masked_weight(schedule: Schedule, t: Array) -> Array:
    """Returns -alpha'_t / (1 - alpha_t), the weight of a masked token's cross-entropy, like t.

    0 where 1 - alpha is too small for a float: then no token is masked.
    """
    noise = schedule.one_minus_alpha(t)
    return jnp.where(noise > 0, -schedule.dalpha(t) / jnp.where(noise > 0, noise, 1.0), 0.0)
