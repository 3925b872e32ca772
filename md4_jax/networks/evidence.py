"""Evidence of tables of counts: what they say of the symbols at some positions."""

from typing import NamedTuple

import jax.numpy as jnp

from md4_jax.protocols import Array


class Evidence(NamedTuple):
    """Estimates of the tables for some positions, and how much they rest on.

    C symbols are told of at a position: all of the vocabulary, or those that a table has listed.

    estimates  logarithms that look-up k gives, float32 [B, P, K, C]: of all symbols log(p_k(v) V),
               0 where nothing is known; of listed ones log p_k(v), very low where k lists others
    counts     how often v stood between these neighbours, float32 [B, P, K, C]
    counted    how often any symbol stood there, float32 [B, P, K]
    symbols    the symbols v, int32 [B, P, C], V where there are fewer than C; None: all
    """

    estimates: Array
    counts: Array
    counted: Array
    symbols: Array | None = None

    def at(self, index: Array) -> "Evidence":
        """Returns the evidence of the positions index [B, P] alone."""

        def picked(x: Array | None) -> Array | None:
            if x is None:
                return None
            return jnp.take_along_axis(x, index[(..., *[None] * (x.ndim - 2))], axis=1)

        return Evidence(*(picked(x) for x in self))
