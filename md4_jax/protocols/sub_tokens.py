"""Tokens as numbers of several digits, the sub-tokens, each visible or hidden.

The code of a token is a number in base b + 1: digit 0 stands for a hidden sub-token, and c + 1 for
a visible one of value c in 0..b-1. The first sub-token is the most significant digit.
"""

import jax.numpy as jnp

from md4_jax.protocols.batch import Array, UserError

# Codes and symbols are int32.
MOST = 2**31


def base_of(symbols: int, parts: int) -> int:
    """Returns the smallest base b in which every symbol below `symbols` has `parts` digits."""
    base = max(2, round(symbols ** (1.0 / parts)))
    while base**parts < symbols:
        base += 1
    while base > 2 and (base - 1) ** parts >= symbols:
        base -= 1
    return base


def check_parts(section: str, symbols: int, parts: int) -> None:
    """Raises UserError for a number of sub-tokens below 1, or one whose codes are too many."""
    if parts < 1:
        raise UserError(f"{section}.parts must be at least 1, not {parts}")
    base = base_of(symbols, parts)
    if symbols + (base + 1) ** parts > MOST:
        raise UserError(
            f"{section}.parts={parts} gives {base + 1}^{parts} partly masked symbols for a "
            f"vocabulary of {symbols}, more than an int32 can count: reduce {section}.parts"
        )


def split_code(code: Array, base: int, parts: int) -> Array:
    """Returns the digits of codes, 0 or the value + 1: int32 [...] -> [..., parts]."""
    places = (base + 1) ** jnp.arange(parts - 1, -1, -1)
    return code[..., None] // places % (base + 1)


def joined_code(digits: Array, base: int) -> Array:
    """Returns the codes of digits, the inverse of `split_code`: int32 [..., parts] -> [...]."""
    parts = digits.shape[-1]
    places = (base + 1) ** jnp.arange(parts - 1, -1, -1)
    return jnp.sum(digits * places, axis=-1, dtype=jnp.int32)
