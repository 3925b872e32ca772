"""Sampling block by block, with a cache of the earlier blocks: docs/samplers.md."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import fold_keys
from md4_jax.protocols import Accelerator, Array, Blockwise, Denoiser, Prompt
from md4_jax.samplers.alignment import after_prompts
from md4_jax.samplers.chain import Chain, SamplerStep
from md4_jax.samplers.draw import probability
from md4_jax.samplers.guidance import with_clean_prompt
from md4_jax.samplers.loop import Course, Frames, continued, put_prompt, start
from md4_jax.samplers.paths import Parts

# In a path of noise without a mask, the symbol of blocks that are not begun.
UNSEEN = -1


class Stop(NamedTuple):
    """Conditions that end a sequence early, after the block that meets one of them.

    symbols      the block has one of these drawn symbols
    min_entropy  the `entropy` of the last tokens is below this number of nats; 0: never
    """

    symbols: tuple[int, ...] = ()
    min_entropy: float = 0.0

    def met(self, drawn: Array, z: Array, end: Array, window: int) -> Array:
        """Returns whether each sequence ends with this block, bool [B].

        drawn [B, P] are the block's symbols, -1 in the prompt. z [B, N] is filled up to `end`.
        """
        ends = jnp.zeros(len(drawn), bool)
        if self.symbols:
            ends = jnp.any(jnp.isin(drawn, jnp.array(self.symbols)), axis=1)
        if self.min_entropy and window <= z.shape[1]:
            begin = jnp.maximum(0, end - window)
            last = jax.lax.dynamic_slice_in_dim(z, begin, window, axis=1)
            ends = ends | (entropy(last) < self.min_entropy) & (end >= window)
        return ends


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Draws x_b ~ p(x_b | earlier tokens) block by block (block diffusion, arXiv:2503.09573).

    Each block is sampled as `loop.sample` does, from masks or from other noise. dual_cache,
    next_token and Stop.min_entropy are for masks.

    block   number of tokens of a block
    window  number of earlier tokens that a block sees, a multiple of block. Only their keys and
            values are kept, so that a text may be far longer than the training length
    stop    when a sequence ends. Its later positions stay masked, or hold the first of the symbols
            that end it; when all sequences have ended, sampling stops
    cached  False computes the cache again before each block: the same samples, more slowly
    dual_cache  for a network that sees both sides: a block also sees the later tokens, masks or
                given ones. Before each block the keys and values of all other tokens are computed,
                and kept while the block is drawn (the dual cache of Fast-dLLM, arXiv:2505.22618).
                `window` and `cached` then have no effect
    next_token  for a network that is shifted or has a causal context: the first token of each block
                but that of the text is the likeliest one after the block before, whatever the
                temperature, and the block's steps begin with it (Fast-dLLM v2, arXiv:2509.26328;
                Nemotron-Labs-Diffusion, arXiv:2607.05722). The cache has its features, so that it
                costs no network evaluation
    clean_prompts  the network was trained on clean prompts: noise of other kinds than masks leaves
                those within a block as they are

    Where the network lets blocks begin anywhere, the first one begins where the prompt ends.
    """

    block: int
    window: int
    stop: Stop = Stop()
    cached: bool = True
    dual_cache: bool = False
    next_token: bool = False
    clean_prompts: bool = False

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
        """Samples like `loop.sample`; the prompt is [B, N] with N a multiple of block.

        The paths of the first `trace` sequences go block after block.
        """
        run = functools.partial(self._run, process=process, step=step, grid=grid, keys=keys)
        if denoiser.blocks.beginning is None:
            return run(denoiser, prompt=prompt, trace=trace)
        return after_prompts(run, denoiser, prompt, self.block, trace)

    def _run(
        self,
        denoiser: Denoiser,
        process: Any,
        step: SamplerStep,
        *,
        grid: np.ndarray,
        keys: Array,
        prompt: Prompt,
        trace: int,
    ) -> tuple[Chain, Parts | None]:
        blocks, block, blank = denoiser.blocks, self.block, self._blank(process)
        unseen = blank if isinstance(process, RevealsMasks) else UNSEEN
        rows, length = prompt.tokens.shape

        def one(b: Array, cache: Any) -> tuple[Chain, Frames | None]:
            within = denoiser._replace(
                features=lambda z, t: self._seen(blocks, z, t, b, cache)[0],
                accelerator=Accelerator(denoiser.accelerator.groups),
            )
            here = jax.tree.map(lambda x: _block(x, b, block), prompt)
            within = with_clean_prompt(within, process, here) if self.clean_prompts else within
            own = fold_keys(keys, b)
            chain = start(process, step, here, fold_keys(own, len(grid)))
            chain = _with_next(denoiser, process, chain, cache) if self.next_token else chain
            return _unless_given(
                within, process, step, chain, Course(grid, own, here.tokens, trace)
            )

        def body(state):
            b, cache, z, confidence, evaluations, ended, frames = state
            cache = self._before(blocks, z, b, cache)
            chain, path = one(b, cache)
            new = jnp.where(ended[:, None] & ~chain.prompt_mask, blank, chain.z)
            if not self.dual_cache:
                cache = blocks.read(new, jnp.zeros(rows), cache)
            put = jax.lax.dynamic_update_slice_in_dim
            z = put(z, new, b * block, axis=1)
            confidence = put(confidence, chain.confidence, b * block, axis=1)
            used = chain.evaluations + self.dual_cache
            evaluations = evaluations + jnp.where(ended, 0, used)
            frames = _with_path(frames, path, b, ended[:trace, None])
            drawn = jnp.where(chain.prompt_mask, -1, new)
            ended = ended | self.stop.met(drawn, z, (b + 1) * block, self.window)
            return b + 1, cache, z, confidence, evaluations, ended, frames

        begin = jnp.where(prompt.mask, prompt.tokens, blank)
        none = jnp.zeros(rows, jnp.int32)
        cache = self._empty(blocks, begin)
        frames = _unreached(jax.eval_shape(one, jnp.int32(0), cache)[1], prompt, unseen)
        confidence = jnp.asarray(prompt.mask).astype(jnp.float32)
        state = (jnp.int32(0), cache, begin, confidence, none, none > 0, frames)
        _, _, z, confidence, evaluations, _, frames = jax.lax.while_loop(
            lambda state: (state[0] < length // block) & ~jnp.all(state[5]), body, state
        )
        chain = Chain(z, prompt.mask, confidence, evaluations)
        return chain, _parts(frames, prompt, unseen) if trace else None

    def _blank(self, process: Any) -> int:
        """Returns what holds the place of tokens that are not drawn, which no block ever sees."""
        if isinstance(process, RevealsMasks):
            return process.mask_id
        return self.stop.symbols[0] if self.stop.symbols else 0

    def _empty(self, blocks: Blockwise, z: Array) -> Any:
        """Makes a cache of the shapes that a text z needs."""
        if not self.dual_cache:
            return blocks.empty_cache(len(z), self.window)
        shapes = jax.eval_shape(lambda z: self._before(blocks, z, jnp.int32(0), None), z)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def _before(self, blocks: Blockwise, z: Array, b: Array, cache: Any) -> Any:
        """Returns what block b of a text z sees besides itself."""
        if self.dual_cache:
            return blocks.around(z, jnp.zeros(len(z)), 0, None)[1]
        return cache if self.cached else _recomputed(blocks, z, b, self.block, self.window)

    def _seen(
        self, blocks: Blockwise, z: Array, t: Array, b: Array, cache: Any
    ) -> tuple[Array, Any]:
        """Returns (features of block b, cache with it)."""
        if self.dual_cache:
            return blocks.around(z, t, b * self.block, cache)
        return blocks.append_block(z, t, cache)


def _unless_given(
    denoiser: Denoiser, process: Any, step: SamplerStep, chain: Chain, course: Course
) -> tuple[Chain, Frames | None]:
    """Draws a block as `continued` does, without the network if all sequences have it given."""

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

    return jax.lax.cond(jnp.all(chain.prompt_mask), keep, draw, chain)


def _with_next(denoiser: Denoiser, process: Any, chain: Chain, cache: Any) -> Chain:
    """Puts the likeliest token into the first position of a block, if that is a mask."""
    h, follows = denoiser.blocks.following(cache)
    logits = denoiser.unembed(h)
    token = jnp.argmax(logits, axis=-1).astype(chain.z.dtype)
    put = follows & process.is_noise(chain.z[:, 0])
    sure = jnp.where(put, probability(logits, token), chain.confidence[:, 0])
    return chain._replace(
        z=chain.z.at[:, 0].set(jnp.where(put, token, chain.z[:, 0])),
        confidence=chain.confidence.at[:, 0].set(sure),
    )


def entropy(tokens: Array) -> Array:
    """Entropy of each row's token histogram, in nats: [B, W] -> [B]."""
    alike = jnp.sum(tokens[:, :, None] == tokens[:, None, :], axis=2)
    return -jnp.mean(jnp.log(alike / tokens.shape[1]), axis=1)


def _block(x: Array, b: Array, block: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, b * block, block, axis=1)


def _recomputed(blocks: Blockwise, z: Array, b: Array, block: int, window: int) -> Any:
    """Computes the cache of the first b blocks of z from their tokens."""
    zeros = jnp.zeros(len(z))

    def read(i: Array, cache: Any) -> Any:
        return blocks.read(_block(z, i, block), zeros, cache)

    return jax.lax.fori_loop(0, b, read, blocks.empty_cache(len(z), window))


def _unreached(shapes: Frames | None, prompt: Prompt, unseen: int) -> Frames | None:
    """Returns the frames [N / P, F, R, P] of blocks that are not drawn: the prompt alone."""
    if shapes is None:
        return None
    count, traced, size = shapes.z.shape

    def of_blocks(x: Array) -> Array:
        blocks = jnp.moveaxis(x[:traced].reshape(traced, -1, size), 1, 0)[:, None]
        return jnp.broadcast_to(blocks, (len(blocks), count, traced, size))

    return Frames(*(of_blocks(x) for x in _given(prompt, unseen)))


def _with_path(frames: Frames | None, path: Frames | None, b: Array, ended: Array) -> Frames | None:
    """Puts the path [F, R, P] of block b into the frames, but of texts that have ended [R, 1]."""
    return jax.tree.map(lambda all, now: all.at[b].set(jnp.where(ended, all[b], now)), frames, path)


def _given(prompt: Prompt, unseen: int) -> tuple[Array, Array]:
    """Returns (tokens, confidence) of a text of which nothing is drawn, like the prompt."""
    return jnp.where(prompt.mask, prompt.tokens, unseen), jnp.where(prompt.mask, 1.0, 0.0)


def _parts(frames: Frames, prompt: Prompt, unseen: int) -> Parts:
    """Returns the paths [N / P, F, R, P] of the blocks with their places in the texts."""
    blocks, _, traced, size = frames.z.shape
    begin = jnp.broadcast_to(jnp.arange(blocks)[:, None] * size, (blocks, traced))
    z, confidence = (x[:traced] for x in _given(prompt, unseen))
    return Parts(*frames, begin, (z, confidence))
