"""Logits of the symbols from the head of a transformer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.networks.products import product
from md4_jax.protocols import Array


def tied_head(table: Array, bias: Array | None, options: Any) -> Callable[[Array], Array]:
    """Returns a tied head, which multiplies by the table of the embedding, [rows, D]."""
    dtype = jnp.dtype(options.dtype)

    def head(h: Array) -> Array:
        logits = product(h.astype(dtype), table.astype(dtype).T, options.products)
        return logits if bias is None else logits + bias.astype(dtype)

    return head


def of_symbols(head: Callable, h: Array, symbols: int, *, padded: bool) -> Array:
    """Returns float32 logits [..., V] of h [..., D]; padded: and -inf for the head's other rows."""
    logits = head(h).astype(jnp.float32)
    if padded:
        return logits + jnp.where(jnp.arange(logits.shape[-1]) < symbols, 0.0, -jnp.inf)
    return jax.lax.slice_in_dim(logits, 0, symbols, axis=-1)
