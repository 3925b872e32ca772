"""Reading of the blocks that a prompt fills, several at once, before others are drawn."""

from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Blockwise, Prompt

# Largest number of tokens that are read in one pass.
AT_ONCE = 128


def read_prompt(blocks: Blockwise, text: Any, prompt: Prompt, *, block: int, window: int) -> Any:
    """Returns the `blocks.Text` after the first blocks that all sequences are given, as one by one.

    A pass reads up to AT_ONCE tokens, if the network can do so. Blocks that do not fill a pass, and
    those of a text that is longer than the window, are left to be read one by one.
    """
    longest = min(window, prompt.tokens.shape[1])
    many = min(AT_ONCE, longest) // block
    if many < 2 or blocks.read_blocks is None:
        return text
    last = longest // (many * block) * many

    def part(x: Array, b: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, b * block, many * block, axis=1)

    def is_given(text: Any) -> Array:
        return (text.b < last) & jnp.all(part(jnp.asarray(prompt.mask), text.b))

    def read(text: Any) -> Any:
        cache = blocks.read_blocks(part(text.z, text.b), text.cache, block)
        return text._replace(b=text.b + many, cache=cache)

    return jax.lax.while_loop(is_given, read, text)
