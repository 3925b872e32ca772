"""Attention behind one function, whatever computes it on a platform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.networks.splash import fits, splash
from md4_jax.protocols import Array, UserError

KERNELS = ("auto", "plain", "splash", "cudnn")
# cuDNN's kernel takes heads of these sizes, and half precision alone.
CUDNN_MULTIPLE, CUDNN_LARGEST = 8, 128


def kernel_for(name: str, platform: str, head_size: int, dtype: str) -> str:
    """The kernel of that name; auto is splash on TPUs, cudnn on GPUs where it can be, else plain.

    UserError for cudnn where it cannot be.
    """
    fits_cudnn = head_size % CUDNN_MULTIPLE == 0 and head_size <= CUDNN_LARGEST
    if name == "cudnn" and not (fits_cudnn and dtype == "bfloat16"):
        raise UserError(
            f"network.attention=cudnn needs network.dtype=bfloat16, not {dtype}, and heads of a "
            f"multiple of {CUDNN_MULTIPLE} up to {CUDNN_LARGEST}, not {head_size} (network.size / "
            "network.heads); plain has no such limits"
        )
    if name != "auto":
        return name
    if platform == "gpu":
        return "cudnn" if fits_cudnn and dtype == "bfloat16" else "plain"
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
    alone. The softmax is float32 whatever the inputs are. kernel: plain, the formula; splash,
    the TPU's, which is used where it can be: all queries, and a length of whole tiles; or cudnn,
    that of NVIDIA's GPUs, by jax.nn.dot_product_attention.
    """
    if kernel == "splash" and index is None and fits(query_BxLxHxDh.shape[1]):
        return splash(query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, segments, causal=causal)
    if kernel == "cudnn" and causal and segments is None and index is None:
        return _cudnn(query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, None, causal=True)
    mask = None
    if segments is not None:
        asking = segments if index is None else jnp.take_along_axis(segments, index, axis=1)
        mask = (asking[:, :, None] == segments[:, None, :])[:, None]
    if causal:
        asked = jnp.arange(key_BxLxHxDh.shape[1])[None] if index is None else index
        left = (asked[:, :, None] >= jnp.arange(key_BxLxHxDh.shape[1]))[:, None]
        mask = left if mask is None else mask & left
    return attend_masked(query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, mask, kernel)


def attend_masked(
    query: Array, key: Array, value: Array, mask: Array | None, kernel: str = "plain"
) -> Array:
    """`attend_where`, on NVIDIA's GPUs by their kernel, which takes a mask of even sides alone."""
    odd = query.shape[1] % 2 or key.shape[1] % 2
    if kernel == "cudnn" and (mask is None or not odd):
        return _cudnn(query, key, value, mask)
    return attend_where(query, key, value, mask)


def _cudnn(
    query: Array, key: Array, value: Array, mask: Array | None, *, causal: bool = False
) -> Array:
    """Calls cuDNN's kernel, which takes a causal mask as a flag and any other mask as a matrix."""
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=causal, implementation="cudnn"
    )


@jax.custom_vjp
def attend_where(query: Array, key: Array, value: Array, mask: Array | None) -> Array:
    """The formula; mask bool [B or 1, 1, Q, L] says which keys a query sees, one at least.

    Scores are read as few times as can be: sums are divided after the product with the values,
    and the backward pass takes sum_j p_j dp_j from the output (arXiv:2205.14135, section 3.1).
    """
    return _forward(query, key, value, mask)[0]


def _forward(query: Array, key: Array, value: Array, mask: Array | None):
    # Heads before positions: the products with the weights are twice as fast on CPUs.
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    scores = _product("bhqd,bhkd->bhqk", query, key)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    inverse = 1.0 / jnp.sum(weights, axis=-1)[..., None]
    weights = weights.astype(value.dtype)
    out = (_product("bhqk,bhkd->bhqd", weights, value) * inverse).astype(value.dtype)
    return jnp.swapaxes(out, 1, 2), (query, key, value, out, weights, inverse)


def _backward(kept: tuple[Array, ...], slope: Array):
    query, key, value, out, weights, inverse = kept
    wide = jnp.swapaxes(slope, 1, 2).astype(jnp.float32) * inverse
    mean = jnp.sum(wide * out, axis=-1)[..., None]
    narrow = wide.astype(value.dtype)
    of_value = _product("bhqk,bhqd->bhkd", weights, narrow)
    of_scores = weights * (_product("bhqd,bhkd->bhqk", narrow, value) - mean)
    of_scores = of_scores.astype(query.dtype)
    of_query = _product("bhqk,bhkd->bhqd", of_scores, key) * query.shape[-1] ** -0.5
    of_key = _product("bhqk,bhqd->bhkd", of_scores, query)
    slopes = (jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in (of_query, of_key, of_value))
    return *slopes, None


attend_where.defvjp(_forward, _backward)


def _product(spec: str, left: Array, right: Array) -> Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


@functools.lru_cache(maxsize=8)
def _angles(length: int, size: int, base: float) -> np.ndarray:
    """cos and sin [2, L, Dh / 2] of position times frequency: computed once, in float64."""
    frequency = base ** (-np.arange(0, size, 2) / size)
    angle = np.arange(length)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)


def rotate(
    x_BxLxHxDh: Array, index: Array | None = None, *, length: int = 0, base: float = 10_000.0
) -> Array:
    """Rotary position embedding (arXiv:2104.09864), applied in float32, halves rotated.

    index int32 [B, P] are the positions, all below length, if they are not 0, 1, ...
    """
    angles = _angles(length or x_BxLxHxDh.shape[1], x_BxLxHxDh.shape[-1], base)
    cos, sin = angles if index is None else jnp.asarray(angles)[:, index]
    cos, sin = (x[..., :, None, :] for x in (cos, sin))
    left, right = jnp.split(x_BxLxHxDh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return rotated.astype(x_BxLxHxDh.dtype)
