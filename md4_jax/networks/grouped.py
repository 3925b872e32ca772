"""Product of rows with a matrix each, where rows of one matrix lie side by side.

Arrays: rows x [N, D], matrices w [E, D, F], and sizes [E], int32: the first sizes[0] rows are those
of the first matrix, and so on. The sizes add up to N.
"""

import functools

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array

# Rows of a tile on CPUs: at most, and at least.
LARGEST, SMALLEST = 128, 8
# Sums over rows: for the gradient of the matrices.
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(x: Array, w: Array, sizes: Array, products: str) -> Array:
    """Computes x[n] @ w[matrix of n], [N, F], in the type of x.

    products: float32 or bfloat16, to which operands are then rounded; sums are float32.

    TPUs and GPUs have an operation for it. On CPUs XLA would make it a product with all matrices,
    so that a loop over tiles of rows is used there.
    """
    return _forward(x, w, sizes, products)[0]


def _forward(x: Array, w: Array, sizes: Array, products: str):
    if products == "bfloat16":
        x_, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    else:
        x_ = x
    return _product(x_, w, sizes).astype(x.dtype), (x_, w, sizes, jnp.zeros((), x.dtype))


def _backward(products: str, kept: tuple, slope: Array):
    x, w, sizes, like = kept
    narrow = slope.astype(x.dtype)
    of_x = _product(narrow, jnp.swapaxes(w, 1, 2), sizes).astype(like.dtype)
    of_w = jax.lax.platform_dependent(x, narrow, sizes, cpu=_tiled_sums, default=_sums)
    return of_x, of_w.astype(like.dtype), None


grouped.defvjp(_forward, _backward)


def _product(x: Array, w: Array, sizes: Array) -> Array:
    """Returns the product in float32."""
    return jax.lax.platform_dependent(x, w, sizes, cpu=_tiled, default=_ragged)


def _ragged(x: Array, w: Array, sizes: Array) -> Array:
    return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)


def _sums(x: Array, slope: Array, sizes: Array) -> Array:
    """Returns sum x[n] slope[n]^T over the rows of each matrix: float32 [E, D, F]."""
    return jax.lax.ragged_dot_general(
        x, slope, sizes, OVER_ROWS, preferred_element_type=jnp.float32
    )


def _tiles(rows: int, sizes: Array) -> tuple[int, Array, tuple[Array, Array, Array]]:
    """Cuts the rows of each matrix into tiles.

    Returns (rows of a tile, number of tiles, (matrix, first row, end of its matrix's rows) of each
    tile). The last tile of a matrix may reach into the rows of the next.
    """
    each = -(-rows // len(sizes))
    size = min(LARGEST, max(SMALLEST, 1 << max(0, each - 1).bit_length()))
    ends, count = jnp.cumsum(sizes), -(-sizes // size)
    last = jnp.cumsum(count)
    number = jnp.arange(rows // size + len(sizes))
    matrix = jnp.minimum(jnp.searchsorted(last, number, side="right"), len(sizes) - 1)
    begin = (ends - sizes)[matrix] + (number - (last - count)[matrix]) * size
    return size, last[-1], (matrix, begin, ends[matrix])


def _tiled(x: Array, w: Array, sizes: Array) -> Array:
    """Multiplies tile by tile; what a tile writes beyond its rows the next one writes anew."""
    size, count, (matrix, begin, _) = _tiles(len(x), sizes)
    x = jnp.pad(x, ((0, size), (0, 0)))

    def one(tile: Array, out: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(x, begin[tile], size)
        own = jax.lax.dynamic_index_in_dim(w, matrix[tile], keepdims=False)
        found = jnp.dot(rows, own, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, found, begin[tile], axis=0)

    out = jnp.zeros((len(x), w.shape[2]), jnp.float32)
    return jax.lax.fori_loop(0, count, one, out)[:-size]


def _tiled_sums(x: Array, slope: Array, sizes: Array) -> Array:
    size, count, (matrix, begin, end) = _tiles(len(x), sizes)
    x, slope = (jnp.pad(a, ((0, size), (0, 0))) for a in (x, slope))

    def one(tile: Array, out: Array) -> Array:
        rows, slopes = (jax.lax.dynamic_slice_in_dim(a, begin[tile], size) for a in (x, slope))
        own = begin[tile] + jnp.arange(size) < end[tile]
        slopes = jnp.where(own[:, None], slopes, 0)
        found = jnp.dot(rows.T, slopes, preferred_element_type=jnp.float32)
        return out.at[matrix[tile]].add(found)

    out = jnp.zeros((len(sizes), x.shape[1], slope.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, count, one, out)
