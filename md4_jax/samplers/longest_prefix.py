"""Longest prefix decoding of SDLM: the confident tokens after a causal prefix."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_from, entropy, probability
from md4_jax.samplers.front import Front, Memory, first_mask
from md4_jax.samplers.transforms import Transform


@pytree("transform", "limit")
@dataclasses.dataclass(frozen=True)
class LongestPrefix(Front):
    """Draws the next `width` tokens at once and keeps the first ones, while they are confident.

    Longest prefix decoding (SDLM, arXiv:2509.24007). A window begins with the last token of the
    prefix, which is followed by width - 1 masks. Its positions see one another and the tokens
    before the window, which see only themselves and those to their left. Each position predicts the
    next one. A step draws these tokens, and keeps those before the first one whose confidence is
    not above `limit`, and at least one. Steps go on until no mask is left.

    width   number of positions of the window, with its token. Masks may lie beyond the text
    limit   0: all tokens of a window; 1: one token per evaluation
    score   confidence of a token, from the distribution after temperature (1 for 0), top-k and
            top-p, that has V symbols:
            probability  of the token
            entropy      1 - entropy / log V
    cached  caches the keys and values of the tokens before the window. An evaluation then reads
            2 width positions. False: the same samples, more slowly
    stops   as of `Front`

    Given tokens to the right of a mask are kept, but only tokens to their right depend on them. The
    first token of a text without a prompt is drawn from masks alone, which give the same logits as
    a single one. The samples do not have the distribution of the model, except with limit=1.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), ordered=True, windows=True)
    level: ClassVar[None] = None

    width: int = 4
    limit: float = 0.9
    score: str = "probability"
    cached: bool = True
    stops: tuple[int, ...] = ()
    transform: Transform = Transform()

    def __post_init__(self):
        if self.width < 2:
            raise UserError(f"sample.width must be at least 2, not {self.width}")
        if self.score not in ("probability", "entropy"):
            raise UserError(
                f"sample.score must be 'probability' or 'entropy' with "
                f"sample.name='longest_prefix', not {self.score!r}"
            )
        if isinstance(self.limit, float | int) and not 0 <= self.limit <= 1:
            raise UserError(f"sample.limit must lie in [0, 1], not {self.limit}")

    def begin(self, denoiser: Denoiser, process: RevealsMasks, chain: Chain) -> Memory | None:
        """Returns the cache of the tokens before the first window; None without a cache."""
        if denoiser.ordered.padding is not None:
            raise UserError(
                "sample.name='longest_prefix' reads beyond the end of texts, so it cannot be used "
                "with padding or several documents in a sequence"
            )
        if not self.is_cached(denoiser):
            return None
        rows, length = chain.z.shape
        count = self._begins(process, chain.z)
        place = jnp.broadcast_to(jnp.arange(length), chain.z.shape)
        keep = place < count[:, None]

        def read(cache: Any) -> Any:
            return denoiser.ordered.append(chain.z, jnp.zeros(rows), place, place, keep, cache)[1]

        # Windows may reach beyond the text, but no token there is cached.
        empty = denoiser.ordered.empty_cache(rows, length + self.width)
        return Memory(jax.lax.cond(jnp.any(keep), read, lambda cache: cache, empty), count)

    def _begins(self, process: RevealsMasks, z: Array) -> Array:
        """Returns the position of the last token before the first mask; 0 if there is none."""
        return jnp.maximum(first_mask(process, z) - 1, 0)

    def _draw(self, denoiser: Denoiser, process: RevealsMasks, chain: Chain, keys: Array) -> Chain:
        """Draws tokens of each sequence, with one evaluation."""
        (rows, length), masks = chain.z.shape, process.is_noise(chain.z)
        first = first_mask(process, chain.z)
        h, memory = self._features(denoiser, process, chain)
        logits = denoiser.unembed(h)
        index = first[:, None] + jnp.arange(self.width)
        at_logits = denoiser._replace(unembed=lambda logits: logits)
        tokens, confidence = draw_from(at_logits, self.transform, logits, index, keys)
        kept = self._kept(logits, tokens) & ((first > 0)[:, None] | (jnp.arange(self.width) == 0))
        open_BxW = jnp.take_along_axis(masks, jnp.minimum(index, length - 1), axis=1)
        where = jnp.where(kept & open_BxW & (index < length), index, length)
        each = jnp.arange(rows)[:, None]
        z = chain.z.at[each, where].set(tokens.astype(chain.z.dtype), mode="drop")
        return chain._replace(
            z=self._ended(process, z, chain.prompt_mask),
            confidence=chain.confidence.at[each, where].set(confidence, mode="drop"),
            evaluations=chain.evaluations + jnp.any(masks, axis=1),
            memory=memory,
        )

    def _kept(self, logits: Array, tokens: Array) -> Array:
        """Marks the tokens of the windows to keep, bool [B, W]."""
        logits = self.transform.warm(logits)
        if self.score == "probability":
            confidence = probability(logits, tokens)
        else:
            confidence = 1.0 - entropy(logits) / jnp.log(logits.shape[-1])
        confidence = jnp.minimum(confidence, 1.0)  # but for rounding
        sure = jnp.cumprod((confidence > self.limit).astype(jnp.int32), axis=1) > 0
        return sure.at[:, 0].set(True)

    def _features(
        self, denoiser: Denoiser, process: RevealsMasks, chain: Chain
    ) -> tuple[Array, Memory | None]:
        """Returns (features of the window [B, W, D], the next memory)."""
        (rows, length), memory, width = chain.z.shape, chain.memory, self.width
        begins = self._begins(process, chain.z)[:, None]
        zeros, window = jnp.zeros(rows), begins + jnp.arange(width)

        def symbols(place: Array) -> tuple[Array, Array]:
            """Returns the symbols at these positions and their ranks, which windows share."""
            held = jnp.take_along_axis(chain.z, jnp.minimum(place, length - 1), axis=1)
            shown = (place <= begins) & (place < length)
            rank = jnp.where(place < begins + width, length, 2 * length)
            rank = jnp.where(place < begins, place, rank)
            return jnp.where(shown, held, process.mask_id), rank

        def whole(memory: Memory | None) -> tuple[Array, Memory | None]:
            z, rank = symbols(jnp.broadcast_to(jnp.arange(length + width), (rows, length + width)))
            return denoiser.ordered.features(z, zeros, rank, window), memory

        def part(memory: Memory) -> tuple[Array, Memory]:
            place = memory.count[:, None] + jnp.arange(2 * width)
            (z, rank), keep = symbols(place), place < begins
            h, cache = denoiser.ordered.append(z, zeros, place, rank, keep, memory.cache)
            own = jnp.minimum(window - memory.count[:, None], 2 * width - 1)
            count = memory.count + jnp.sum(keep, axis=1, dtype=jnp.int32)
            return jnp.take_along_axis(h, own[..., None], axis=1), Memory(cache, count)

        if memory is None:
            return whole(None)
        # Beyond given tokens that follow masks.
        far = jnp.any(process.is_noise(chain.z), axis=1) & (begins[:, 0] - memory.count > width)
        return jax.lax.cond(jnp.any(far), whole, part, memory)
