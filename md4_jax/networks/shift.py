"""Shift of features one position to the right, for networks that predict the next token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Blockwise, UserError

# Options that exclude `shifted`, and why.
EXCLUDED = {
    "gaps": "the gap before a symbol is predicted from the features of that symbol",
    "causal": "the autoregressive objective already reads the token before each position",
    "tables": "their estimate of a position is added to the features of that position",
}


def check_shifted(options: Any) -> None:
    """Raises UserError for options that `network.shifted` does not support."""
    for key, why in EXCLUDED.items():
        if options.shifted and getattr(options, key):
            raise UserError(
                f"network.shifted=True needs network.{key}={type(getattr(options, key))()}: {why}"
            )


def check_context(options: Any) -> None:
    """Raises UserError for options that `network.causal_context` does not support."""
    for key in ("causal", "local_width", "tables", "gaps"):
        if options.causal_context and getattr(options, key):
            raise UserError(
                f"network.causal_context=True is for block diffusion: it needs network.{key}="
                f"{type(getattr(options, key))()}, not {getattr(options, key)}"
            )


def shifted_features(
    features: Callable[..., Array], segments: Array | None, index: Array | None
) -> Array:
    """Returns for each position the features of the previous one, h [B, L, D] or [B, P, D].

    The first position of a sequence, and of each of its segments, has its own features.

    features  (index=) -> h of all positions or of index
    segments  int32 [B, L] or None
    index     int32 [B, P]: the positions to return; None: all
    """
    if index is not None:
        return features(index=_before(segments, index))
    h = features(index=None)
    return _moved(h, h, segments)


def shifted_halves(h: Array, block: int, segments: Array | None) -> Array:
    """Shifts h of the noisy half of [noisy, clean] one position to the right: [B, L, D].

    The first position of a block has the features of the last position of the previous clean block.
    The others have those of their left neighbour in the noisy block. So the distribution of a block
    depends only on the block itself and on the clean blocks before it.

    h  [B, 2 L, D] of both halves, with blocks of `block` positions
    """
    noisy, clean = jnp.split(h, 2, axis=1)
    ends = (jnp.arange(noisy.shape[1]) + 1) % block == 0
    return _moved(noisy, jnp.where(ends[:, None], clean, noisy), segments)


def shifted_blocks(blocks: Blockwise, segments: Array | None) -> Blockwise:
    """Returns the functions of a network with a cache, with features shifted to the right.

    A cache of earlier blocks also stores the features of their last token. A cache of a whole text
    also stores its tokens, because a window is read together with the token before it, unless
    `known` says that the first token of the window is known. `features` of `blocks` must be shifted
    already.
    """
    own = remembering(blocks)

    def moved(h: Array, cache: Any) -> Array:
        last, follows = own.following(cache)
        first = jnp.where(follows, last[:, None], h[:, :1])
        return jnp.concatenate([first, h[:, :-1]], axis=1)

    def append_block(z: Array, t: Array, cache: Any) -> tuple[Array, Any]:
        h, after = own.append_block(z, t, cache)
        return moved(h, cache), after

    def around(
        z: Array, t: Array, begin: Array | int, cache: Any, known: bool = False
    ) -> tuple[Array, Any]:
        if cache is None:
            h, found = blocks.around(z, t, 0, None)
            return _moved(h, h, segments), (found, z)
        others, tokens = cache
        rows, count = z.shape
        begin = jnp.broadcast_to(jnp.asarray(begin), rows)[:, None]
        places = begin + jnp.arange(count)
        inside = jnp.where(places < 0, tokens.shape[1], places)  # not counted from the end
        text = tokens.at[jnp.arange(rows)[:, None], inside].set(z, mode="drop")
        since, last = begin - (not known), tokens.shape[1] - 1
        asked = since + jnp.arange(count + (not known))
        window = jnp.take_along_axis(text, jnp.clip(asked, 0, last), axis=1)
        h, found = blocks.around(window, t, since[:, 0], others)
        index = jnp.maximum(_before(segments, jnp.clip(places, 0, last)) - since, 0)
        return jnp.take_along_axis(h, index[..., None], axis=1), (found, text)

    return own._replace(append_block=append_block, around=blocks.around and around)


def remembering(blocks: Blockwise) -> Blockwise:
    """Returns the functions with a cache that also stores the features of its last token, [B, D].

    `following` predicts the next token from these features.
    """

    def empty_cache(rows: int, window: int) -> tuple[Any, Array]:
        cache = blocks.empty_cache(rows, window)
        block = jnp.zeros((rows, 1), jnp.int32)
        h = jax.eval_shape(lambda: blocks.append_block(block, jnp.zeros(rows), cache)[0])
        return cache, jnp.zeros((rows, h.shape[-1]), h.dtype)

    def keeping(append: Callable) -> Callable:
        def appended(z: Array, t: Array, cache: tuple[Any, Array]) -> tuple[Array, Any]:
            h, after = append(z, t, cache[0])
            return h, (after, h[:, -1])

        return appended

    def following(cache: tuple[Any, Array]) -> tuple[Array, Array]:
        before, last = cache
        return last, before.count > 0

    return blocks._replace(
        empty_cache=empty_cache,
        append_block=keeping(blocks.append_block),
        read_block=blocks.read_block and keeping(blocks.read_block),
        following=following,
        beginning=blocks.beginning
        and (lambda cache, first: (blocks.beginning(cache[0], first), cache[1])),
    )


def _moved(h: Array, before: Array, segments: Array | None) -> Array:
    """Shifts `before` [B, L, D] to the right; the first position of a segment has its own h."""
    moved = jnp.concatenate([h[:, :1], before[:, :-1]], axis=1)
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
