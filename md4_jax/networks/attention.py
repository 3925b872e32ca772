"""Attention: one function with several kernels.

Sizes (a) and (c) are those of tools/sizes.py.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.networks.cudnn import LARGEST, MULTIPLE, cudnn
from md4_jax.networks.keys import for_queries
from md4_jax.networks.products import by_rows
from md4_jax.networks.splash import fits, splash
from md4_jax.protocols import Array, UserError
from md4_jax.runtime.reductions import on_cpu, row_max
from md4_jax.runtime.sharding import splits_sequences, token_groups

KERNELS = ("auto", "plain", "splash", "cudnn")


class Form(NamedTuple):
    """Form of the computation of attention.

    rounded  operands of products are rounded to bfloat16, as `products.rounded_product` does
    lean     the backward pass recomputes the softmax weights, so the forward pass stores none
    rate     dropout rate
    """

    rounded: bool = False
    lean: bool = False
    rate: float = 0.0

    @classmethod
    def dropping(cls, kernel: str, rate: float) -> "Form":
        """Returns the form with dropout; it is lean if the kernel stores no weights."""
        return cls(kernel == "rounded", kernel in ("splash", "cudnn"), rate)


PLAIN = Form()


def kernel_for(name: str, platform: str, head_size: int, dtype: str) -> str:
    """Returns the kernel to use; auto is splash on TPUs, cudnn on GPUs if it fits, else plain.

    Raises UserError for cudnn with a head size or dtype that it does not support.
    """
    fits_cudnn = head_size % MULTIPLE == 0 and head_size <= LARGEST
    if name == "cudnn" and not (fits_cudnn and dtype == "bfloat16"):
        raise UserError(
            f"network.attention=cudnn needs network.dtype=bfloat16, not {dtype}, and a head size "
            f"(network.size / network.heads) that is a multiple of {MULTIPLE} and at most "
            f"{LARGEST}, not {head_size}. network.attention=plain has no such limits"
        )
    if name != "auto":
        return name
    if platform == "gpu":
        return "cudnn" if fits_cudnn and dtype == "bfloat16" else "plain"
    return "splash" if platform == "tpu" else "plain"


def rounding(kernel: str, products: str) -> str:
    """Returns `rounded` for the kernel plain if operands of products are rounded to bfloat16."""
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

    Keys and values may have fewer heads than queries; several queries then share one (GQA).

    segments  int32 [B, L]: a token attends only to tokens of its own segment
    causal    a token attends only to itself and to tokens on its left
    index     int32 [B, P]: positions of the queries; None: all positions
    kernel    plain, the formula; rounded, the same with operands of products in bfloat16; splash,
              the TPU kernel, used if all positions are queries and tiles divide the length; cudnn,
              the kernel for NVIDIA GPUs
    """
    if kernel == "splash" and index is None and fits(query_BxLxHxDh.shape[1]):
        return splash(query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, segments, causal=causal)
    heads = query_BxLxHxDh.shape[2]
    key_BxLxHxDh, value_BxLxHxDh = (for_queries(x, heads) for x in (key_BxLxHxDh, value_BxLxHxDh))
    is_plain = segments is None and index is None and not splits_sequences()
    if kernel == "cudnn" and causal and is_plain:
        return cudnn(query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, None, causal=True)
    mask = _visible(key_BxLxHxDh.shape[1], segments, index, causal=causal)
    return attend_masked(query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, mask, kernel)


def attend_near(
    query: Array,
    key: Array,
    value: Array,
    *,
    reach: int,
    segments: Array | None = None,
    index: Array | None = None,
    kernel: str = "plain",
) -> Array:
    """Computes `attend` with a window: a token sees itself and `reach` tokens on each side.

    All scores are computed; those of tokens outside the window are masked.
    """
    heads, length = query.shape[2], key.shape[1]
    key, value = for_queries(key, heads), for_queries(value, heads)
    asked = jnp.arange(length)[None] if index is None else index
    mask = (jnp.abs(asked[:, :, None] - jnp.arange(length)) <= reach)[:, None]
    if segments is not None:
        mask &= _visible(length, segments, index, causal=False)
    return attend_masked(query, key, value, mask, kernel)


def _visible(
    length: int, segments: Array | None, index: Array | None, *, causal: bool
) -> Array | None:
    """Returns the mask of keys that each query sees, bool [B or 1, 1, Q, L]; None: all."""
    mask = None
    if segments is not None:
        asking = segments if index is None else jnp.take_along_axis(segments, index, axis=1)
        mask = (asking[:, :, None] == segments[:, None, :])[:, None]
    if causal:
        asked = jnp.arange(length)[None] if index is None else index
        left = (asked[:, :, None] >= jnp.arange(length))[:, None]
        mask = left if mask is None else mask & left
    return mask


def attend_dropping(
    query: Array,
    key: Array,
    value: Array,
    *,
    dropout: tuple[Array, Form],
    segments: Array | None = None,
    causal: bool = False,
    index: Array | None = None,
) -> Array:
    """Computes `attend` by the formula, with dropout (keys [B], form) of the softmax weights.

    The draws for a query depend only on its position, not on which queries are computed.
    """
    keys, form = dropout
    batch, asks, heads, _ = query.shape
    key, value = for_queries(key, heads), for_queries(value, heads)
    length = key.shape[1]
    places = jnp.broadcast_to(jnp.arange(asks), (batch, asks)) if index is None else index
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, places)
    share = 1.0 - form.rate
    draw = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, share, (heads, length))))
    mask = _visible(length, segments, index, causal=causal)
    return attend_where(query, key, value, mask, form, jnp.swapaxes(draw(keys), 1, 2))


