"""Dropout with a key for each sequence: draws do not depend on mesh and microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array

# Folded into the keys of a training step, which also draw the noise of the forward process.
DROPOUT, LABEL, EMBEDDING, LAYERS = 0x64726F70, 0, 1, 2
# Folded into a layer's keys from ADAPTERS on, for the adapters of these matrices.
ADAPTERS = 4
ADAPTED = ("query", "key", "value", "out", "gate", "up", "down", "input_gate", "output_gate")


def folded(keys: Array, number: Array | int) -> Array:
    """Folds a number into each of the keys [B]."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def layer_keys(keys: Array | None, depth: int) -> Array | None:
    """Returns the keys of each layer, [depth, B]."""
    if keys is None:
        return None
    return jax.vmap(lambda layer: folded(keys, LAYERS + layer))(jnp.arange(depth))


def kept(keys: Array, rate: float, shape: tuple[int, ...]) -> Array:
    """Draws which entries of each sequence are kept: bool [B, *shape]."""
    return jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))(keys)


def scaled(x: Array, keep: Array, rate: float) -> Array:
    """Sets dropped entries to 0 and divides the others by 1 - rate, which keeps the mean."""
    return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)


def for_adapter(
    o: Any, name: str, x: Array, keys: Array | None, length: int, needed: Callable[[Array], Array]
) -> Array | None:
    """Applies dropout to the input x of a layer's adapter; None: nothing is dropped.

    length: number of positions for which dropout is drawn. needed: selects those of x.
    """
    if keys is None or not (o.lora_rank and o.lora_dropout):
        return None
    own = folded(keys, ADAPTERS + ADAPTED.index(name))
    return scaled(x, needed(kept(own, o.lora_dropout, (length, x.shape[-1]))), o.lora_dropout)
