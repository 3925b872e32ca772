"""Random keys and draws of a batch, with one key for each sequence."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array

# Probabilities are rounded to integer multiples of this unit, so that their sums are exact.
UNIT = 2.0**-31


def split_keys(keys: Array, count: int = 2) -> Array:
    """Splits each key [B] into `count` independent ones: [count, B]."""
    return jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, count))(keys), 1, 0)


def fold_keys(keys: Array, number: Array | int) -> Array:
    """Folds a number into each key [B]."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def uniforms(keys: Array, length: int) -> Array:
    """Draws a uniform for each position, float32 [B, length], with keys [B]."""
    return jax.vmap(lambda key: jax.random.uniform(key, (length,)))(keys)


def uniform_symbols(keys: Array, length: int, count: int) -> Array:
    """Draws one of `count` symbols for each position, int32 [B, length], with keys [B]."""
    draw = jax.vmap(lambda key: jax.random.randint(key, (length,), 0, count))
    return draw(keys).astype(jnp.int32)


def draw_rows(keys: Array, p: Array, x: Array) -> Array:
    """Draws y ~ p[b, x[b, n]]: p [B, V, S], x [B, L] and keys [B] -> int32 [B, L].

    Uses inverse transform sampling: a binary search for a random 32-bit number in the cumulative
    sums of the row. Probabilities are exact to 2^-31, and a symbol of probability 0 is never drawn.
    Each position needs one random number and log2(S) steps, where Gumbel noise needs S numbers.
    """
    counts = (jnp.minimum(p, 1.0) / UNIT).astype(jnp.uint32)
    ends = jnp.cumsum(counts, axis=-1, dtype=jnp.uint32)
    total = jnp.take_along_axis(ends[..., -1], x, axis=1)
    bits = jax.vmap(lambda key: jax.random.bits(key, x.shape[1:], jnp.uint32))(keys)
    return _passed(ends, x, _scaled(bits, total))


def draw_symbol(p: Array, bits: Array) -> Array:
    """Draws k with probability p[..., k] from uniform bits: [..., S], uint32 [...] -> int32.

    A probability is exact to 2^-31, and 0 is never drawn.
    """
    counts = (jnp.minimum(p, 1.0) / UNIT).astype(jnp.uint32)
    ends = jnp.cumsum(counts, axis=-1, dtype=jnp.uint32)
    number = _scaled(bits, ends[..., -1])
    return jnp.sum(ends <= number[..., None], axis=-1, dtype=jnp.int32)


def _passed(ends: Array, x: Array, number: Array) -> Array:
    """Counts the cumulative sums of row x that are at most `number`, by bisection: int32 [B, L]."""
    states = ends.shape[-1]
    flat, first = ends.reshape(len(ends), -1), x * states
    found = jnp.zeros_like(x)
    for power in reversed(range(states.bit_length())):
        asked = found + 2**power
        end = jnp.take_along_axis(flat, first + jnp.minimum(asked, states) - 1, axis=1)
        found = jnp.where((asked <= states) & (end <= number), asked, found)
    return jnp.minimum(found, states - 1).astype(jnp.int32)


def _scaled(bits: Array, total: Array) -> Array:
    """Computes floor(bits total / 2^32) of uint32, from products of halves."""
    low, high = bits & 0xFFFF, bits >> 16
    total_low, total_high = total & 0xFFFF, total >> 16
    first, second = high * total_low, low * total_high
    carried = (low * total_low >> 16) + (first & 0xFFFF) + (second & 0xFFFF)
    return high * total_high + (first >> 16) + (second >> 16) + (carried >> 16)
