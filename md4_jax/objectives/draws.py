"""Random draws of a batch: one noise level and one key for each sequence."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.protocols import FIXED, PARTS, Array, Batch, Denoiser, Objective


def draws(seed: int, step: Array, batch_size: int) -> tuple[Array, Array]:
    """Draws (u [B], keys [B]) of a step, determined by seed, step and row of the global batch."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    offset = jax.random.uniform(jax.random.fold_in(key, 0))
    u = antithetic_times(offset, batch_size)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.fold_in(key, 1), jnp.arange(batch_size)
    )
    return u, keys


def antithetic_times(offset: Array, count: int) -> Array:
    """Returns count evenly spread numbers in [0, 1), each uniform if the offset [] is.

    If count is even, u_{2j} = (offset + 2j / count) mod 1 and u_{2j+1} = 1 - u_{2j}. The mean of a
    linear function of u then has no variance, and that of a smooth function has little. On average
    half of the tokens of a pair are masked. If count is odd, u_j = (offset + j / count) mod 1.
    """
    if count % 2:
        return (offset + jnp.arange(count) / count) % 1.0
    below_one = 1.0 - 2.0**-24
    half = jnp.minimum((offset + jnp.arange(count // 2) / (count // 2)) % 1.0, below_one)
    return jnp.stack([half, below_one - half], axis=1).reshape(count)


def evaluation_power(objective: Objective, process: Any) -> float:
    """Returns the power p of importance sampling of times in evaluation, u = v^p.

    If the weight of the objective is about 1 / u at time u, a draw at u ~ U(0, 1) has infinite or
    very large variance. u = v^p with the weight p v^(p-1) makes it finite. p = 2 is best for masks;
    the weights of antithetic times then sum to 2. With other noise a changed token costs about
    log(1 / u) more, and p = 5 keeps the fourth moment small.
    """
    power = getattr(objective, "time_power", 1)
    if power == 1 or not _grows_like_time(process):
        return 1
    return 2 if process.shows_clean else power


def evaluation_times(objective: Objective, process: Any, v: Array) -> tuple[Array, Array | None]:
    """Maps uniforms v to (u, weight) such that the mean of weight f(u) is that of f(v).

    The weight is None if u = v: see `evaluation_power`.
    """
    power = evaluation_power(objective, process)
    return (v, None) if power == 1 else early_times(v, power)


def at_early_times(objective: Objective, power: float) -> Callable:
    """Returns the objective as a function of v instead of u, with the same mean over U(0, 1).

    u = v^power, and the integrand at u has the weight of `early_times`. An objective with a time
    for each block applies this to each of them (`block_times`).
    """
    if power == 1:
        return objective
    if getattr(objective, "block_times", False):
        return functools.partial(objective, power=power)

    def early(denoiser: Denoiser, process: Any, batch: Batch, v: Array, keys: Array):
        u, weight = early_times(v, power)
        return weighed(*objective(denoiser, process, batch, u, keys), weight)

    return early


def early_times(v: Array, power: float) -> tuple[Array, Array]:
    """Returns (u, weight) like v: u = v^p favours early times; weight = p v^(p-1) corrects it."""
    return v**power, power * v ** (power - 1)


def _grows_like_time(process: Any) -> bool:
    """Returns whether 1 - alpha is about proportional to t near 0; True without a schedule."""
    schedule = getattr(process, "schedule", None)
    if schedule is None:
        return True
    with jax.ensure_compile_time_eval():
        early, later = (schedule.one_minus_alpha(jnp.float32(t)) for t in (0.01, 0.02))
        return bool(2.0**0.5 < later / early < 2.0**1.5)


def weighed(
    nats: Array, extra: dict[str, Array], weight: Array | None
) -> tuple[Array, dict[str, Array]]:
    """Multiplies the results of an objective by the weight [B] of its times; None: no change.

    PARTS, which are not integrals over times, are not weighted, neither in the nats nor on their
    own. FIXED are not weighted either.
    """
    if weight is None:
        return nats, extra
    ends = sum(value for name, value in extra.items() if name in PARTS)
    kept = (*PARTS, *FIXED)
    weighted = {k: value if k in kept else weight * value for k, value in extra.items()}
    return weight * (nats - ends) + ends, weighted
