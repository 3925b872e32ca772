"""Parts of a text that see all others as they were before the part was drawn."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Blockwise


class Whole(NamedTuple):
    """A pass over whole texts before one of their blocks is drawn.

    cache  keys and values of all tokens
    h      [B, P, D], features of the block
    z      int32 [B, P], symbols of the block
    """

    cache: Any
    h: Array
    z: Array


def read_whole(blocks: Blockwise, z: Array, begin: Array, size: int) -> Whole:
    """Reads whole texts z [B, N] before the block of `size` tokens from `begin` on is drawn."""
    h, cache = blocks.around(z, jnp.zeros(len(z)), 0, None)
    part = (jax.lax.dynamic_slice_in_dim(x, begin, size, axis=1) for x in (h, z))
    return Whole(cache, *part)


def among(
    blocks: Blockwise, z: Array, t: Array, begin: Array, whole: Whole, *, known: bool
) -> Array:
    """Returns the features [B, P, D] of a block with symbols z, among the other tokens as read.

    The network must have no time input: features of unchanged symbols are those of the whole text.

    known  whether the first token of the block is known, so that its features do not matter
    """
    more = (True,) if known else ()

    def again() -> Array:
        return blocks.around(z, t, begin, whole.cache, *more)[0]

    return jax.lax.cond(jnp.all(z == whole.z), lambda: whole.h, again)
