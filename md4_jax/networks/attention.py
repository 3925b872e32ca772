"""Attention by one function with several kernels.

Sizes (a) and (c) are those of tools/sizes.py.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.networks.products import by_rows
from md4_jax.networks.splash import fits, splash
from md4_jax.protocols import Array, UserError
from md4_jax.runtime.reductions import on_cpu, row_max

KERNELS = ("auto", "plain", "splash", "cudnn")
# The cuDNN kernel needs head sizes that are multiples of 8 up to 128, and half precision.
CUDNN_MULTIPLE, CUDNN_LARGEST = 8, 128
# Of rotary positions: position p turns by p / BASE^(2 i / Dh).
BASE = 10_000.0


def kernel_for(name: str, platform: str, head_size: int, dtype: str) -> str:
    """Returns the kernel to use; auto is splash on TPUs, cudnn on GPUs if it fits, else plain.

    UserError for cudnn with a head size or dtype that it does not take.
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


def rounding(kernel: str, products: str) -> str:
    """Returns `rounded` instead of plain if operands of products are to be rounded to bfloat16."""
    return "rounded" if (kernel, products) == ("plain", "bfloat16") else kernel


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
    """Computes softmax(q k^T / sqrt(Dh)) v, [B, L, H, Dh], with the softmax in float32.

    Keys and values may have fewer heads than queries; each then serves several (GQA).

    segments  int32 [B, L]: a token attends only to tokens of its own segment
    causal    a token attends only to itself and to tokens on its left
    index     int32 [B, P]: positions of the queries, if these are not all positions
    kernel    plain, the formula; rounded, the same with operands of products in bfloat16; splash,
              the TPU kernel, used for all queries and a length of whole tiles; cudnn, the kernel
              for NVIDIA GPUs
    """
    heads = query_BxLxHxDh.shape[2]
    key_BxLxHxDh, value_BxLxHxDh = shared(key_BxLxHxDh, heads), shared(value_BxLxHxDh, heads)
    if kernel == "splash" and index is None and fits(query_BxLxHxDh.shape[1]):
        return splash(query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, segments, causal=causal)
    if kernel == "cudnn" and causal and segments is None and index is None:
        return _cudnn(query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, None, causal=True)
    mask = _visible(key_BxLxHxDh.shape[1], segments, index, causal=causal)
    return attend_masked(query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, mask, kernel)


def _visible(
    length: int, segments: Array | None, index: Array | None, *, causal: bool
) -> Array | None:
    """Marks the keys that each query sees, bool [B or 1, 1, Q, L]; None: all of them."""
    mask = None
    if segments is not None:
        asking = segments if index is None else jnp.take_along_axis(segments, index, axis=1)
        mask = (asking[:, :, None] == segments[:, None, :])[:, None]
    if causal:
        asked = jnp.arange(length)[None] if index is None else index
        left = (asked[:, :, None] >= jnp.arange(length))[:, None]
        mask = left if mask is None else mask & left
    return mask


def shared(x_BxLxHxDh: Array, heads: int) -> Array:
    """Repeats heads of keys or values, so that there are as many as queries have."""
    own = x_BxLxHxDh.shape[2]
    return x_BxLxHxDh if own == heads else jnp.repeat(x_BxLxHxDh, heads // own, axis=2)


def attend_dropping(
    query: Array,
    key: Array,
    value: Array,
    *,
    dropout: tuple[Array, float],
    segments: Array | None = None,
    causal: bool = False,
    index: Array | None = None,
) -> Array:
    """Computes `attend` with dropout (keys [B], rate) of the softmax's weights, by the formula.

    The draws of a query depend on its position and not on the positions that are asked for.
    """
    keys, rate = dropout
    batch, asks, heads, _ = query.shape
    key, value = shared(key, heads), shared(value, heads)
    length = key.shape[1]
    places = jnp.broadcast_to(jnp.arange(asks), (batch, asks)) if index is None else index
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, places)
    draw = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, (heads, length))))
    factor = jnp.swapaxes(draw(keys), 1, 2) / (1.0 - rate)
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    scores = _product("bqhd,bkhd->bhqk", query, key)
    mask = _visible(length, segments, index, causal=causal)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = (jax.nn.softmax(scores, axis=-1) * factor).astype(value.dtype)
    return _product("bhqk,bkhd->bqhd", weights, value).astype(value.dtype)


def attend_masked(
    query: Array, key: Array, value: Array, mask: Array | None, kernel: str = "plain"
) -> Array:
    """Applies `attend_where`, or cuDNN's kernel, which needs a mask of even sizes."""
    odd = query.shape[1] % 2 or key.shape[1] % 2
    if kernel == "cudnn" and (mask is None or not odd):
        return _cudnn(query, key, value, mask)
    return attend_where(query, key, value, mask, kernel == "rounded")


