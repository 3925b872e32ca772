"""Matrix products of linear layers whose operands are rounded to bfloat16."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from md4_jax.protocols import Array
from md4_jax.runtime.processor import multiplies_bfloat16
from md4_jax.runtime.sharding import on_one_device

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
    """Computes x [N, K] @ kernel [K, M], in the type of x; products: float32 or bfloat16."""
    if products == "bfloat16":
        wide = x.astype(jnp.float32), kernel.astype(jnp.float32)
        return rounded_product(*wide).astype(x.dtype)
    return x @ kernel


@jax.custom_vjp
def rounded_product(x: Array, kernel: Array) -> Array:
    """Computes x [N, K] @ kernel [K, M] of operands in bfloat16, with float32 sums and result.

    The gradients are such products too. What is kept for them is bfloat16, half the memory.
    """
    return _forward(x, kernel)[0]


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return _product(x, kernel, over=(1, 0)), (x, kernel)


def _backward(kept: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    x, kernel = kept
    slope = slope.astype(jnp.bfloat16)
    turned = by_rows(jax.lax.optimization_barrier(x.T))
    # By rows, since XLA would make of the transpose of this product, as of a head that shares the
    # matrix of the embedding, a product of transposed operands.
    of_kernel = by_rows(_product(turned, slope, over=(1, 0)))
    return _product(slope, kernel, over=(1, 1)), of_kernel


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


def _product(left: Array, right: Array, *, over: tuple[int, int]) -> Array:
    """Sums over one axis of each."""
    axes = ((over[:1], over[1:]), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)
