"""Arrays of safetensors: every type that an array may have is written and read."""

import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.runtime.paths import place
from md4_jax.runtime.tensors import Tensors, write

KINDS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
KINDS += ["float16", "bfloat16", "float32", "float64", "bool"]


@pytest.mark.parametrize("name", KINDS)
def test_an_array_comes_back(name, tmp_path):
    dtype = jnp.dtype(name)
    written = np.arange(6).reshape(2, 3).astype(dtype)
    write(place(tmp_path), {"x": written, "other": np.ones(2, np.float32)})
    found = Tensors(place(tmp_path))["x"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, written)
