"""Keys and values as queries need them: of all positions, and for as many heads."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, CONTEXT, constrain, splits_sequences


def for_queries(x_BxLxHxDh: Array, heads: int) -> Array:
    """Returns keys or values of all positions, for this number of heads.

    Where devices hold parts of a sequence, each gathers those of the others for its own queries.
    """
    return repeated(everywhere(x_BxLxHxDh) if splits_sequences() else x_BxLxHxDh, heads)


def repeated(x_BxLxHxDh: Array, heads: int) -> Array:
    """Repeats heads of keys or values, so that there are as many as queries have."""
    own = x_BxLxHxDh.shape[2]
    return x_BxLxHxDh if own == heads else jnp.repeat(x_BxLxHxDh, heads // own, axis=2)


@jax.custom_vjp
def everywhere(x_BxLxHxDh: Array) -> Array:
    """Gathers all positions on each device; in the backward pass each sums those of its part."""
    return constrain(x_BxLxHxDh, BATCH_AXES, None, "tensor", None)


everywhere.defvjp(
    lambda x: (everywhere(x), None),
    lambda _, slope: (constrain(slope, BATCH_AXES, CONTEXT, "tensor", None),),
)
