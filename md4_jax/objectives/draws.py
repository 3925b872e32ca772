"""Random draws of a batch: one noise level and one key a sequence."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array


def draws(seed: int, step: Array, batch_size: int) -> tuple[Array, Array]:
    """(u [B], keys [B]) of a step: they follow (seed, step, row of the global batch) alone."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    offset = jax.random.uniform(jax.random.fold_in(key, 0))
    u = antithetic_times(offset, batch_size)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.fold_in(key, 1), jnp.arange(batch_size)
    )
    return u, keys


def antithetic_times(offset: Array, count: int) -> Array:
    """count numbers in [0, 1), each uniform when the offset [] is, spread as evenly as can be.

    For an even count neighbours are mirror images, u_{2j} = (offset + 2j / count) mod 1 and
    u_{2j+1} = 1 - u_{2j}: the mean of what is linear in u has no noise, and of what is smooth
    hardly any. So the masks of every even number of neighbours add up to half of their
    tokens. For an odd count u_j = (offset + j / count) mod 1.
    """
    if count % 2:
        return (offset + jnp.arange(count) / count) % 1.0
    below_one = 1.0 - 2.0**-24
    half = jnp.minimum((offset + jnp.arange(count // 2) / (count // 2)) % 1.0, below_one)
    return jnp.stack([half, below_one - half], axis=1).reshape(count)
