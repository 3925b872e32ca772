"""Sampling block by block, with a cache of the earlier blocks: docs/samplers.md."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import fold_keys
from md4_jax.protocols import Accelerator, Array, Blockwise, Denoiser, Prompt
from md4_jax.runtime.scopes import likely
from md4_jax.samplers.alignment import after_prompts, moved_back
from md4_jax.samplers.block_paths import parts_of, unreached, with_path
from md4_jax.samplers.chain import Chain, SamplerStep
from md4_jax.samplers.dual_cache import among, read_whole
from md4_jax.samplers.first_tokens import with_first
from md4_jax.samplers.given_blocks import read_prompt
from md4_jax.samplers.guidance import with_clean_prompt
from md4_jax.samplers.loop import Course, Frames, continued, put_prompt, start
from md4_jax.samplers.paths import Parts
from md4_jax.samplers.stops import Stop

# Symbol of blocks that are not begun in a path, for noise without a mask.
UNSEEN = -1


class Text(NamedTuple):
    """State of texts whose blocks before b are drawn.

    b            int32 [], the next block
    cache        the network's cache of the blocks before it
    z            int32 [B, N], symbols
    confidence   float32 [B, N], as in `Chain`
    evaluations  int32 [B], network evaluations so far
    ended        bool [B], whether a block has met a condition of `Stop`
    first        int32 [B], where each text begins
    """

    b: Array
    cache: Any
    z: Array
    confidence: Array
    evaluations: Array
    ended: Array
    first: Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Draws x_b ~ p(x_b | earlier tokens) block by block (block diffusion, arXiv:2503.09573).

    Each block is sampled as `loop.sample` does, from masks or from other noise. dual_cache,
    next_token and Stop.min_entropy are for masks.

    block   number of tokens of a block
    window  number of earlier tokens that a block sees, a multiple of block. Only their keys and
            values are cached, so that a text may be far longer than the training length
    stop    when a sequence ends. Its later positions remain masks, or have the first of the symbols
            that end it; when all sequences have ended, sampling stops
    cached  False recomputes the cache before each block: the same samples, more slowly
    dual_cache  for a bidirectional network: a block also sees the later tokens, masks or given
                ones. The keys and values of all other tokens are computed before each block, and
                not updated while it is drawn (the dual cache of Fast-dLLM, arXiv:2505.22618).
                The same pass is the first evaluation of the block. `window` and `cached` then
                have no effect
    next_token  for a network that is shifted or has a causal context: the first token of each
                block, except the first block, is the most likely token after the previous block,
                at any temperature (Fast-dLLM v2, arXiv:2509.26328; Nemotron-Labs-Diffusion,
                arXiv:2607.05722). The cache has its features, so it costs no network evaluation.
                With dual_cache, which needs a shifted network, the token is drawn like all others,
                from the pass over the whole text (Fast-dLLM's code for Dream)
    clean_prompts  the network was trained on clean prompts: prompts within a block are not noised,
                also with noise other than masks
    anywhere    the network was not trained in blocks, so that they may begin anywhere

    In each text of a batch, the first block to be drawn begins where the prompt ends, with
    dual_cache, with `anywhere`, and if a network in blocks lets them begin anywhere. Otherwise
    blocks begin at multiples of `block`.
    """

    block: int
    window: int
    stop: Stop = Stop()
    cached: bool = True
    dual_cache: bool = False
    next_token: bool = False
    clean_prompts: bool = False
    anywhere: bool = False

    def __call__(
        self,
        denoiser: Denoiser,
        process: Any,
        step: SamplerStep,
        *,
        grid: np.ndarray,
        keys: Array,
        prompt: Prompt,
        trace: int = 0,
    ) -> tuple[Chain, Parts | None]:
        """Samples like `loop.sample`; the prompt is [B, N].

        Without dual_cache, N must be a multiple of block.

        The paths of the first `trace` sequences are returned block by block.
        """
        denoiser, moved, shift = self.placed(denoiser, prompt)
        text = self.begun(denoiser, process, moved, shift)
        course = Course(grid, keys, moved.tokens, trace)
        chain, parts = self._run(denoiser, process, step, text, moved, course)
        return moved_back(chain, parts, shift, prompt)

    def _run(
        self,
        denoiser: Denoiser,
        process: Any,
        step: SamplerStep,
        text: Text,
        prompt: Prompt,
        course: Course,
    ) -> tuple[Chain, Parts | None]:
        (grid, keys, _, trace), unseen = course, self.unseen(process)

        def draw(text: Text) -> tuple[Text, Chain, Frames | None]:
            own = fold_keys(keys, text.b)
            first = fold_keys(own, len(grid))
            text, chain = self.opened(denoiser, process, step, text, prompt, first)
            within = self.within(denoiser, process, text, prompt)
            part = Course(grid, own, self.part(prompt, text).tokens, trace)
            return text, *_unless_given(within, process, step, chain, part)

        def body(state: tuple[Text, Frames | None]) -> tuple[Text, Frames | None]:
            before, frames = state
            text, chain, path = draw(before)
            frames = with_path(frames, path, text.b, text.ended[:trace, None])
            return self.closed(denoiser, process, text, chain), frames

        if self.cached and not (trace or self.dual_cache or self.stop.min_entropy):
            text = read_prompt(denoiser.blocks, text, prompt, block=self.block, window=self.window)
        frames = unreached(jax.eval_shape(draw, text)[2], prompt, unseen)
        count = prompt.tokens.shape[1] // self.block
        text, frames = jax.lax.while_loop(
            lambda state: (state[0].b < count) & ~jnp.all(state[0].ended), body, (text, frames)
        )
        chain = Chain(text.z, prompt.mask, text.confidence, text.evaluations)
        return chain, parts_of(frames, prompt, unseen) if trace else None

    def placed(self, denoiser: Denoiser, prompt: Prompt) -> tuple[Denoiser, Prompt, Array | None]:
        """Returns (denoiser, prompt, shift) of texts moved so that blocks begin at their places."""
        return after_prompts(
            denoiser, prompt, self.block, whole=self.dual_cache, anywhere=self.anywhere
        )

    def begun(self, denoiser: Denoiser, process: Any, prompt: Prompt, shift: Array | None) -> Text:
        """Returns the texts before the first block is drawn, moved by `shift` or not at all."""
        z = jnp.where(prompt.mask, prompt.tokens, self._blank(process))
        none = jnp.zeros(len(z), jnp.int32)
        confidence = jnp.asarray(prompt.mask).astype(jnp.float32)
        cache = self._empty(denoiser.blocks, z)
        first = none if shift is None else shift
        return Text(jnp.int32(0), cache, z, confidence, none, none > 0, first)

    def opened(
        self,
        denoiser: Denoiser,
        process: Any,
        step: SamplerStep,
        text: Text,
        prompt: Prompt,
        keys: Array,
    ) -> tuple[Text, Chain]:
        """Returns the texts, with the cache of their next block, and its chain at t = 1."""
        part = self.part(prompt, text)
        cache = self._before(denoiser.blocks, text, jnp.all(part.mask))
        chain = start(process, step, part, keys)
        if self.next_token:
            of_next = self._next(denoiser.blocks, text.b, cache)
            # `start` splits these keys in two.
            drawn = fold_keys(keys, 2) if self.dual_cache else None
            after = with_first(denoiser, process, step.transform, chain, of_next, drawn)
            put = jnp.any(after.z != chain.z, axis=1) & self.dual_cache
            chain = after._replace(evaluations=chain.evaluations + put)
        return text._replace(cache=cache), chain

    def within(self, denoiser: Denoiser, process: Any, text: Text, prompt: Prompt) -> Denoiser:
        """Returns the denoiser of the next block of `opened` texts."""
        blocks = denoiser.blocks
        own = denoiser._replace(
            features=lambda z, t: self._seen(blocks, z, t, text.b, text.cache),
            accelerator=Accelerator(denoiser.accelerator.groups),
        )
        if not self.clean_prompts:
            return own
        return with_clean_prompt(own, process, self.part(prompt, text))

    def part(self, prompt: Prompt, text: Text) -> Prompt:
        """Returns the prompt of the next block, [B, P]."""
        return jax.tree.map(lambda x: _block(x, text.b, self.block), prompt)

    def closed(self, denoiser: Denoiser, process: Any, text: Text, chain: Chain) -> Text:
        """Returns the texts with a drawn block added; texts that had ended do not change."""
        b, ended, blank = text.b, text.ended, self._blank(process)
        new = jnp.where(ended[:, None] & ~chain.prompt_mask, blank, chain.z)
        cache = text.cache
        if not self.dual_cache:
            cache = denoiser.blocks.read(new, jnp.zeros(len(new)), cache)
        put = jax.lax.dynamic_update_slice_in_dim
        z = put(text.z, new, b * self.block, axis=1)
        drawn = jnp.where(chain.prompt_mask, -1, new)
        return Text(
            b + 1,
            cache,
            z,
            put(text.confidence, chain.confidence, b * self.block, axis=1),
            text.evaluations + jnp.where(ended, 0, chain.evaluations),
            ended | self.stop.met(drawn, z, (b + 1) * self.block, self.window, text.first),
            text.first,
        )

    def unseen(self, process: Any) -> int:
        """Returns the symbol of blocks that are not begun, in a path."""
        return self._blank(process) if isinstance(process, RevealsMasks) else UNSEEN

    def _blank(self, process: Any) -> int:
        """Returns the placeholder of tokens that are not drawn, which no block ever sees."""
        if isinstance(process, RevealsMasks):
            return process.mask_id
        return self.stop.symbols[0] if self.stop.symbols else 0

    def _empty(self, blocks: Blockwise, z: Array) -> Any:
        """Makes an empty cache with the shapes for a text z."""
        if not self.dual_cache:
            return blocks.empty_cache(len(z), self.window)
        shapes = jax.eval_shape(lambda z: read_whole(blocks, z, jnp.int32(0), self.block), z)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def _before(self, blocks: Blockwise, text: Text, given: Array) -> Any:
        """Returns the cache of the other tokens that the next block sees, if it is not given."""
        z, b, cache = text.z, text.b, text.cache
        if self.dual_cache:
            read = lambda: read_whole(blocks, z, b * self.block, self.block)  # noqa: E731
            return jax.lax.cond(given, lambda: cache, read)
        return cache if self.cached else _recomputed(blocks, z, b, self.block, self.window)

    def _next(self, blocks: Blockwise, b: Array, cache: Any) -> tuple[Array, Array]:
        """Returns the features of the first token of block b, and whether a block is before it."""
        return (cache.h[:, 0], b > 0) if self.dual_cache else blocks.following(cache)

    def _seen(self, blocks: Blockwise, z: Array, t: Array, b: Array, cache: Any) -> Array:
        """Returns the features of block b with symbols z."""
        if self.dual_cache:
            return among(blocks, z, t, b * self.block, cache, known=self.next_token)
        return blocks.append_block(z, t, cache)[0]


