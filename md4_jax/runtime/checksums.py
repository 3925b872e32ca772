"""Checksums of arrays: the same on every mesh, and another if any bit is."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    """{name: 32 bits}; the arrays may lie on the devices of several processes."""
    sums = _checksums(dict(arrays))
    return {name: int(value) for name, value in jax.device_get(sums).items()}


@jax.jit
def _checksums(arrays: dict[str, Array]) -> dict[str, Array]:
    return jax.tree.map(checksum, arrays)


def checksum(x: Array) -> Array:
    """sum over i of mix(word_i ^ mix(i + 1)) mod 2^32, word_i the bits of element i.

    mix is a bijection, so that one changed element always changes the sum; several, and elements
    that changed places, escape with probability 2^-32. Sums of integers have no rounding, so
    that they do not depend on the order, the mesh or the machine.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    size = x.dtype.itemsize
    # Of 8 bytes two words are made, in a last axis of their own.
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(size, 4)}"))
    words = words.astype(jnp.uint32)
    place = jnp.ones(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
        stride = stride * words.shape[axis] % 2**32
    return jnp.sum(_mix(words ^ _mix(place)), dtype=jnp.uint32)


def _mix(x: Array) -> Array:
    """The finalizer of MurmurHash3 (Appleby): a bijection of 32 bits in which each bit counts."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