def attend_masked(
    query: Array, key: Array, value: Array, mask: Array | None, kernel: str = "plain"
) -> Array:
    """Computes attention with `attend_where` or cuDNN's kernel, whose mask needs even sizes."""
    parts, asks = token_groups()[1], query.shape[1]
    own = asks if asks % parts else asks // parts  # queries of a device
    odd = own % 2 or key.shape[1] % 2
    if kernel == "cudnn" and (mask is None or not odd):
        return cudnn(query, key, value, mask)
    return attend_where(query, key, value, mask, Form(rounded=kernel == "rounded"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_where(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    form: Form = PLAIN,
    keep: Array | None = None,
) -> Array:
    """Computes attention by the formula, with a mask and with dropout.

    mask  bool [B or 1, 1, Q, L]: the keys that a query sees; None: all
    keep  bool [B, H, Q, L]: the weights that dropout keeps, at the form's rate; None: all

    Each query must see at least one key. The gradient is a custom one, which computes
    sum_j p_j dp_j from the output (arXiv:2205.14135, section 3.1). It takes as long as that of
    JAX and stores one [B, H, L, L] array less for each layer. On 2 CPU cores a training step with
    2 x 2048 tokens and 8 layers of 256 has 1.9 instead of 2.9 GiB of temporaries; at size (c) it
    has 12% less.
    """
    return _forward(query, key, value, mask, form, keep)[0]


def _forward(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    form: Form,
    keep: Array | None,
):
    # Heads before positions: a training step is 1.1 times as fast as with
    # jax.nn.dot_product_attention at size (a), and 1.5 times at size (c), on 2 CPU cores.
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    dtype, operand = value.dtype, operand_of(form.rounded)
    query, key, value = (operand(jnp.swapaxes(x, 1, 2)) for x in (query, key, value))
    scores = _scores(query, key, mask)
    largest = row_max(scores)
    weights = jnp.exp(scores - largest)
    inverse = 1.0 / jnp.sum(weights, axis=-1)[..., None]
    weights = weights.astype(value.dtype)
    mixed = product_of("bhqk,bhkd->bhqd", _dropped(weights, keep), value)
    out = (mixed * (inverse / (1.0 - form.rate))).astype(dtype)
    again = (largest, mask) if form.lean else weights
    return jnp.swapaxes(out, 1, 2), (query, key, value, out, again, inverse, keep)


def _backward(form: Form, kept: tuple[Any, ...], slope: Array):
    query, key, value, out, weights, inverse, keep = kept
    operand = operand_of(form.rounded)
    if form.lean:
        largest, mask = weights
        # Otherwise XLA would reuse the same products of the forward pass, and store them.
        query, key = jax.lax.optimization_barrier((query, key))
        weights = jnp.exp(_scores(query, key, mask) - largest).astype(value.dtype)
    wide = jnp.swapaxes(slope, 1, 2).astype(jnp.float32) * inverse
    mean = jnp.sum(wide * out, axis=-1)[..., None]
    narrow = operand((wide / (1.0 - form.rate)).astype(slope.dtype))
    of_value = _transposed_product(_dropped(weights, keep), narrow)
    of_weights = _dropped(product_of("bhqd,bhkd->bhqk", narrow, value), keep)
    of_scores = operand((weights * (of_weights - mean)).astype(slope.dtype))
    of_query = product_of("bhqk,bhkd->bhqd", of_scores, key) * query.shape[-1] ** -0.5
    of_key = _transposed_product(of_scores, query)
    slopes = (jnp.swapaxes(x, 1, 2).astype(slope.dtype) for x in (of_query, of_key, of_value))
    return *slopes, None, None


def _scores(query: Array, key: Array, mask: Array | None) -> Array:
    scores = product_of("bhqd,bhkd->bhqk", query, key)
    return scores if mask is None else jnp.where(mask, scores, -jnp.inf)


def _dropped(x: Array, keep: Array | None) -> Array:
    return x if keep is None else jnp.where(keep, x, jnp.zeros_like(x))


attend_where.defvjp(_forward, _backward)


def operand_of(rounded: bool) -> Callable[[Array], Array]:
    """Returns the function that is applied to each operand of a product."""
    return (lambda x: by_rows(x.astype(jnp.bfloat16))) if rounded else lambda x: x


def _transposed_product(scores_BxHxQxK: Array, x_BxHxQxDh: Array) -> Array:
    """Computes sum_q scores_qk x_q: [B, H, K, Dh].

    On CPUs x and the result are transposed, not the scores, which are larger. This takes 4.0
    instead of 11.8 ms for 2 x 4 heads and 1024 tokens on 2 cores of an AMD EPYC, which is 9% of a
    training step of size (c) with float32 products, and 3% of (a).
    """

    def turned(scores: Array, x: Array) -> Array:
        found = product_of("bhdq,bhqk->bhdk", by_rows(jnp.swapaxes(x, 2, 3)), scores)
        return jnp.swapaxes(by_rows(found), 2, 3)

    def plain(scores: Array, x: Array) -> Array:
        return product_of("bhqk,bhqd->bhkd", scores, x)

    return on_cpu(turned, plain, scores_BxHxQxK, x_BxHxQxDh)


def product_of(spec: str, left: Array, right: Array) -> Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
