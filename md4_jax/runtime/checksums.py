"""Checksums of arrays: equal on every mesh, and different if a bit is."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Returns {name: 32 bits}; the arrays may lie on the devices of several processes."""
    sums = _checksums(dict(arrays))
    return {name: int(value) for name, value in jax.device_get(sums).items()}


@jax.jit
def _checksums(arrays: dict[str, Array]) -> dict[str, Array]:
    return jax.tree.map(checksum, arrays)


def checksum(x: Array) -> Array:
    """Sums mix(word_i ^ mix(i + 1)) over i, mod 2^32, where word_i is the bits of element i.

    Because mix is a bijection, a change of one element always changes the sum. Changes of several
    elements, or of their order, remain unseen with probability 2^-32. Integers are summed without
    rounding, so that the result depends on no order, mesh or machine.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    size = x.dtype.itemsize
    # An element of 8 bytes becomes two words, along a new last axis.
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(size, 4)}"))
    words = words.astype(jnp.uint32)
    place = jnp.ones(words.shape, jnp.uint32)
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
