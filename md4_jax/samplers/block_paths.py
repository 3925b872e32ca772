"""Paths of texts that are drawn block by block."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Prompt
from md4_jax.samplers.loop import Frames
from md4_jax.samplers.paths import Parts


def unreached(shapes: Frames | None, prompt: Prompt, unseen: int) -> Frames | None:
    """Returns the frames [N / P, F, R, P] of blocks that are not drawn: only the prompt."""
    if shapes is None:
        return None
    count, traced, size = shapes.z.shape

    def of_blocks(x: Array) -> Array:
        blocks = jnp.moveaxis(x[:traced].reshape(traced, -1, size), 1, 0)[:, None]
        return jnp.broadcast_to(blocks, (len(blocks), count, traced, size))

    return Frames(*(of_blocks(x) for x in given(prompt, unseen)))


def with_path(frames: Frames | None, path: Frames | None, b: Array, ended: Array) -> Frames | None:
    """Writes the path [F, R, P] of block b into the frames, except for ended texts [R, 1]."""
    return jax.tree.map(lambda all, now: all.at[b].set(jnp.where(ended, all[b], now)), frames, path)


def given(prompt: Prompt, unseen: int) -> tuple[Array, Array]:
    """Returns (tokens, confidence) of texts of which only the prompt is known."""
    return jnp.where(prompt.mask, prompt.tokens, unseen), jnp.where(prompt.mask, 1.0, 0.0)


def parts_of(frames: Frames, prompt: Prompt, unseen: int) -> Parts:
    """Returns the paths [N / P, F, R, P] of the blocks with their positions in the texts."""
    blocks, _, traced, size = frames.z.shape
    begin = jnp.broadcast_to(jnp.arange(blocks)[:, None] * size, (blocks, traced))
    z, confidence = (x[:traced] for x in given(prompt, unseen))
    return Parts(*frames, begin, (z, confidence))
