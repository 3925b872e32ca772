"""Checksums of arrays: by hand, for every kind of element, and blind to no change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from several_devices import on_eight_devices

from md4_jax.runtime import checksums as module
from md4_jax.runtime.checksums import checksum, checksums

DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool", "float16")


def mixed(x: int) -> int:
    """The 32-bit finalizer of MurmurHash3, in Python's integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def test_by_hand():
    words = [0, 1, 0x3F800000, 0xFFFFFFFF, 5, 7]
    expected = sum(mixed(w ^ mixed(i + 1)) for i, w in enumerate(words)) % 2**32
    x = np.array(words, np.uint32).view(np.float32).reshape(2, 3)
    assert checksums({"x": jnp.asarray(x)}) == {"x": expected}
    assert checksums({"x": jnp.asarray(x.reshape(3, 2, 1))}) == {"x": expected}


@pytest.mark.parametrize("shape", [(4, 30), (2, 3, 20), (5, 4, 3, 2)])
def test_the_shape_does_not_matter(shape):
    x = jnp.arange(120.0)
    assert checksums({"x": x.reshape(shape)}) == checksums({"x": x})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(120,), (30, 4), (5, 3, 8), (2, 60)])
@pytest.mark.cases(6)
def test_large_arrays_are_summed_in_parts(shape, dtype, monkeypatch):
    x = jnp.asarray(np.arange(120).reshape(shape) % 251, dtype)
    whole = checksums({"x": x, "small": x[:1]})
    calls = []
    monkeypatch.setattr(module, "AT_ONCE", 32)
    monkeypatch.setattr(
        module, "_of_rows", lambda *a, of=module._of_rows, **k: (calls.append(k), of(*a, **k))[1]
    )
    assert checksums({"x": x, "small": x[:1]}) == whole
    rows = max(1, 32 * shape[0] // 120)
    assert [k["count"] for k in calls][: shape[0] // rows] == [rows] * (shape[0] // rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_is_seen(dtype):
    """Each bit of each element (of a bool the lowest), and two elements that change places."""
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.permutation(15).reshape(3, 5) % 9 - (dtype != "uint8"), dtype))
    x = x if dtype != "bool" else rng.permutation(15).reshape(3, 5) % 2 == 0
    call = jax.jit(checksum)
    before = int(call(x))
    raw = x.view(f"uint{8 * x.dtype.itemsize}")
    for place in np.ndindex(x.shape):
        for bit in range(1 if dtype == "bool" else 8 * x.dtype.itemsize):
            other = raw.copy()
            other[place] ^= other.dtype.type(1 << bit)
            assert int(call(other.view(x.dtype))) != before, (place, bit)
    swapped, unlike = x.ravel().copy(), np.flatnonzero(x.ravel() != x.ravel()[0])[0]
    swapped[[0, unlike]] = swapped[[unlike, 0]]
    assert int(call(swapped.reshape(x.shape))) != before


def test_of_a_number_and_of_nothing():
    assert checksums({"a": jnp.int32(7), "b": jnp.zeros((0, 4))}) == {
        "a": mixed(7 ^ mixed(1)),
        "b": 0,
    }


def on_meshes():
    """Run by itself, on eight devices."""
    x = jnp.arange(96.0).reshape(8, 12)
    for shape in ((2, 4), (8, 1)):
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp"))
        for spec in (P("data"), P(None, "fsdp"), P("data", "fsdp"), P()):
            there = jax.device_put(x, NamedSharding(mesh, spec))
            assert checksums({"x": there}) == checksums({"x": x}), (shape, spec)
    print("meshes agree")


def test_the_same_on_every_mesh():
    assert "meshes agree" in on_eight_devices("test_checksums", "on_meshes")
