"""Blocks that begin where the prompt of each text ends."""

from collections.abc import Callable

import jax.numpy as jnp

from md4_jax.protocols import Array, Denoiser, Prompt
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.paths import Parts


def after_prompts(
    run: Callable, denoiser: Denoiser, prompt: Prompt, block: int, trace: int
) -> tuple[Chain, Parts | None]:
    """Returns what run(denoiser, prompt=, trace=) samples, with blocks after prompts [B, N].

    Texts are moved to the right, so that the tokens which begin a text end with a block. Nothing
    sees the places before a text. What is drawn beyond N, to fill the last block, is left out.
    """
    length = prompt.tokens.shape[1]
    given = jnp.sum(jnp.cumprod(prompt.mask.astype(jnp.int32), axis=1), axis=1)
    shift = -given % block
    place = jnp.arange(length + block) - shift[:, None]
    inside = (place >= 0) & (place < length)
    tokens, mask = (_taken(jnp.asarray(x), jnp.clip(place, 0, length - 1)) for x in prompt)
    # Before a text nothing is drawn, nor in the last block of one that was not moved.
    mask = jnp.where(inside, mask, (place < 0) | (shift == 0)[:, None])
    moved = Prompt(jnp.where(inside, tokens, 0), mask)
    blocks = denoiser.blocks

    def empty_cache(rows: int, window: int):
        return blocks.beginning(blocks.empty_cache(rows, window), shift)

    within = denoiser._replace(blocks=blocks._replace(empty_cache=empty_cache))
    chain, parts = run(within, prompt=moved, trace=trace)
    back = jnp.arange(length) + shift[:, None]
    rest = chain._replace(
        z=_taken(chain.z, back),
        prompt_mask=jnp.asarray(prompt.mask),
        confidence=_taken(chain.confidence, back),
    )
    if parts is None:
        return rest, None
    first = tuple(_taken(x, back[:trace]) for x in parts.first)
    return rest, parts._replace(begin=parts.begin - shift[None, :trace], first=first)


def _taken(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=-1)
