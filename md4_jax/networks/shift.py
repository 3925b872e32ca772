"""Features one position to the right, for networks whose logits predict the next token."""

from collections.abc import Callable

import jax.numpy as jnp

from md4_jax.protocols import Array


def shifted_features(
    features: Callable[..., Array], segments: Array | None, index: Array | None
) -> Array:
    """Returns at each position the features of the one before it, h [B, L, D] or [B, P, D].

    The first position of a sequence, and of each of its segments, keeps its own.

    features  (index=) -> h of all positions or of index
    segments  int32 [B, L] or None
    index     int32 [B, P]: the positions to return; None: all
    """
    if index is not None:
        return features(index=_before(segments, index))
    h = features(index=None)
    moved = jnp.concatenate([h[:, :1], h[:, :-1]], axis=1)
    if segments is None:
        return moved
    begins = segments != jnp.roll(segments, 1, axis=1)
    return jnp.where(begins[..., None], h, moved)


def _before(segments: Array | None, index: Array) -> Array:
    """Returns the position before each of index, or itself where a segment begins."""
    before = jnp.maximum(index - 1, 0)
    if segments is None:
        return before
    own, left = (jnp.take_along_axis(segments, x, axis=1) for x in (index, before))
    return jnp.where(own == left, before, index)
