"""Checksums of arrays: equal on every mesh, and different if any bit differs."""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array

# Elements of an array summed at once: XLA writes four bytes for each of them on CPUs.
AT_ONCE = 2**26


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Returns {name: 32-bit checksum}; arrays may be on the devices of several processes."""
    large = {name: x for name, x in arrays.items() if _is_cut(x)}
    sums = _checksums({name: x for name, x in arrays.items() if name not in large})
    for name, x in large.items():
        sums[name] = _by_rows(x)
    return {name: int(sums[name]) % 2**32 for name in arrays}


def _is_cut(x: Array) -> bool:
    """Returns whether an array is summed in parts; a sharded array already is in parts."""
    return x.ndim > 0 and x.size > AT_ONCE and getattr(x, "is_fully_replicated", True)


def _by_rows(x: Array) -> int:
    """Returns the checksum of an array, computed over a part of its rows at a time."""
    rows = max(1, AT_ONCE // math.prod(x.shape[1:]))
    firsts = range(0, x.shape[0], rows)
    return sum(int(_of_rows(x, i, count=min(rows, x.shape[0] - i))) for i in firsts)


@functools.partial(jax.jit, static_argnames="count")
def _of_rows(x: Array, first: Array, *, count: int) -> Array:
    own = jax.lax.dynamic_slice_in_dim(x, first, count)
    return checksum(own, jnp.uint32(first) * jnp.uint32(math.prod(x.shape[1:]) % 2**32))


@jax.jit
def _checksums(arrays: dict[str, Array]) -> dict[str, Array]:
    return jax.tree.map(checksum, arrays)


def checksum(x: Array, before: Array | int = 0) -> Array:
    """Sums mix(word_i ^ mix(i + 1)) over i, mod 2^32, where word_i is the bits of element i.

    Because mix is a bijection, a change of one element always changes the sum. Changes of several
    elements, or of their order, are missed with probability 2^-32. Integer sums have no rounding,
    so the result does not depend on order, mesh or machine.

    before: number of elements of the whole array that precede x
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    size = x.dtype.itemsize
    # An element of 8 bytes becomes two words, along a new last axis.
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(size, 4)}"))
    words = words.astype(jnp.uint32)
    # An element of 8 bytes has two indices.
    each = jnp.uint32(2 if size == 8 else 1)
    place = jnp.ones(words.shape, jnp.uint32) + jnp.uint32(before) * each
    stride = 1
    for axis in reversed(range(words.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
        stride = stride * words.shape[axis] % 2**32
    return jnp.sum(_mix(words ^ _mix(place)), dtype=jnp.uint32)


def _mix(x: Array) -> Array:
    """Mixes 32 bits with the finalizer of MurmurHash3 (Appleby), a bijection."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
