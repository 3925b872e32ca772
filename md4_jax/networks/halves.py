"""Attention mask of block diffusion, for a noisy text followed by its clean copy."""

from typing import TypeVar

import jax
import numpy as np

Places = TypeVar("Places", np.ndarray, jax.Array)


def halves_seen(
    query: Places, key: Places, *, length: int, block: int, causal: bool = False
) -> Places:
    """Returns which positions `key` of [noisy, clean] each of `query` sees, bool [Q, K].

    A noisy position sees its own noisy block and the clean blocks before it. A clean position sees
    clean blocks up to its own, or with causal clean positions up to itself.

    query, key  int [Q] and [K], below 2 length
    """
    of_query, of_key = query[:, None] % length, key % length
    asks_clean, is_clean = query[:, None] >= length, key >= length
    own = of_query // block == of_key // block
    before = of_query // block > of_key // block
    up_to = of_query >= of_key if causal else before | own
    of_clean = is_clean & (asks_clean & up_to | ~asks_clean & before)
    return of_clean | ~is_clean & ~asks_clean & own
