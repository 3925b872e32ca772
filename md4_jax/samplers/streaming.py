"""Streaming parallel decoding of WeDLM: a sliding window of masks after a causal prefix."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.order import tokens_first
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_from, entropy
from md4_jax.samplers.front import Front, Memory, first_mask
from md4_jax.samplers.transforms import Transform


class Window(NamedTuple):
    """Positions that an evaluation may reveal.

    masks  bool [B, L], the masks of the text
    first  int32 [B], the first mask; L: there is none
    index  int32 [B, W], first, first + 1, ...; may exceed the text
    """

    masks: Array
    first: Array
    index: Array


@pytree("transform", "limit", "penalty")
@dataclasses.dataclass(frozen=True)
class Streaming(Front):
    """Reveals the masks of least entropy in a window that begins at the first mask.

    Streaming parallel decoding (WeDLM, arXiv:2512.22737). The network is causal along an order: all
    tokens come first, then all masks, both from left to right. Positions are those of the text. A
    step draws a token for each mask of the window, and keeps those with

        entropy + penalty * (distance from the first mask) < limit,

    or else the one where the sum is smallest. The entropy, in nats, is that of the network's
    unmodified distribution. Steps go on until no mask is left; the grid has no effect.

    width    number of positions of the window
    limit    in nats. 0: one token per evaluation
    penalty  nats per position
    cached   caches the keys and values of all tokens before the first mask, which no longer change.
             An evaluation then reads 2 width positions. False: the same samples, more slowly. A
             text in which given tokens follow masks is read as a whole until they are near
    stops    symbols that end a text, from sample.stop. Once one is drawn and no mask is left before
             it, the masks after it become the first of these symbols, without an evaluation

    The samples do not have the distribution of the model, except with width=1.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), ordered=True)
    level: ClassVar[None] = None

    width: int = 16
    limit: float = 0.4
    penalty: float = 0.02
    cached: bool = True
    stops: tuple[int, ...] = ()
    transform: Transform = Transform()

    def __post_init__(self):
        if self.width < 1:
            raise UserError(f"sample.width must be at least 1, not {self.width}")
        for key in ("limit", "penalty"):
            value = getattr(self, key)
            if isinstance(value, float | int) and value < 0:
                raise UserError(f"sample.{key} must not be negative, not {value}")

    def begin(self, denoiser: Denoiser, process: RevealsMasks, chain: Chain) -> Memory | None:
        """Returns the cache of the tokens before the first mask; None without a cache."""
        if not self.is_cached(denoiser):
            return None
        (rows, length), window = chain.z.shape, self._window(process, chain.z)
        place = jnp.broadcast_to(jnp.arange(length), chain.z.shape)
        keep, rank = place < window.first[:, None], tokens_first(window.masks, place, length)

        def read(cache: Any) -> Any:
            return denoiser.ordered.append(chain.z, jnp.zeros(rows), place, rank, keep, cache)[1]

        empty = denoiser.ordered.empty_cache(rows, length)
        cache = jax.lax.cond(jnp.any(keep), read, lambda cache: cache, empty)
        return Memory(cache, window.first)

    def _window(self, process: RevealsMasks, z: Array) -> Window:
        first = first_mask(process, z)
        return Window(process.is_noise(z), first, first[:, None] + jnp.arange(self.width))

    def _draw(self, denoiser: Denoiser, process: RevealsMasks, chain: Chain, keys: Array) -> Chain:
        """Reveals masks of each sequence, with one evaluation."""
        window, length = self._window(process, chain.z), chain.z.shape[1]
        h, memory = self._features(denoiser, process, chain, window)
        logits = denoiser.unembed(h)
        chosen = self._chosen(window, entropy(logits))
        at_logits = denoiser._replace(unembed=lambda logits: logits)
        tokens, confidence = draw_from(at_logits, self.transform, logits, window.index, keys)
        where, rows = jnp.where(chosen, window.index, length), jnp.arange(len(logits))[:, None]
        z = chain.z.at[rows, where].set(tokens.astype(chain.z.dtype), mode="drop")
        return chain._replace(
            z=self._ended(process, z, chain.prompt_mask),
            confidence=chain.confidence.at[rows, where].set(confidence, mode="drop"),
            evaluations=chain.evaluations + jnp.any(window.masks, axis=1),
            memory=memory,
        )

    def _chosen(self, window: Window, entropies: Array) -> Array:
        """Marks the positions of the window to reveal, at least one per text with masks."""
        length = window.masks.shape[1]
        held = jnp.take_along_axis(window.masks, jnp.minimum(window.index, length - 1), axis=1)
        open_BxW = held & (window.index < length)
        cost = entropies + self.penalty * jnp.arange(self.width)
        cost = jnp.where(open_BxW, cost, jnp.inf)
        below = cost < self.limit
        best = jnp.arange(self.width) == jnp.argmin(cost, axis=1, keepdims=True)
        return open_BxW & jnp.where(jnp.any(below, axis=1, keepdims=True), below, best)

    def _features(
        self, denoiser: Denoiser, process: RevealsMasks, chain: Chain, window: Window
    ) -> tuple[Array, Memory | None]:
        """Returns (features of the window [B, W, D], the next memory)."""
        z, memory, (rows, length) = chain.z, chain.memory, chain.z.shape
        zeros, everywhere = jnp.zeros(rows), jnp.arange(length)

        def whole(memory: Memory | None) -> tuple[Array, Memory | None]:
            rank = tokens_first(window.masks, everywhere, length)
            index = jnp.minimum(window.index, length - 1)
            return denoiser.ordered.features(z, zeros, rank, index), memory

        def part(memory: Memory) -> tuple[Array, Memory]:
            place = memory.count[:, None] + jnp.arange(2 * self.width)
            at = jnp.minimum(place, length - 1)
            held, masks = (jnp.take_along_axis(x, at, axis=1) for x in (z, window.masks))
            within = place < length
            # Places after the end come last, so that other positions do not see them.
            rank = jnp.where(within, tokens_first(masks, at, length), 2 * length)
            symbols = jnp.where(within, held, process.mask_id).astype(z.dtype)
            keep = within & (place < window.first[:, None])
            h, cache = denoiser.ordered.append(symbols, zeros, at, rank, keep, memory.cache)
            own = jnp.minimum(window.index - memory.count[:, None], 2 * self.width - 1)
            count = memory.count + jnp.sum(keep, axis=1, dtype=jnp.int32)
            return jnp.take_along_axis(h, own[..., None], axis=1), Memory(cache, count)

        if memory is None:
            return whole(None)
        far = jnp.logical_not(window.masks) & (everywhere >= memory.count[:, None] + 2 * self.width)
        if denoiser.ordered.padding is not None:
            far &= jnp.logical_not(denoiser.ordered.padding)
        far = jnp.any(far, axis=1) | (window.first - memory.count > self.width)
        return jax.lax.cond(jnp.any(far & jnp.any(window.masks, axis=1)), whole, part, memory)
