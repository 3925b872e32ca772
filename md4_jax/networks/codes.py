"""Counts stored in one byte each: small counts exactly, large ones rounded."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array

# Bits of a code that follow the leading one of a count. Counts up to 2^(DIGITS + 1) are exact;
# larger ones have a relative error of at most 2^-(DIGITS + 1).
DIGITS = 3
# Largest count that any part of the program has, and its code.
LARGEST, MOST = 2**30, 224


def coded(counts: Array) -> Array:
    """Returns the code of each count, uint8; counts are int32 from 0 to LARGEST.

    A code c below 2^(DIGITS + 1) is the count itself. Else the count is m * 2^e with
    c = e * 2^DIGITS + m and m from 2^DIGITS to 2^(DIGITS + 1) - 1, rounded to the nearest.
    """
    leading = 31 - jax.lax.clz(jnp.maximum(counts, 1))
    exponents = jnp.maximum(leading - DIGITS, 0)
    halves = (1 << exponents) >> 1
    # A mantissa that is rounded up to 2^(DIGITS + 1) becomes the first of the next exponent.
    return (exponents * 2**DIGITS + ((counts + halves) >> exponents)).astype(jnp.uint8)


def decoded(codes: Array) -> Array:
    """Returns the count of each code of `coded`, int32."""
    codes = codes.astype(jnp.int32)
    exponents = jnp.maximum((codes >> DIGITS) - 1, 0)
    return (codes - (exponents << DIGITS)) << exponents
