"""Grouped matrix product: each row is multiplied by the matrix of its group.

Arrays: rows x [N, D], matrices w [E, D, F], and sizes [E], int32: the first sizes[0] rows belong to
the first matrix, the next sizes[1] rows to the second, and so on. The sizes sum to N.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array

# Smallest number of rows of a tile, and the largest on CPUs and on TPUs.
SMALLEST, ON_CPU, ON_TPU = 8, 128, 512


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(x: Array, w: Array, sizes: Array, products: str) -> Array:
    """Computes x[n] @ w[matrix of n], [N, F], in the type of x.

    products: type of the operands, float32 or bfloat16; sums are float32.

    XLA has an efficient operation for it on TPUs, but not for its gradient with respect to the
    matrices, and none on CPUs: there it would multiply all rows by each matrix. A loop over tiles
    of rows is used instead. On GPUs such a loop would wait for the host in each iteration, so all
    tiles are multiplied at once, each with a copy of its matrix.
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
    on_tpu = functools.partial(_tiled_sums, most=ON_TPU)
    of_w = jax.lax.platform_dependent(
        x, narrow, sizes, cpu=_tiled_sums, cuda=_batched_sums, rocm=_batched_sums, default=on_tpu
    )
    return of_x, of_w.astype(like.dtype), None


grouped.defvjp(_forward, _backward)


def _product(x: Array, w: Array, sizes: Array) -> Array:
    """Returns the product in float32."""
    return jax.lax.platform_dependent(
        x, w, sizes, cpu=_tiled, cuda=_batched, rocm=_batched, default=_ragged
    )


def _ragged(x: Array, w: Array, sizes: Array) -> Array:
    return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)


class Tiles(NamedTuple):
    """Tiles of rows with one matrix each; the last tile of a matrix may extend beyond its rows.

    size    number of rows of a tile
    count   number of tiles, [], at most N / size + E
    matrix  index of the matrix of each tile
    begin   first row of each tile; `end`: the end of the rows of its matrix
    first   index of the first tile of each matrix, [E]
    """

    size: int
    count: Array
    matrix: Array
    begin: Array
    end: Array
    first: Array

    @classmethod
    def of(cls, rows: int, sizes: Array, each: int, most: int) -> "Tiles":
        """Splits N rows into tiles; their size is a power of two, from `each` up to `most`."""
        size = min(most, max(SMALLEST, 1 << max(0, each - 1).bit_length()))
        ends, count = jnp.cumsum(sizes), -(-sizes // size)
        last = jnp.cumsum(count)
        number = jnp.arange(rows // size + len(sizes))
        matrix = jnp.minimum(jnp.searchsorted(last, number, side="right"), len(sizes) - 1)
        begin = (ends - sizes)[matrix] + (number - (last - count)[matrix]) * size
        return cls(size, last[-1], matrix, begin, ends[matrix], last - count)

    def taken(self, x: Array) -> Array:
        """Returns the rows of each tile, [T, size, D]; rows of another matrix are 0."""
        rows = self.begin[:, None] + jnp.arange(self.size)
        return jnp.where((rows < self.end[:, None])[..., None], x.at[rows].get(mode="clip"), 0)


def _tiled(x: Array, w: Array, sizes: Array) -> Array:
    """Multiplies tile by tile; rows that a tile writes beyond its matrix are overwritten next."""
    tiles = Tiles.of(len(x), sizes, -(-len(x) // len(sizes)), ON_CPU)
    size, begin = tiles.size, tiles.begin
    x = jnp.pad(x, ((0, size), (0, 0)))

    def one(tile: Array, out: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(x, begin[tile], size)
        own = jax.lax.dynamic_index_in_dim(w, tiles.matrix[tile], keepdims=False)
        found = jnp.dot(rows, own, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, found, begin[tile], axis=0)

    out = jnp.zeros((len(x), w.shape[2]), jnp.float32)
    return jax.lax.fori_loop(0, tiles.count, one, out)[:-size]


def _tiled_sums(x: Array, slope: Array, sizes: Array, most: int = ON_CPU) -> Array:
    """Returns sum x[n] slope[n]^T over the rows of each matrix: float32 [E, D, F]."""
    tiles = Tiles.of(len(x), sizes, -(-len(x) // len(sizes)), most)
    size, begin = tiles.size, tiles.begin
    x, slope = (jnp.pad(a, ((0, size), (0, 0))) for a in (x, slope))

    def one(tile: Array, out: Array) -> Array:
        rows, slopes = (jax.lax.dynamic_slice_in_dim(a, begin[tile], size) for a in (x, slope))
        own = begin[tile] + jnp.arange(size) < tiles.end[tile]
        slopes = jnp.where(own[:, None], slopes, 0)
        found = jnp.dot(rows.T, slopes, preferred_element_type=jnp.float32)
        return out.at[tiles.matrix[tile]].add(found)

    out = jnp.zeros((len(sizes), x.shape[1], slope.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, tiles.count, one, out)


def _smaller(x: Array, sizes: Array) -> Tiles:
    """Splits rows so that there are at most five times as many tiles as matrices."""
    return Tiles.of(len(x), sizes, -(-len(x) // (4 * len(sizes))), len(x) + SMALLEST)


def _batched(x: Array, w: Array, sizes: Array) -> Array:
    tiles, number = _smaller(x, sizes), jnp.arange(len(x))
    out = jnp.einsum(
        "tsd,tdf->tsf", tiles.taken(x), w[tiles.matrix], preferred_element_type=jnp.float32
    )
    ends = jnp.cumsum(sizes)
    matrix = jnp.searchsorted(ends, number, side="right")
    place = number - (ends - sizes)[matrix]
    return out[tiles.first[matrix] + place // tiles.size, place % tiles.size]


def _batched_sums(x: Array, slope: Array, sizes: Array) -> Array:
    tiles = _smaller(x, sizes)
    each = jnp.einsum(
        "tsd,tsf->tdf", tiles.taken(x), tiles.taken(slope), preferred_element_type=jnp.float32
    )
    return jax.ops.segment_sum(each, tiles.matrix, len(sizes), indices_are_sorted=True)
