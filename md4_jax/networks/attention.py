"""Attention behind one function, whatever computes it on a platform."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array


def attend(
    query_BxLxHxDh: Array,
    key_BxLxHxDh: Array,
    value_BxLxHxDh: Array,
    *,
    segments: Array | None = None,
    causal: bool = False,
) -> Array:
    """softmax(q k^T / sqrt(Dh)) v -> [B, L, H, Dh].

    segments int32 [B, L]: a token attends only to tokens of its own segment. causal: only to
    itself and to those on its left. The softmax is float32 whatever the inputs are.
    """
    mask = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, mask=mask, is_causal=causal
    )


def rotate(x_BxLxHxDh: Array, *, base: float = 10_000.0) -> Array:
    """Rotary position embedding (arXiv:2104.09864), computed in float32, halves rotated."""
    length, size = x_BxLxHxDh.shape[1], x_BxLxHxDh.shape[-1]
    frequency = base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    cos, sin = (f(angle)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    left, right = jnp.split(x_BxLxHxDh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return rotated.astype(x_BxLxHxDh.dtype)
