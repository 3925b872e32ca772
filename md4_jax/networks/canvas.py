"""Attention masks of canvases and of the text before them, and a cache of that text.

A canvas is a block of noisy tokens, which attend to one another and to all tokens of the text
before it. Attention within the text is causal. `reach` is the window size of a local layer, its own
token included; None: no window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array


class ContextCache(NamedTuple):
    """Ring buffers of keys, after rotation, and values of the last W tokens, for each layer.

    keys, values  [B, W, H, Dh] of each layer; token p is at p mod W
    count         int32 [], number of tokens so far
    begin         int32 [B], the first token of each text; earlier ones are masked out
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    count: Array
    begin: Array

    def append(self, own: list[tuple[Array, Array]]) -> "ContextCache":
        """Overwrites the oldest entries by a block's keys and values, [B, P, H, Dh] per layer.

        P must divide W and count.
        """
        at, length = self.count % self.keys[0].shape[1], own[0][0].shape[1]
        put = jax.lax.dynamic_update_slice_in_dim
        keys, values = (
            tuple(put(old, new, at, axis=1) for old, new in zip(olds, news, strict=True))
            for olds, news in zip((self.keys, self.values), zip(*own, strict=True), strict=True)
        )
        return ContextCache(keys, values, self.count + length, self.begin)

    def places(self, length: int) -> Array:
        """Returns the positions of the next `length` tokens: int32 [1, length]."""
        return (self.count + jnp.arange(length))[None]

    def mask(self, length: int, reach: int | None, *, reads: bool) -> Array:
        """Returns which keys of the cache, then own keys, the next tokens see: [B, 1, P, W + P].

        reads  whether the next tokens are text (causal attention), not a canvas
        """
        window = self.keys[0].shape[1]
        age = 1 + (self.count - 1 - jnp.arange(window)) % window
        held = jnp.where(age <= self.count, self.count - age, -1)
        asking, own = self.places(length)[0], self.count + jnp.arange(length)
        seen = jnp.broadcast_to(held >= 0, (length, window))
        among = jnp.ones((length, length), bool)
        if reads:
            among = jnp.tril(among)
        if reach is not None:
            first = asking if reads else jnp.full_like(asking, self.count)
            seen &= first[:, None] - held < reach
            among &= (asking[:, None] - own < reach) | (not reads)
        begin = self.begin[:, None, None]
        itself = jnp.eye(length, dtype=bool)  # so that what is no part of the text sees something
        both = [seen & (held >= begin), among & (own >= begin) | itself]
        return jnp.concatenate(both, axis=-1)[:, None]


def empty_cache(shapes: list[tuple[int, int]], rows: int, window: int, dtype) -> ContextCache:
    """Returns an empty cache; shapes: (heads, features of a head) of each layer."""
    arrays = tuple(jnp.zeros((rows, window, *shape), dtype) for shape in shapes)
    return ContextCache(arrays, arrays, jnp.int32(0), jnp.zeros(rows, jnp.int32))


def text_mask(length: int, reach: int | None, segments: Array | None) -> Array:
    """Returns which tokens each token of a text sees, bool [B or 1, 1, L, L]."""
    asking, asked = jnp.arange(length)[:, None], jnp.arange(length)
    mask = asked <= asking
    if reach is not None:
        mask &= asking - asked < reach
    return _within(mask[None], segments)


def canvas_mask(
    length: int, block: int, reach: int | None, segments: Array | None, begin: Array | None
) -> Array:
    """Returns which tokens of the text, then of the canvases, each token of a canvas sees.

    The result is bool [B or 1, 1, L, 2 L]. Canvases have `block` tokens each; the first one begins
    at position `begin` [B], or at 0.
    """
    first = jnp.zeros(1, jnp.int32) if begin is None else begin
    places = jnp.arange(length)
    of = (places - first[:, None]) // block
    text = of[:, None] < of[..., None]
    if reach is not None:
        starts = first[:, None] + of * block
        text &= starts[..., None] - places < reach
    own = of[:, None] == of[..., None]
    return jnp.concatenate([_within(part, segments) for part in (text, own)], axis=-1)


def _within(mask: Array, segments: Array | None) -> Array:
    if segments is not None:
        mask &= segments[:, :, None] == segments[:, None, :]
    return mask[:, None]
