"""Random draws of a batch: one noise level and one key for each sequence."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array


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
    function that is linear in u then has no noise, and that of a smooth one little. A pair masks
    half of its tokens on average. If count is odd, u_j = (offset + j / count) mod 1.
    """
    if count % 2:
        return (offset + jnp.arange(count) / count) % 1.0
    below_one = 1.0 - 2.0**-24
    half = jnp.minimum((offset + jnp.arange(count // 2) / (count // 2)) % 1.0, below_one)
    return jnp.stack([half, below_one - half], axis=1).reshape(count)
