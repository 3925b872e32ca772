"""Outputs of a network as the processes use them: in full precision, and at single symbols."""

import jax.numpy as jnp

from md4_jax.protocols import Array


def widened(outputs: Array) -> Array:
    """Converts outputs to float32 if they have a lower precision."""
    return outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))


def picked(values: Array, z: Array) -> Array:
    """Returns the value of the symbol at each position: [B, L, S], z [B, L] -> [B, L, 1]."""
    return jnp.take_along_axis(values, z[..., None], axis=-1)
