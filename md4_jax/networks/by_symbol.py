"""First block of a network of few symbols: each symbol's query, key and value computed once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.networks.chosen import own_programs
from md4_jax.networks.growing import symbols_read
from md4_jax.protocols import Array, Mixture

# Smallest number of tokens of a sequence for each symbol, and of features, tokens times width.
LEAST_TOKENS, LEAST = 4, 2**17


class Symbols(NamedTuple):
    """Tokens of few symbols, as inputs of the first block.

    z        int32 [B, L] in 0..S-1
    vectors  [B, S, D], the vector of each symbol
    """

    z: Array
    vectors: Array

    def spread(self, *each_BxSxF: Array) -> list[Array]:
        """Returns arrays [B, L, ...] with each token's row of [B, S, ...]."""
        return [_spread(x, self.z) for x in each_BxSxF]

    def kept(self, mixed: Array) -> Array:
        """Returns the results of attention at all positions."""
        return mixed


@jax.custom_vjp
def _spread(x: Array, z: Array) -> Array:
    return x[jnp.arange(len(z))[:, None], z]


def _backward(kept: tuple, g: Array) -> tuple[Array, None]:
    # A product, since XLA scatters slowly on CPUs.
    (z, shape), flat = kept, g.reshape(*g.shape[:2], -1)
    here = jax.nn.one_hot(z, shape[1], dtype=g.dtype)
    found = jnp.einsum("bls,blf->bsf", here, flat, precision=jax.lax.Precision.HIGHEST)
    return found.reshape(shape), None


_spread.defvjp(lambda x, z: (_spread(x, z), (z, x.shape)), _backward)


def symbols_of(module: Any, z: Array | Mixture) -> Symbols | None:
    """Returns what the first block reads instead of tokens, or None if it must read each token."""
    if not module.by_symbol or isinstance(z, Mixture) or not _suits(module.options, z):
        return None
    vectors = module.embedded(jnp.arange(symbols_read(module.options))[None], None)
    return Symbols(z, jnp.broadcast_to(vectors, (len(z), *vectors.shape[1:])))


def _suits(o: Any, z: Array) -> bool:
    """Whether the first block's input at a token depends only on its symbol, and symbols are few.

    All tokens of a sequence have the same condition.
    """
    added = o.positions or o.local_width or o.embedding_dropout or o.lora_dropout
    few = symbols_read(o) * LEAST_TOKENS <= z.shape[1] and z.size * o.size >= LEAST
    return own_programs(o) and few and not (added or o.bare) and o.depth > 1