def _cudnn(
    query: Array, key: Array, value: Array, mask: Array | None, *, causal: bool = False
) -> Array:
    """Calls cuDNN's kernel, which takes a causal mask as a flag and any other mask as a matrix."""
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=causal, implementation="cudnn"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_where(
    query: Array, key: Array, value: Array, mask: Array | None, rounded: bool = False
) -> Array:
    """Computes the formula; mask bool [B or 1, 1, Q, L] marks the keys that a query sees.

    rounded: operands of the products are rounded to bfloat16, as `products.rounded_product` does.

    Each query must see at least one key. The gradient is written by hand and computes
    sum_j p_j dp_j from the output (arXiv:2205.14135, section 3.1). It takes as long as that of
    JAX and keeps one [B, H, L, L] array less for each layer: at 2 x 2048 tokens and 8 layers of
    256 a training step has 1.9 instead of 2.9 GiB of temporaries on 2 CPU cores, at size (c) 12%
    less.
    """
    return _forward(query, key, value, mask, rounded)[0]


def _forward(query: Array, key: Array, value: Array, mask: Array | None, rounded: bool):
    # Heads before positions: 1.1 times the speed of a training step of size (a) with
    # jax.nn.dot_product_attention, 1.5 times at size (c), on 2 CPU cores.
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    dtype, operand = value.dtype, _operand(rounded)
    query, key, value = (operand(jnp.swapaxes(x, 1, 2)) for x in (query, key, value))
    scores = _product("bhqd,bhkd->bhqk", query, key)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = jnp.exp(scores - row_max(scores))
    inverse = 1.0 / jnp.sum(weights, axis=-1)[..., None]
    weights = weights.astype(value.dtype)
    out = (_product("bhqk,bhkd->bhqd", weights, value) * inverse).astype(dtype)
    return jnp.swapaxes(out, 1, 2), (query, key, value, out, weights, inverse)


def _backward(rounded: bool, kept: tuple[Array, ...], slope: Array):
    query, key, value, out, weights, inverse = kept
    operand = _operand(rounded)
    wide = jnp.swapaxes(slope, 1, 2).astype(jnp.float32) * inverse
    mean = jnp.sum(wide * out, axis=-1)[..., None]
    narrow = operand(wide.astype(slope.dtype))
    of_value = _transposed_product(weights, narrow)
    of_scores = weights * (_product("bhqd,bhkd->bhqk", narrow, value) - mean)
    of_scores = operand(of_scores.astype(slope.dtype))
    of_query = _product("bhqk,bhkd->bhqd", of_scores, key) * query.shape[-1] ** -0.5
    of_key = _transposed_product(of_scores, query)
    slopes = (jnp.swapaxes(x, 1, 2).astype(slope.dtype) for x in (of_query, of_key, of_value))
    return *slopes, None


attend_where.defvjp(_forward, _backward)


def _operand(rounded: bool) -> Callable[[Array], Array]:
    """Returns what is done to each operand of a product."""
    return (lambda x: by_rows(x.astype(jnp.bfloat16))) if rounded else lambda x: x


def _transposed_product(scores_BxHxQxK: Array, x_BxHxQxDh: Array) -> Array:
    """Sums scores times x over queries: [B, H, K, Dh].

    On CPUs x and the result are turned, not the scores, which are larger: 4.0 instead of 11.8 ms
    for 2 x 4 heads and 1024 tokens on 2 cores of an AMD EPYC; 9% of a training step of size (c)
    with float32 products, 3% of (a).
    """

    def turned(scores: Array, x: Array) -> Array:
        found = _product("bhdq,bhqk->bhdk", by_rows(jnp.swapaxes(x, 2, 3)), scores)
        return jnp.swapaxes(by_rows(found), 2, 3)

    def plain(scores: Array, x: Array) -> Array:
        return _product("bhqk,bhqd->bhkd", scores, x)

    return on_cpu(turned, plain, scores_BxHxQxK, x_BxHxQxDh)


def _product(spec: str, left: Array, right: Array) -> Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


@functools.lru_cache(maxsize=8)
def _angles(sides: tuple[int, ...], size: int, base: float) -> np.ndarray:
    """Computes cos and sin of position times frequency in float64: float32 [2, L, Dh / 2].

    Positions are those of a grid with these sides, row by row; each side has an equal part of Dh.
    """
    each = size // len(sides)
    frequency = base ** (-np.arange(0, each, 2) / each)
    places = np.unravel_index(np.arange(math.prod(sides)), sides)
    angle = np.concatenate([place[:, None] * frequency for place in places], axis=1)
    return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)


def rotate(
    x_BxLxHxDh: Array,
    index: Array | None = None,
    *,
    length: int = 0,
    base: float = BASE,
    grid: tuple[int, ...] = (),
) -> Array:
    """Applies rotary position embeddings (arXiv:2104.09864) to the two halves, in float32.

    index  int32 [B, P], the positions, all below `length`, if they are not 0, 1, ...
    grid   (rows, columns) of positions that are numbered row by row; (): a line
    """
    sides = grid or (length or x_BxLxHxDh.shape[1],)
    angles = _angles(sides, x_BxLxHxDh.shape[-1], base)
    cos, sin = angles if index is None else jnp.asarray(angles)[:, index]
    cos, sin = (x[..., :, None, :] for x in (cos, sin))
    left, right = jnp.split(x_BxLxHxDh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return rotated.astype(x_BxLxHxDh.dtype)
