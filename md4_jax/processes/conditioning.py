"""Time input of the network, chosen by the process: docs/processes.md."""

import jax.numpy as jnp

from md4_jax.protocols import Array, Schedule, UserError

CONDITIONINGS = ("time", "alpha", "sigma", "zero")


def check_conditioning(conditioning: str) -> None:
    """Raises UserError for an unknown conditioning."""
    if conditioning not in CONDITIONINGS:
        raise UserError(
            f"process.conditioning must be one of {', '.join(CONDITIONINGS)}, not {conditioning!r}"
        )


def signal(conditioning: str, schedule: Schedule, t: Array) -> Array:
    """Returns the time input of the network, like t: t, alpha_t, sigma_bar_t or 0.

    MD4 uses t, SEDD and Duo sigma_bar, MDLM 0.
    """
    if conditioning == "time":
        return t
    if conditioning == "zero":
        return jnp.zeros_like(t)
    return schedule.alpha(t) if conditioning == "alpha" else sigma_bar(schedule, t)


def sigma_bar(schedule: Schedule, t: Array) -> Array:
    """Computes -log alpha_t, like t, without cancellation near t = 0.

    It is finite where alpha is 0: alpha counts as at least the smallest float.
    """
    alpha, noise = schedule.alpha(t), schedule.one_minus_alpha(t)
    early = -jnp.log1p(-jnp.minimum(noise, 0.5))
    late = -jnp.log(jnp.maximum(alpha, jnp.finfo(alpha.dtype).tiny))
    return jnp.where(noise < 0.5, early, late)
