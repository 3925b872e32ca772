"""Learned position embeddings, added to those of the tokens (GPT-2)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Mixture, UserError
from md4_jax.protocols.phrases import amount


def check_length(o: Any, z: Array | Mixture, more: int = 0) -> None:
    """Raises UserError for a text with more tokens than there are positions.

    z: [B, L] or a mixture. more: number of tokens that the network reads in addition
    """
    length = (z.weights if isinstance(z, Mixture) else z).shape[1] + more
    if o.positions and length > o.positions:
        raise UserError(
            f"the network reads {amount(length, 'token')} at once, but has vectors for only "
            f"network.positions={o.positions} positions: use shorter texts (data.length, "
            "sample.length)"
        )


def places(length: int, segments: Array | None = None) -> Array:
    """Returns the position of each token in its document: int32 [L], or [B, L] with segments.

    segments  int32 [B, L]: each run of equal numbers is a document, and begins at position 0
    """
    all_L = jnp.arange(length)
    if segments is None:
        return all_L
    begins = (segments != jnp.roll(segments, 1, axis=1)) | (all_L == 0)
    return all_L - jax.lax.cummax(jnp.where(begins, all_L, 0), axis=1)


def places_of_halves(length: int, segments: Array | None) -> Array:
    """Returns the positions of a text followed by its copy, `length` tokens in total."""
    return jnp.concatenate(2 * [places(length // 2, segments)], axis=-1)


def places_from(length: int, first: Array, segments: Array | None, most: int = 0) -> Array:
    """Returns the positions of the tokens from `first` on in a text with these segments.

    first  [] or [B, 1]; tokens before a text, which are masked out, have position 0
    most   number of positions; tokens that fill the last block after the end of a text have the
           last one. 0: unlimited
    """
    index = jnp.maximum(first + jnp.arange(length), 0)
    if segments is not None:
        rows, last = len(segments), segments.shape[1] - 1
        index = jnp.broadcast_to(jnp.minimum(index, last), (rows, length))
        index = jnp.take_along_axis(places(last + 1, segments), index, axis=1)
    return jnp.minimum(index, most - 1) if most else index


def with_places(x_BxLxD: Array, table: Array, where: Callable[[int], Array]) -> Array:
    """Adds the position embedding to each token; where: length -> positions [L] or [B, L].

    The gradient of the table is summed in float32. Positions beyond the table give nan.
    """
    return x_BxLxD + jnp.take(table, where(x_BxLxD.shape[1]), axis=0).astype(x_BxLxD.dtype)
