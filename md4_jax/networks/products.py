"""Matrix products of linear layers with operands rounded to bfloat16."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from md4_jax.protocols import Array
from md4_jax.runtime.processor import multiplies_bfloat16
from md4_jax.runtime.sharding import on_one_device, splits_sequences

PRODUCTS = ("auto", "float32", "bfloat16")


def products_for(name: str, platform: str, dtype: str) -> str:
    """Returns float32 or bfloat16; auto is bfloat16 on CPUs on which it is faster.

    A network that computes in bfloat16 needs no rounding. On such CPUs it uses these bfloat16
    products nevertheless: they have float32 results, for which XLA's library is fast.
    """
    quick = platform == "cpu" and multiplies_bfloat16()
    if dtype != "float32":
        return "bfloat16" if quick and name != "float32" else "float32"
    if name != "auto":
        return name
    return "bfloat16" if quick else "float32"


def product(x: Array, kernel: Array, products: str) -> Array:
    """Computes x [..., K] @ kernel [K, M], in the type of x; products: float32 or bfloat16.

    Batch and length are merged into one axis, unless sequences are split over devices: for the
    gradient of a sum over two axes XLA transposes both factors. A training step of size (a) is 1.3
    times as fast on 2 CPU cores, and one at width 768 1.15 times.
    """
    shape = x.shape
    if not splits_sequences():
        x = x.reshape(-1, shape[-1])
    if products == "bfloat16":
        wide = x.astype(jnp.float32), kernel.astype(jnp.float32)
        y = rounded_product(*wide).astype(x.dtype)
    else:
        y = x @ kernel
    return y.reshape(*shape[:-1], -1)


@jax.custom_vjp
def rounded_product(x: Array, kernel: Array) -> Array:
    """Computes x [..., K] @ kernel [K, M] with bfloat16 operands, float32 sums and result.

    The gradients are such products too. Residuals for them are stored in bfloat16, half the memory.
    """
    return _forward(x, kernel)[0]


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return _product(x, kernel, over=((-1,), (0,))), (x, kernel)


def _backward(kept: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    x, kernel = kept
    slope = slope.astype(jnp.bfloat16)
    of_x = _product(slope, kernel, over=((-1,), (1,)))
    if x.ndim > 2:
        tokens = tuple(range(x.ndim - 1))
        return of_x, _product(x, slope, over=(tokens, tokens))
    turned = by_rows(jax.lax.optimization_barrier(x.T))
    # By rows: otherwise XLA would turn the transpose of this product, which a tied head has, into
    # a product of transposed operands.
    return of_x, by_rows(_product(turned, slope, over=((1,), (0,))))


rounded_product.defvjp(_forward, _backward)


def by_rows(x: Array) -> Array:
    """Stores an array row by row.

    XLA's CPU library has bfloat16 products only for operands in this layout. It converts others,
    such as transposed views, to float32: 238 instead of 864 GFLOP/s for the gradient of a kernel
    (256 x 4096 by 4096 x 704, 2 cores of an Intel Xeon with AMX). On meshes x is not changed.
    """
    if not on_one_device():
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _product(left: Array, right: Array, *, over: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """Contracts the given axes of left and right."""
    return jnp.tensordot(left, right, over, preferred_element_type=jnp.float32)
