"""Matrix products of linear layers whose operands are rounded to bfloat16."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from md4_jax.protocols import Array
from md4_jax.runtime.processor import multiplies_bfloat16
from md4_jax.runtime.sharding import on_one_device, splits_sequences

PRODUCTS = ("auto", "float32", "bfloat16")


def products_for(name: str, platform: str, dtype: str) -> str:
    """Returns float32 or bfloat16; auto is bfloat16 on CPUs on which it is faster.

    A network that computes in bfloat16 has nothing to round. On such CPUs it takes the products of
    bfloat16 all the same, since they have float32 results, for which XLA's library is quick.
    """
    quick = platform == "cpu" and multiplies_bfloat16()
    if dtype != "float32":
        return "bfloat16" if quick and name != "float32" else "float32"
    if name != "auto":
        return name
    return "bfloat16" if quick else "float32"


def product(x: Array, kernel: Array, products: str) -> Array:
    """Computes x [..., K] @ kernel [K, M], in the type of x; products: float32 or bfloat16.

    All tokens are one axis, unless devices hold parts of sequences: XLA transposes both factors for
    the gradient of a sum over two axes. 1.3 times the speed of a training step of size (a), 1.15
    at width 768, on 2 CPU cores.
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
    """Computes x [..., K] @ kernel [K, M] of operands in bfloat16, with float32 sums and result.

    The gradients are such products too. What is kept for them is bfloat16, half the memory.
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
    # By rows, since XLA would make of the transpose of this product, as of a head that shares the
    # matrix of the embedding, a product of transposed operands.
    return of_x, by_rows(_product(turned, slope, over=((1,), (0,))))


rounded_product.defvjp(_forward, _backward)


def by_rows(x: Array) -> Array:
    """Stores an array row by row.

    XLA's CPU library has products of bfloat16 only for such operands. Others, like a transposed
    view, it converts to float32: 238 instead of 864 GFLOP/s for the gradient of a kernel
    (256 x 4096 by 4096 x 704, 2 cores of an Intel Xeon with AMX). On meshes nothing is changed.
    """
    if not on_one_device():
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _product(left: Array, right: Array, *, over: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """Sums over these axes of each."""
    return jnp.tensordot(left, right, over, preferred_element_type=jnp.float32)
