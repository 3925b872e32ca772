"""Attention of block diffusion: to a token's own noisy block and to earlier clean blocks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.networks.attention import Form, attend_masked, attend_where
from md4_jax.networks.halves import halves_seen
from md4_jax.networks.keys import for_queries
from md4_jax.networks.rotary import ROPE, Rope, rotate
from md4_jax.networks.splash import fits, splash
from md4_jax.protocols import Array
from md4_jax.runtime.sharding import splits_sequences

# Largest number of tiles of queries. A tile is computed with the keys that it may see. A training
# step is 1.5 times as fast as with one tile (2 x 1024 tokens, 4 layers of 256, 2 CPU cores).
TILES = 8


class KVCache(NamedTuple):
    """Ring buffer of keys and values, before rotation, of the last W tokens.

    keys, values  [..., B, W, H, Dh], of one layer or of all; token p is at p mod W
    count         int32 [], number of tokens appended so far
    begin         int32 [B], the first token of each text; earlier ones are masked out; None: 0
    """

    keys: Array
    values: Array
    count: Array
    begin: Array | None = None

    @property
    def first(self) -> Array:
        """Position in its text of the next token to be read, [] or [B, 1]."""
        return self.count if self.begin is None else self.count - self.begin[:, None]

    def attend(
        self,
        query: Array,
        own: tuple[Array, Array],
        segments: Array | None,
        *,
        kernel: str,
        rope: Rope,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Attends from a block to the cache and to itself; the text is one document.

        Returns (result, own keys and values, which the caller appends).
        """
        del segments
        return attend_cached(query, own, self, kernel=kernel, rope=rope), own

    def append(self, keys: Array, values: Array) -> "KVCache":
        """Overwrites the oldest entries by a block [..., B, P, H, Dh]; P divides W and count."""
        begin = self.count % self.keys.shape[-3]
        put = jax.lax.dynamic_update_slice_in_dim
        return KVCache(
            put(self.keys, keys, begin, axis=-3),
            put(self.values, values, begin, axis=-3),
            self.count + keys.shape[-3],
            self.begin,
        )