def _unless_given(
    denoiser: Denoiser, process: Any, step: SamplerStep, chain: Chain, course: Course
) -> tuple[Chain, Frames | None]:
    """Draws a block like `continued`, without the network if it is given in all sequences."""

    def draw(chain: Chain) -> tuple[Chain, Frames | None]:
        drawn, path = continued(denoiser, process, step, chain, course)
        return drawn._replace(memory=None), path

    shapes = jax.eval_shape(draw, chain)[1]

    def keep(chain: Chain) -> tuple[Chain, Frames | None]:
        chain = put_prompt(chain, course.tokens)
        if shapes is None:
            return chain, None
        values = Frames(chain.z[: course.trace], chain.confidence[: course.trace])
        return chain, jax.tree.map(lambda x, s: jnp.broadcast_to(x, s.shape), values, shapes)

    with likely():
        return jax.lax.cond(jnp.all(chain.prompt_mask), keep, draw, chain)


def _block(x: Array, b: Array, block: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, b * block, block, axis=1)


def _recomputed(blocks: Blockwise, z: Array, b: Array, block: int, window: int) -> Any:
    """Computes the cache of the first b blocks of z from their tokens."""
    zeros = jnp.zeros(len(z))

    def read(i: Array, cache: Any) -> Any:
        return blocks.read(_block(z, i, block), zeros, cache)

    return jax.lax.fori_loop(0, b, read, blocks.empty_cache(len(z), window))
