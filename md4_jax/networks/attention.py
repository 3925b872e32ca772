"""Attention behind one function, whatever computes it on a platform."""

import jax
import jax.numpy as jnp

from md4_jax.networks.splash import fits, splash
from md4_jax.protocols import Array

KERNELS = ("auto", "plain", "splash")


def kernel_for(name: str, platform: str) -> str:
    """The kernel of that name; auto is splash on TPUs and plain elsewhere."""
    if name != "auto":
        return name
    return "splash" if platform == "tpu" else "plain"


def attend(
    query_BxLxHxDh: Array,
    key_BxLxHxDh: Array,
    value_BxLxHxDh: Array,
    *,
    segments: Array | None = None,
    causal: bool = False,
    index: Array | None = None,
    kernel: str = "plain",
) -> Array:
    """softmax(q k^T / sqrt(Dh)) v -> [B, L, H, Dh].

    segments int32 [B, L]: a token attends only to tokens of its own segment. causal: only to
    itself and to those on its left. index int32 [B, P]: the queries are of these positions
    alone. The softmax is float32 whatever the inputs are. kernel: plain, XLA's own, or splash,
    the TPU's, which is used where it can be: all queries, and a length of whole tiles.
    """
    if kernel == "splash" and index is None and fits(query_BxLxHxDh.shape[1]):
        return splash(query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, segments, causal=causal)
    mask = None
    if segments is not None:
        asking = segments if index is None else jnp.take_along_axis(segments, index, axis=1)
        mask = (asking[:, :, None] == segments[:, None, :])[:, None]
    if index is not None and causal:
        left = (index[:, :, None] >= jnp.arange(key_BxLxHxDh.shape[1]))[:, None]
        mask, causal = left if mask is None else mask & left, False
    return jax.nn.dot_product_attention(
        query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, mask=mask, is_causal=causal
    )


def rotate(x_BxLxHxDh: Array, index: Array | None = None, *, base: float = 10_000.0) -> Array:
    """Rotary position embedding (arXiv:2104.09864), computed in float32, halves rotated.

    index int32 [B, L] are the positions, if they are not 0, 1, ...
    """
    length, size = x_BxLxHxDh.shape[1], x_BxLxHxDh.shape[-1]
    frequency = base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    position = jnp.arange(length)[None] if index is None else index
    angle = position.astype(jnp.float32)[..., None] * frequency
    cos, sin = (f(angle)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    left, right = jnp.split(x_BxLxHxDh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return rotated.astype(x_BxLxHxDh.dtype)
