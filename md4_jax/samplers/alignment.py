"""Blocks that begin where the prompt of each text ends."""

import jax.numpy as jnp

from md4_jax.protocols import Array, Blockwise, Denoiser, Prompt
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.paths import Parts


def after_prompts(
    denoiser: Denoiser, prompt: Prompt, block: int, *, whole: bool = False, anywhere: bool = False
) -> tuple[Denoiser, Prompt, Array | None]:
    """Returns (denoiser, prompt, shift [B]) of texts [B, N] whose blocks begin after the prompts.

    Texts are moved to the right by `shift`, so that each prompt ends where a block ends. Positions
    outside of a text are masked out. If blocks cannot begin anywhere, nothing is moved and the
    shift is None.

    whole     the network reads whole texts (`Blockwise.around`). It does not notice that they are
              moved, and the last block of a text is shorter if the text ends within it
    anywhere  the network was not trained in blocks, so that they may begin anywhere. Otherwise it
              depends on the network
    """
    blocks, length = denoiser.blocks, prompt.tokens.shape[1]
    if not (whole or blocks.anywhere or anywhere):
        return denoiser, prompt, None
    given = jnp.sum(jnp.cumprod(prompt.mask.astype(jnp.int32), axis=1), axis=1)
    shift = -given % block
    # Enough for a text that is moved by block - 1.
    place = jnp.arange(-(-(length + block - 1) // block) * block) - shift[:, None]
    inside = (place >= 0) & (place < length)
    tokens, mask = (_taken(jnp.asarray(x), jnp.clip(place, 0, length - 1)) for x in prompt)
    # No token is drawn before a text, nor in the last block of a text that was not moved.
    outside = True if whole else (place < 0) | (shift == 0)[:, None]
    moved = Prompt(jnp.where(inside, tokens, 0), jnp.where(inside, mask, outside))
    if whole:
        return denoiser._replace(blocks=_unmoved(blocks, shift, length)), moved, shift

    def empty_cache(rows: int, window: int):
        return blocks.beginning(blocks.empty_cache(rows, window), shift)

    return denoiser._replace(blocks=blocks._replace(empty_cache=empty_cache)), moved, shift


def _unmoved(blocks: Blockwise, shift: Array, length: int) -> Blockwise:
    """Returns the functions whose `around` is given moved texts, and reads them unmoved."""

    def around(z: Array, t: Array, begin: Array, cache, *known: bool):
        if cache is not None:
            return blocks.around(z, t, begin - shift, cache, *known)
        h, cache = blocks.around(_taken(z, shift[:, None] + jnp.arange(length)), t, 0, None)
        place = jnp.clip(jnp.arange(z.shape[1]) - shift[:, None], 0, length - 1)
        return jnp.take_along_axis(h, place[..., None], axis=1), cache

    return blocks._replace(around=around)


def moved_back(
    chain: Chain, parts: Parts | None, shift: Array | None, prompt: Prompt
) -> tuple[Chain, Parts | None]:
    """Returns the drawn texts at their original positions.

    Tokens beyond N, which fill the last block, are dropped.
    """
    if shift is None:
        return chain, parts
    back = jnp.arange(prompt.tokens.shape[1]) + shift[:, None]
    rest = chain._replace(
        z=_taken(chain.z, back),
        prompt_mask=jnp.asarray(prompt.mask),
        confidence=_taken(chain.confidence, back),
    )
    if parts is None:
        return rest, None
    traced = parts.z.shape[2]
    first = tuple(_taken(x, back[:traced]) for x in parts.first)
    return rest, parts._replace(begin=parts.begin - shift[None, :traced], first=first)


def _taken(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=-1)
