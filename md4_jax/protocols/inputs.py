"""Inputs of a network in place of tokens."""

from typing import NamedTuple

from md4_jax.protocols.batch import Array


class Mixture(NamedTuple):
    """Weighted sum of the embeddings of K symbols at each position, an alternative input to z.

    symbols  int32 [B, L, K], or [K] if equal at all positions; may include the mask V
    weights  float [B, L, K]; need not sum to 1 or be positive
    """

    symbols: Array
    weights: Array


class Conditioned(NamedTuple):
    """Tokens with a signal from the network's previous prediction (self-conditioning).

    Some networks accept it in place of z.

    tokens  int32 [B, L]
    signal  [B, L, D], from `Denoiser.recall`
    """

    tokens: Array
    signal: Array
