"""Rounds of self-speculative decoding, of networks with a causal context and of windows."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Denoiser, UserError
from md4_jax.runtime.scopes import LIKELY
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.given_blocks import AT_ONCE

# (features [B, P, D], positions [B, P]) -> (tokens, their probabilities), [B, P] each.
Draw = Callable[[Array, Array], tuple[Array, Array]]


class Reading(NamedTuple):
    """State of texts of which the first `count` tokens are read.

    z            int32 [B, N], symbols; masks follow the text, into which the last block may reach
    confidence   float32 [B, N], as in `Chain`
    evaluations  int32 [B]
    count        int32 [B]. The token at this position is known, and the next to be read
    draft        int32 [B, W - 1], guesses of the tokens after it; masks if there are none
    cache        the network's cache of the tokens that are read
    """

    z: Array
    confidence: Array
    evaluations: Array
    count: Array
    draft: Array
    cache: Any


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Base of the two ways to draft and to verify; W is `size`.

    denoiser  its functions
    mask      symbol of the mask
    size      number of tokens that a round reads
    """

    denoiser: Denoiser
    mask: int
    size: int

    # Number of tokens at the end of the prompt that the first round reads.
    unread = 0

    @property
    def ordered(self) -> Any:
        """Functions of the network, `Ordered`."""
        return self.denoiser.ordered

    def begin(self, chain: Chain, first: Array, draw: Draw) -> Reading:
        """Reads the given tokens before the first mask, first [B].

        A text without them gets its first token, from a single mask.
        """
        (rows, length), more = chain.z.shape, self.size + 1
        z = jnp.pad(chain.z, ((0, 0), (0, more)), constant_values=self.mask)
        confidence = jnp.pad(chain.confidence, ((0, 0), (0, more)))
        count = jnp.maximum(first - self.unread, 0)
        empty = self.ordered.empty_cache(rows, length + more)
        h, cache = self._prompts(z, count, self._of_mask(first == 0, empty), empty)
        draft = jnp.full((rows, self.size - 1), self.mask, z.dtype)
        drawn = (first < length) & ((first == 0) | (self.unread == 0))
        state = Reading(z, confidence, drawn.astype(jnp.int32), count, draft, cache)
        return self._put(state, *draw(h[:, None], first[:, None]), first[:, None], drawn[:, None])

    def _of_mask(self, asked: Array, empty: Any) -> Array:
        """Returns the features [B, D] of a mask without a text, if any text asks for them."""
        rows = len(asked)
        mask = jnp.full((rows, 1), self.mask, jnp.int32)

        def read() -> Array:
            begin = jnp.zeros(rows, jnp.int32)
            return self._read(mask, jnp.ones(rows), begin, empty, causal=False)[0][:, 0]

        shape = jax.eval_shape(read)
        blank = lambda: jnp.zeros(shape.shape, shape.dtype)  # noqa: E731
        return jax.lax.cond(jnp.any(asked), read, blank)

    def _prompts(self, z: Array, count: Array, h: Array, cache: Any) -> tuple[Array, Any]:
        """Reads `count` [B] tokens; returns (features of the last one, or h [B, D], cache)."""
        size = min(AT_ONCE, z.shape[1])

        def read(state: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
            begin, h, cache = state
            place = jnp.broadcast_to(begin + jnp.arange(size), (len(z), size))
            own, cache = self._read(_at(z, place), jnp.zeros(len(z)), place[:, 0], cache)
            last = count[:, None] - 1 - begin
            found = _at(own, jnp.clip(last, 0, size - 1)[..., None])[:, 0]
            h = jnp.where((last >= 0) & (last < size), found, h)
            return begin + size, h, cache

        state = (jnp.int32(0), h, cache)
        _, h, cache = jax.lax.while_loop(lambda state: state[0] < jnp.max(count), read, state)
        return h, self.ordered.crop(cache, count)

    def _read(
        self, z: Array, t: Array, begin: Array, cache: Any, *, causal: bool = True
    ) -> tuple[Array, Any]:
        """Reads z [B, P] from `begin` [B] on; causal: a token sees only those before it."""
        place = begin[:, None] + jnp.arange(z.shape[1])
        rank = place if causal else jnp.zeros_like(place)
        return self.ordered.append(z, t, place, rank, jnp.ones_like(place, bool), cache)

    def _put(
        self, state: Reading, tokens: Array, confidence: Array, place: Array, chosen: Array
    ) -> Reading:
        """Writes the chosen ones of tokens at places [B, P]."""
        where, rows = jnp.where(chosen, place, state.z.shape[1]), jnp.arange(len(place))[:, None]
        return state._replace(
            z=state.z.at[rows, where].set(tokens.astype(state.z.dtype), mode="drop"),
            confidence=state.confidence.at[rows, where].set(confidence, mode="drop"),
        )

    def _verified(
        self, state: Reading, left: Array, read: Array, h: Array, draw: Draw
    ) -> tuple[Reading, Array]:
        """Keeps the tokens after those that were read, up to the first that is not as drawn.

        read [B, W] are the token at `count` and the guesses after it, h [B, W, D] their features,
        which predict the next ones. Returns (state, number of tokens by which texts have grown).
        """
        place = state.count[:, None] + 1 + jnp.arange(self.size)
        tokens, confidence = draw(h, place)
        free = _at(state.z, place) == self.mask
        right = jnp.logical_not(free[:, :-1]) | (tokens[:, :-1] == read[:, 1:])
        kept = jnp.cumprod(jnp.pad(right, ((0, 0), (1, 0)), constant_values=True), axis=1) > 0
        kept &= left[:, None]
        grown = jnp.sum(kept, axis=1, dtype=jnp.int32)
        state = self._put(state, tokens, confidence, place, kept & free)
        used = state.evaluations + left
        return state._replace(count=state.count + grown, evaluations=used), grown


@dataclasses.dataclass(frozen=True)
class BlockDrafter(Drafter):
    """A block of the last token and masks drafts, and the same block of clean tokens verifies."""

    @property
    def ordered(self) -> Any:
        return self.denoiser.blocks.ordered

    def whole(self, z: Array, n: Array) -> Array:
        """Returns the features [B, 1, D] that predict position n of z, by a pass over all of z."""
        zeros = jnp.zeros(len(z))

        def following() -> Array:
            return self.denoiser.blocks.reading(z, zeros)[:, n - 1][:, None]

        def alone() -> Array:
            mask = jnp.full((len(z), 1), self.mask, z.dtype)
            return self.denoiser.blocks.features(mask, jnp.ones((len(z), 1)), mask, 1)

        return jax.lax.cond(n > 0, following, alone)

    def round(self, state: Reading, left: Array, draw: Draw) -> Reading:
        """Drafts and verifies, with an evaluation each."""
        place = state.count[:, None] + jnp.arange(self.size)
        read = _at(state.z, place)
        masks = read == self.mask
        asked = left & jnp.any(masks, axis=1)
        shifted = self.ordered.shifted

        def drafted() -> Array:
            h = self._read(read, jnp.mean(masks, axis=1), state.count, state.cache, causal=False)[0]
            own = h[:, :-1] if shifted else h[:, 1:]
            tokens = draw(own, place[:, 1:])[0].astype(read.dtype)
            return read.at[:, 1:].set(jnp.where(masks[:, 1:], tokens, read[:, 1:]))

        if self.size > 1:
            with jax.named_scope(LIKELY):
                read = jax.lax.cond(jnp.any(asked), drafted, lambda: read)
        h, cache = self._read(read, jnp.zeros(len(read)), state.count, state.cache)
        state, _ = self._verified(state, left, read, h, draw)
        return state._replace(
            evaluations=state.evaluations + asked, cache=self.ordered.crop(cache, state.count)
        )


@dataclasses.dataclass(frozen=True)
class WindowDrafter(Drafter):
    """Windows that begin at the last token and at each drafted one draft and verify at once."""

    unread = 1

    def whole(self, z: Array, n: Array) -> Array:
        """Returns the features [B, 1, D] that predict position n of z, by a pass over all of z."""
        rows, length = z.shape
        place = jnp.broadcast_to(jnp.arange(length + self.size), (rows, length + self.size))
        begins = jnp.maximum(n - 1, 0)
        symbols = jnp.pad(z, ((0, 0), (0, self.size)), constant_values=self.mask)
        symbols = jnp.where(place < n, symbols, self.mask)
        rank = jnp.where(place < begins + self.size, length, 2 * length)
        rank = jnp.where(place < begins, place, rank)
        index = jnp.full((rows, 1), begins)
        return self.ordered.features(symbols, jnp.zeros(rows), rank, index)

    def begin(self, chain: Chain, first: Array, draw: Draw) -> Reading:
        if self.ordered.padding is not None:
            raise UserError(
                "sample.name='self_speculative' reads beyond the end of texts, so it cannot be "
                "used with padding or several documents in a sequence"
            )
        return super().begin(chain, first, draw)

    def round(self, state: Reading, left: Array, draw: Draw) -> Reading:
        """Verifies the draft and makes the next one, with one evaluation."""
        size = self.size
        tokens = _at(state.z, state.count[:, None] + jnp.arange(size))
        guess = jnp.where(tokens[:, 1:] == self.mask, state.draft, tokens[:, 1:])
        read = jnp.concatenate([tokens[:, :1], guess], axis=1)
        h, cache = self._windows(read, state)
        state, grown = self._verified(state, left, read, h[:, :, 0], draw)
        state = state._replace(cache=self.ordered.crop(cache, state.count))
        last = jnp.maximum(grown - 1, 0)[:, None, None, None]
        own = jnp.take_along_axis(h, last, axis=1)[:, 0, 1:]
        place = state.count[:, None] + 1 + jnp.arange(size - 1)
        return state._replace(draft=draw(own, place)[0].astype(state.draft.dtype))

    def _windows(self, read: Array, state: Reading) -> tuple[Array, Any]:
        """Reads tokens [B, W] and the windows that begin at them: (h [B, W, W, D], cache).

        A window sees the clean tokens before its first one; the clean tokens see no window.
        """
        rows, size = read.shape
        number, each = jnp.meshgrid(jnp.arange(size), jnp.arange(size), indexing="ij")
        masks = jnp.full((rows, size, size), self.mask, read.dtype).at[:, :, 0].set(read)
        z = jnp.concatenate([read, masks.reshape(rows, -1)], axis=1)
        count = state.count[:, None]
        place = count + jnp.concatenate([jnp.arange(size), (number + each).reshape(-1)])
        rank = count + jnp.concatenate([jnp.arange(size), number.reshape(-1) - 1])
        group = jnp.concatenate([jnp.zeros(size, jnp.int32), number.reshape(-1) + 1])
        keep = jnp.broadcast_to(group == 0, z.shape)
        group = jnp.broadcast_to(group, z.shape)
        zeros = jnp.zeros(rows)
        h, cache = self.ordered.append(z, zeros, place, rank, keep, state.cache, group)
        return h[:, size:].reshape(rows, size, size, -1), cache


def _at(x: Array, place: Array) -> Array:
    """Returns the entries of x [B, N, ...] at places [B, P]; beyond the end, the last ones."""
    last = x.shape[1] - 1
    return jnp.take_along_axis(x, jnp.minimum(place, last), axis=1)
