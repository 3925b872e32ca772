"""Stopping conditions for texts that are drawn block by block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array


class Stop(NamedTuple):
    """Conditions that end a sequence early, after the block that meets one of them.

    symbols      one of these symbols was drawn in the block
    min_entropy  the `entropy` of the last tokens is below this number of nats; 0: never
    """

    symbols: tuple[int, ...] = ()
    min_entropy: float = 0.0

    def met(self, drawn: Array, z: Array, end: Array, window: int, first: Array | int = 0) -> Array:
        """Returns whether each sequence ends with this block, bool [B].

        drawn [B, P] are the block's symbols, -1 in the prompt. z [B, N] is filled up to `end`.
        first: where each text begins, int [B]; symbols before it are none of the text
        """
        ends = jnp.zeros(len(drawn), bool)
        if self.symbols:
            ends = jnp.any(jnp.isin(drawn, jnp.array(self.symbols)), axis=1)
        if self.min_entropy and window <= z.shape[1]:
            begin = jnp.maximum(0, end - window)
            last = jax.lax.dynamic_slice_in_dim(z, begin, window, axis=1)
            ends = ends | (entropy(last) < self.min_entropy) & (end - first >= window)
        return ends


def entropy(tokens: Array) -> Array:
    """Entropy of each row's token histogram, in nats: [B, W] -> [B]."""
    alike = jnp.sum(tokens[:, :, None] == tokens[:, None, :], axis=2)
    return -jnp.mean(jnp.log(alike / tokens.shape[1]), axis=1)
