"""Infilling of variable length, as in DreamOn: docs/samplers.md."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.processes.draws import fold_keys, split_keys
from md4_jax.processes.lengths import ResizesMasks
from md4_jax.processes.order import lowest
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.runtime.scopes import likely
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, gumbel, probability
from md4_jax.samplers.edit import merged
from md4_jax.samplers.loop import further_steps
from md4_jax.samplers.scores import SCORES, score_of
from md4_jax.samplers.transforms import Transform

LEAST = {"grow": 0, "masks": 1, "per_step": 1, "expansions": 0, "noise": 0}


class Memory(NamedTuple):
    """State of variable-length texts, in addition to the chain.

    given  bool [B, L], the tokens of the prompt, which move with the text
    most   int32 [B], the largest number of tokens that the text may have
    left   int32 [B], the remaining number of expansions
    """

    given: Array
    most: Array
    left: Array


@pytree("transform", "grow", "masks", "per_step", "noise", "expansions")
@dataclasses.dataclass(frozen=True)
class Resize:
    """Unmasks the most confident masks, each of which becomes a token, two masks, or nothing.

    A mask for which the symbol `expand` is drawn becomes two masks; one for which `delete` is drawn
    is removed (DreamOn, arXiv:2602.01326). The tokens after it move. Steps are repeated until no
    mask is left; the grid has no effect. The network does not attend to positions after the text.

    grow        largest number of tokens by which a text may exceed its template
    masks       number of masks between sample.prompt and sample.suffix
    per_step    number of masks that a step unmasks, deletes or expands
    score       entropy, margin or probability, as with `confidence`, but of the distribution that
                the token is drawn from: after temperature, top-k, top-p and the limits of room.
                With temperature 0 it is that of temperature 1
    noise       noise * (a Gumbel draw) is added to the score: masks are then drawn without
                replacement, with odds exp(score / noise)
    expansions  largest number of expansions of a text, including masks that are deleted later; 0:
                twice the number of tokens that it may have from its first mask on
    delete_rest
                a deletion also removes the masks to its right in the same gap
    """

    needs: ClassVar[Needs] = Needs((ResizesMasks,), hides=True)
    level: ClassVar[None] = None

    grow: int = 64
    masks: int = 4
    per_step: int = 1
    score: str = "entropy"
    noise: float = 0.0
    expansions: int = 0
    delete_rest: bool = False
    transform: Transform = Transform()

    def __post_init__(self):
        if self.score not in SCORES:
            raise UserError(f"sample.score must be one of {', '.join(SCORES)}, not {self.score!r}")
        for key, least in LEAST.items():
            value = getattr(self, key)
            if isinstance(value, float | int) and value < least:
                raise UserError(f"sample.{key} must be at least {least}, not {value}")

    def begin(self, denoiser: Denoiser, process: ResizesMasks, chain: Chain) -> Memory:
        """Returns what the first step finds. The masks are what the prompt does not fix."""
        length = chain.z.shape[1]
        size = jnp.sum(chain.z != process.absent_id, axis=1, dtype=jnp.int32)
        most = jnp.minimum(size + self.grow, length)
        masks = chain.z == process.mask_id
        first = jnp.where(jnp.any(masks, axis=1), jnp.argmax(masks, axis=1), most)
        left = 2 * (most - first.astype(jnp.int32))
        left = jnp.where(jnp.asarray(self.expansions) > 0, self.expansions, left)
        return Memory(chain.prompt_mask, most, left)

    def __call__(
        self,
        denoiser: Denoiser,
        process: ResizesMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        del s, t
        # The prompt moves with the text: from here on the memory has its positions, not the chain.
        chain = chain._replace(prompt_mask=jnp.zeros_like(chain.prompt_mask))

        def step(chain: Chain) -> Chain:
            return self._step(denoiser, process, chain, keys)

        left = jnp.any(chain.z == process.mask_id)
        with likely():
            return jax.lax.cond(left, step, lambda chain: chain, chain)

    def _step(self, denoiser: Denoiser, process: ResizesMasks, chain: Chain, keys: Array) -> Chain:
        of_token, of_order = split_keys(keys)
        masks, held = chain.z == process.mask_id, chain.z != process.absent_id
        size = jnp.sum(held, axis=1, dtype=jnp.int32)
        can_grow = (size < chain.memory.most) & (chain.memory.left > 0)
        logits = self._logits(denoiser, process, chain.z, held, can_grow)
        tokens = draw_token(of_token, self.transform(logits))
        score = score_of(self.score, self.transform.warm(logits), tokens)
        score = jnp.where(masks, score + self.noise * gumbel(of_order, score), -jnp.inf)
        due = jnp.minimum(self.per_step, jnp.sum(masks, axis=1))
        chosen = lowest(-score, due)
        z = jnp.where(chosen, tokens, chain.z)
        confidence = jnp.where(chosen, probability(logits, tokens), chain.confidence)
        evaluations = chain.evaluations + (due > 0)
        chain = chain._replace(z=z, confidence=confidence, evaluations=evaluations)
        deleted = self._deleted(chosen & (tokens == process.delete_id), masks, chain.memory.given)
        return resized(process, chain, chosen & (tokens == process.expand_id), deleted)

    def _logits(
        self, denoiser: Denoiser, process: ResizesMasks, z: Array, held: Array, can_grow: Array
    ) -> Array:
        """Returns logits [B, L, V], without the expansion where a text cannot grow."""
        seen = denoiser.within(jnp.where(held, 0, -1).astype(jnp.int32))
        logits = seen(jnp.where(held, z, process.mask_id), jnp.zeros(len(z)))
        expands = jnp.arange(logits.shape[-1]) == process.expand_id
        return jnp.where(expands & ~can_grow[:, None, None], -jnp.inf, logits)

    def _deleted(self, drawn: Array, masks: Array, given: Array) -> Array:
        """Marks the masks to remove, bool [B, L], given those where `delete` was drawn."""
        if not self.delete_rest:
            return drawn
        # The tokens of a gap have the same number of given tokens before them.
        before = jnp.cumsum(drawn, axis=1)
        starts = jax.lax.cummax(jnp.where(given, before, 0), axis=1)
        return masks & (before > starts)

    def rounds(self, length: int, steps: int) -> int:
        """Returns the number of steps that a path shows.

        Each step draws a mask. There are at most `length` masks, plus two for each expansion. A
        text has at most 2 `length` expansions, unless `expansions` allows more, which is not known
        where the program is made.
        """
        return max(steps, 5 * length)

    def left(self, process: ResizesMasks, z: Array) -> Array:
        """Marks the masks that further steps draw: bool like z."""
        return z == process.mask_id

    def step_further(
        self, denoiser: Denoiser, process: ResizesMasks, chain: Chain, keys: Array, number: Array
    ) -> Chain:
        """Takes a step with the keys of `finish`."""
        end = jnp.float32(0.0)
        return self(denoiser, process, chain, end, end, fold_keys(keys, number))

    def finish(
        self,
        denoiser: Denoiser,
        process: ResizesMasks,
        chain: Chain,
        keys: Array,
        taken: Array | int = 0,
    ) -> Chain:
        """Takes further steps until no mask is left, if the grid has too few."""
        return further_steps(self, denoiser, process, chain, keys, taken=taken)


def resized(process: ResizesMasks, chain: Chain, expanded: Array, deleted: Array) -> Chain:
    """Returns the chain with two masks in place of expanded symbols, and without deleted ones.

    Both are bool [B, L]. If there is no room for all expansions, or not enough are left, those
    further to the right remain one mask.
    """
    expanded &= ~deleted
    kept, memory = (chain.z != process.absent_id) & ~deleted, chain.memory
    room = jnp.minimum(memory.most - jnp.sum(kept, axis=1), memory.left)
    new = expanded & (jnp.cumsum(expanded, axis=1) <= room[:, None])
    z = jnp.where(expanded, process.mask_id, chain.z)
    confidence = jnp.where(expanded, 0.0, chain.confidence)

    def moved(fresh: float, old: Array, empty: float) -> Array:
        gaps = jnp.pad(new, ((0, 0), (0, 1)))
        return merged(jnp.full(gaps.shape, fresh), old, empty, gaps, kept)

    memory = memory._replace(
        given=moved(False, memory.given, False), left=memory.left - jnp.sum(new, axis=1)
    )
    z = moved(process.mask_id, z, process.absent_id)
    return chain._replace(z=z, confidence=moved(0.0, confidence, 1.0), memory=memory)
