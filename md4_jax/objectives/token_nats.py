"""The one place where logits over the vocabulary are reduced."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Batch, Denoiser


def token_nats(logits: Array, x: Array) -> Array:
    """-log softmax(logits)[x] in nats, in float32 or wider: logits [..., V], x [...] -> [...]."""
    logits = widened(logits)
    picked = jnp.take_along_axis(logits, x[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def expected(logits: Array, values: Array) -> Array:
    """sum_k softmax(logits)_k values_k: logits [..., V], values [V] -> [...]."""
    return jax.nn.softmax(widened(logits), axis=-1) @ values


def score_nats(log_ratio: Array, x: Array) -> Array:
    """sum_j r_j - 1 - log r_x with r = exp(log_ratio): log_ratio [..., V], x [...] -> [...]."""
    log_ratio = widened(log_ratio)
    picked = jnp.take_along_axis(log_ratio, x[..., None], axis=-1)[..., 0]
    # C - 1 by expm1 of log C: near a normalised score C - 1 is all rounding otherwise.
    return jnp.expm1(jax.nn.logsumexp(log_ratio, axis=-1)) - picked


def widened(logits: Array) -> Array:
    """At least float32, whatever the network computes in."""
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def masked_nats(denoiser: Denoiser, mask_id: int, batch: Batch, z: Array, t: Array) -> Array:
    """The sum over masked positions of -log mu(z, t)[x], nats per sequence [B].

    Unmasked positions are copied by the denoiser and cost nothing.
    """
    logits_BxLxV = denoiser(z, t, **batch.context)
    nats_BxL = token_nats(logits_BxLxV, batch.tokens)
    return jnp.sum(jnp.where(z == mask_id, nats_BxL, 0.0), axis=1)
