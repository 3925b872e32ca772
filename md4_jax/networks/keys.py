"""Keys and values for queries: gathered from all positions, with heads repeated (GQA)."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, CONTEXT, constrain, splits_sequences


def for_queries(x_BxLxHxDh: Array, heads: int) -> Array:
    """Returns keys or values of all positions, repeated to this number of heads.

    If a sequence is split over devices, each device gathers all positions for its own queries.
    """
    return repeated(everywhere(x_BxLxHxDh) if splits_sequences() else x_BxLxHxDh, heads)


def repeated(x_BxLxHxDh: Array, heads: int) -> Array:
    """Repeats heads of keys or values up to the number of heads of queries."""
    own = x_BxLxHxDh.shape[2]
    return x_BxLxHxDh if own == heads else jnp.repeat(x_BxLxHxDh, heads // own, axis=2)


@jax.custom_vjp
def everywhere(x_BxLxHxDh: Array) -> Array:
    """Gathers all positions on each device; the backward pass sums the gradients of each part."""
    return constrain(x_BxLxHxDh, BATCH_AXES, None, "tensor", None)


everywhere.defvjp(
    lambda x: (everywhere(x), None),
    lambda _, slope: (constrain(slope, BATCH_AXES, CONTEXT, "tensor", None),),
)
