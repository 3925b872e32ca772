"""log sum_k exp of logits, with its result stored for the backward pass."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from md4_jax.protocols import Array
from md4_jax.runtime.reductions import row_max, row_sum

# Name of the result, for policies of jax.checkpoint that keep it.
NAME = "log_sum_exp"


@jax.custom_vjp
def log_sum_exp(logits: Array) -> Array:
    """Computes log sum_k exp(logits_k), [..., V] -> [...]; -inf if all logits are -inf."""
    return summed(logits)


def summed(logits: Array) -> Array:
    """Computes the same within a function with a custom gradient."""
    largest = row_max(logits)
    shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
    total = jnp.log(row_sum(jnp.exp(logits - shift))) + shift
    return checkpoint_name(total[..., 0], NAME)


def _forward(logits: Array) -> tuple[Array, tuple[Array, Array]]:
    total = summed(logits)
    return total, (logits, total)


def _backward(kept: tuple[Array, Array], slope: Array) -> tuple[Array]:
    logits, total = kept
    return (slope[..., None] * jnp.exp(logits - total[..., None]),)


log_sum_exp.defvjp(_forward, _backward)
