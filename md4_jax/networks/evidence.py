"""Evidence of tables of counts: their estimates for the symbols at some positions."""

from typing import NamedTuple

import jax.numpy as jnp

from md4_jax.protocols import Array


class Evidence(NamedTuple):
    """Estimates of the tables for some positions, and the counts that they are based on.

    There are estimates for C symbols at a position: the whole vocabulary, or those listed there.

    estimates  logarithms from look-up k, float32 [B, P, K, C]. For all symbols: log(p_k(v) V), 0 if
               nothing is known. For listed symbols: log p_k(v), very low if look-up k does not list
               v
    counts     number of times that v occurred between these neighbours, float32 [B, P, K, C]
    counted    number of times that any symbol occurred there, float32 [B, P, K]
    symbols    the symbols v, int32 [B, P, C], padded with V if there are fewer; None: all
    """

    estimates: Array
    counts: Array
    counted: Array
    symbols: Array | None = None

    def at(self, index: Array) -> "Evidence":
        """Returns the evidence for the positions index [B, P] only."""

        def picked(x: Array | None) -> Array | None:
            if x is None:
                return None
            return jnp.take_along_axis(x, index[(..., *[None] * (x.ndim - 2))], axis=1)

        return Evidence(*(picked(x) for x in self))
