"""Rates and probabilities of masking and unmasking, computed from a schedule."""

import jax.numpy as jnp

from md4_jax.processes.schedules import LATEST
from md4_jax.protocols import Array, Schedule


def time_rate(schedule: Schedule, t: Array) -> Array:
    """Returns -alpha'_t / alpha_t at min(t, LATEST), like t, with alpha at least tiny."""
    t = jnp.minimum(t, LATEST)
    alpha = schedule.alpha(t)
    return -schedule.dalpha(t) / jnp.maximum(alpha, jnp.finfo(alpha.dtype).tiny)


def reveal_probability(schedule: Schedule, s: Array, t: Array) -> Array:
    """Returns P(a mask at t is clean at s) = (alpha_s - alpha_t) / (1 - alpha_t), s < t.

    It is 1 where 1 - alpha_t underflows to 0.
    """
    at_s, at_t = schedule.one_minus_alpha(s), schedule.one_minus_alpha(t)
    return jnp.where(at_t > 0, (at_t - at_s) / jnp.where(at_t > 0, at_t, 1.0), 1.0)


def reveal_rate(schedule: Schedule, t: Array) -> Array:
    """Returns -alpha'_t / (1 - alpha_t), the rate at which a mask is unmasked, like t.

    It is also the weight of a masked token's cross-entropy. It is 0 where 1 - alpha underflows: no
    token is masked there.
    """
    noise = schedule.one_minus_alpha(t)
    return jnp.where(noise > 0, -schedule.dalpha(t) / jnp.where(noise > 0, noise, 1.0), 0.0)
