"""Learned positions: a vector for each place in a text, added to that of the token (GPT-2)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Mixture, UserError


def check_length(o: Any, z: Array | Mixture, more: int = 0) -> None:
    """Raises UserError for a text with more tokens than there are positions.

    z: [B, L] or a mixture; the network reads `more` tokens besides
    """
    length = (z.weights if isinstance(z, Mixture) else z).shape[1] + more
    if o.positions and length > o.positions:
        raise UserError(
            f"the network reads {length} tokens at once, and network.positions={o.positions} has "
            "no vectors for more than that: take shorter texts (data.length, sample.length)"
        )


def places(length: int, segments: Array | None = None) -> Array:
    """Returns the place of each token in its document: int32 [L], or [B, L] with segments.

    segments  int32 [B, L]: each run of equal numbers is a document, and begins at place 0
    """
    all_L = jnp.arange(length)
    if segments is None:
        return all_L
    begins = (segments != jnp.roll(segments, 1, axis=1)) | (all_L == 0)
    return all_L - jax.lax.cummax(jnp.where(begins, all_L, 0), axis=1)


def places_of_halves(length: int, segments: Array | None) -> Array:
    """Returns the places of a text and of its copy, one behind the other in `length` tokens."""
    return jnp.concatenate(2 * [places(length // 2, segments)], axis=-1)


def places_from(length: int, first: Array, segments: Array | None, most: int = 0) -> Array:
    """Returns the places of the tokens from `first` on in a text that has these segments.

    first  [] or [B, 1]; tokens before a text, which nothing sees, have the place 0
    most   number of places; what fills the last block after the end of a text has the last one.
           0: there is no end
    """
    index = jnp.maximum(first + jnp.arange(length), 0)
    if segments is not None:
        index = jnp.take(places(segments.shape[1], segments), index, axis=1)
    return jnp.minimum(index, most - 1) if most else index


def with_places(x_BxLxD: Array, table: Array, where: Callable[[int], Array]) -> Array:
    """Adds to each token the vector of its place; where: length -> places [L] or [B, L].

    The gradient of the table is summed in float32. A place that it does not have gives nan.
    """
    return x_BxLxD + jnp.take(table, where(x_BxLxD.shape[1]), axis=0).astype(x_BxLxD.dtype)