class LeftToRight(KVCache):
    """The same ring buffer, with causal attention within the block."""

    def attend(
        self,
        query: Array,
        own: tuple[Array, Array],
        segments: Array | None,
        *,
        kernel: str,
        rope: Rope,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Attends from each token of a block to the cache, to itself and to earlier ones."""
        del segments
        return attend_cached(query, own, self, kernel=kernel, rope=rope, step=1), own


class Surroundings(NamedTuple):
    """Keys and values, before rotation, of all tokens of a text, for queries from a window.

    keys, values  [..., B, L, H, Dh], of one layer or of all
    begin         int32 [B], position of each window's first token. A window may extend beyond its
                  text: what is read there is not written
    """

    keys: Array
    values: Array
    begin: Array

    @property
    def first(self) -> Array:
        """Position of the window's first token."""
        return self.begin[:, None]

    def attend(
        self,
        query: Array,
        own: tuple[Array, Array],
        segments: Array | None,
        *,
        kernel: str,
        rope: Rope,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Attends from the window's queries [B, P, H, Dh] to its own keys and all others.

        Returns (result, own keys and values, which the caller appends).

        segments  int32 [B, L]: a token sees only tokens of its own segment
        """
        keys, values, _ = self.append(*own)
        _, count, heads, _ = query.shape
        places = jnp.clip(self.first + jnp.arange(count), 0, keys.shape[1] - 1)
        query = rotate(query, places, length=keys.shape[1], rope=rope)
        keys, values = (for_queries(x, heads) for x in (rotate(keys, rope=rope), values))
        mask = None
        if segments is not None:
            asking = jnp.take_along_axis(segments, places, axis=1)
            mask = (asking[:, :, None] == segments[:, None, :])[:, None]
        return attend_where(query, keys, values, mask, Form(rounded=kernel == "rounded")), own

    def append(self, keys: Array, values: Array) -> "Surroundings":
        """Writes the window's keys and values [..., B, P, H, Dh] at their positions."""
        length, count = self.keys.shape[-3], keys.shape[-3]
        places = self.first + jnp.arange(count)
        places = jnp.where(places < 0, length, places)  # negative ones would count from the end
        row = jnp.arange(len(places))[:, None]
        found = (
            old.at[..., row, places, :, :].set(new, mode="drop")
            for old, new in zip((self.keys, self.values), (keys, values), strict=True)
        )
        return Surroundings(*found, self.begin)


def attend_cached(
    query: Array,
    own: tuple[Array, Array],
    cache: KVCache,
    *,
    kernel: str = "plain",
    rope: Rope = ROPE,
    step: int = 0,
) -> Array:
    """Attends from a block of queries [B, P, H, Dh] to the tokens of the cache and to itself.

    Position 0 is that of the oldest token of a full cache, so that positions stay below W + P.
    kernel: rounded as in `attend`; all others compute the formula without rounding.
    step: the queries are several blocks of this size, and each sees its own and earlier ones; with
    1 it sees only itself and the tokens on its left. 0: they are one block.
    """
    keys, values = (
        jnp.concatenate(x, axis=1) for x in zip((cache.keys, cache.values), own, strict=True)
    )
    window, length = cache.keys.shape[1], query.shape[1]
    slot = jnp.arange(window)
    # Distance of the token in each slot from the first token of the block.
    age = 1 + (cache.count - 1 - slot) % window
    places = jnp.concatenate([window - age, window + jnp.arange(length)])[None]
    of = np.arange(length) // (step or length)
    among = of[:, None] >= of if step else np.ones((1, length), bool)
    known = jnp.broadcast_to(age <= cache.count, (len(among), window))
    seen = jnp.concatenate([known, among], axis=1)[None, None]
    if cache.begin is not None:
        held = cache.count + jnp.concatenate([-age, jnp.arange(length)])
        itself = np.eye(length, window + length, window, dtype=bool)
        seen = seen & (held >= cache.begin[:, None, None, None]) | itself
    query = rotate(query, places[:, window:], length=window + length, rope=rope)
    keys = rotate(keys, places, length=window + length, rope=rope)
    keys, values = (for_queries(x, query.shape[2]) for x in (keys, values))
    form = Form(rounded=kernel == "rounded")
    return attend_where(query, keys, values, seen, form)


def attend_blocks(
    query_BxLxHxDh: Array,
    own: tuple[Array, Array],
    clean: tuple[Array, Array] | None,
    *,
    block: int,
    segments: Array | None = None,
    kernel: str = "plain",
    causal: bool = False,
) -> Array:
    """Attends from each position to its own block in `own` and to earlier blocks in `clean`.

    own, clean  (keys, values), each [B, L, H, Dh]; clean None: own is used for both, so that a
                position sees all blocks up to its own (block-causal), or with causal all positions
                up to itself
    block       number of positions of a block; divides L
    segments    int32 [B, L]: a token sees only tokens of its own segment

    Three quarters of the scores [L + L, L + L] of both halves are masked (identity B03). With tiles
    of T positions, L (L + T) / 2 scores are computed and, with clean, L T more.
    """
    length = query_BxLxHxDh.shape[1]
    size, out = tile(length, block), []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        # Earlier blocks end at least one block before the end of this tile.
        seen = end if clean is None else max(0, end - block)
        # With a mask, cuDNN needs an even number of keys.
        seen += (seen + end - begin) % 2 if clean is not None and seen else 0
        parts = [slice(0, seen)] if clean is None else [slice(0, seen), slice(begin, end)]
        sources = [own] if clean is None else [clean, own]
        keys, values = (
            jnp.concatenate([s[k][:, part] for s, part in zip(sources, parts, strict=True)], axis=1)
            for k in range(2)
        )
        step = 1 if causal and clean is None else block
        allowed = np.arange(begin, end)[:, None] // step >= np.arange(seen) // step
        if clean is not None:
            of_query = np.arange(begin, end)[:, None] // block
            allowed = of_query > np.arange(seen) // block
            allowed = np.concatenate([allowed, of_query == np.arange(begin, end) // block], axis=1)
        mask = None if allowed.all() else jnp.asarray(allowed)[None, None]
        if segments is not None:
            of_keys = jnp.concatenate([segments[:, part] for part in parts], axis=1)
            same = (segments[:, begin:end, None] == of_keys[:, None, :])[:, None]
            mask = same if mask is None else same & mask
        out.append(attend_masked(query_BxLxHxDh[:, begin:end], keys, values, mask, kernel))
    return jnp.concatenate(out, axis=1)


def block_diffusion_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    block: int,
    segments: Array | None = None,
    kernel: str = "plain",
    causal: bool = False,
) -> Array:
    """Computes attention in [noisy, clean], [B, 2 L, H, Dh], a noisy text and its clean copy.

    A noisy position sees its own noisy block and the clean blocks before it. A clean position sees
    clean blocks up to its own, or with causal clean positions up to itself. query may be the noisy
    half alone. kernel: as in `attend`; splash computes both halves at once, the others use tiles.
    """
    length = key.shape[1] // 2
    both = None if segments is None else jnp.concatenate([segments, segments], axis=1)
    if kernel == "splash" and fits(length):
        return splash(query, key, value, both, causal=causal, block=block)
    key, value = (for_queries(x, query.shape[2]) for x in (key, value))
    if splits_sequences():
        # Each tile would lie on some of the devices only.
        asking, known = (jnp.arange(x.shape[1]) for x in (query, key))
        seen = halves_seen(asking, known, length=length, block=block, causal=causal)[None]
        if both is not None:
            seen = seen & (both[:, : len(asking), None] == both[:, None])
        return attend_masked(query, key, value, seen[:, None], kernel)
    (noisy_keys, clean_keys), (noisy_values, clean_values) = (
        jnp.split(x, 2, axis=1) for x in (key, value)
    )
    noisy, clean = (noisy_keys, noisy_values), (clean_keys, clean_values)
    attention = functools.partial(attend_blocks, block=block, segments=segments, kernel=kernel)
    out = attention(query[:, :length], noisy, clean)
    if query.shape[1] == length:
        return out
    of_clean = attention(query[:, length:], clean, None, causal=causal)
    return jnp.concatenate([out, of_clean], axis=1)


def rotated_halves(x: Array, length: int, rope: Rope = ROPE) -> Array:
    """Rotates one or two halves [B, n L, H, Dh], each with the positions 0..L-1."""
    if splits_sequences():
        places = jnp.broadcast_to(jnp.arange(x.shape[1]) % length, x.shape[:2])
        return rotate(x, places, length=length, rope=rope)
    parts = jnp.split(x, x.shape[1] // length, axis=1)
    return jnp.concatenate([rotate(part, rope=rope) for part in parts], axis=1)


def tile(length: int, block: int) -> int:
    """Returns the size of a tile: a multiple of the block, at least an eighth of the length."""
    return block * -(-length // (TILES * block))
