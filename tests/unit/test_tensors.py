"""Arrays of safetensors: every type that an array may have is written and read."""

import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.protocols import UserError
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


def test_a_folder_around_models_names_them(tmp_path):
    empty, around = tmp_path / "empty", tmp_path / "around"
    empty.mkdir()
    (around / "run" / "checkpoints").mkdir(parents=True)
    (around / "notes").mkdir()
    (around / "saved").mkdir()
    write(place(around / "saved"), {"x": np.ones(2, np.float32)})
    with pytest.raises(UserError, match="neither a run .checkpoints. nor a model"):
        Tensors(place(empty))
    with pytest.raises(UserError, match="no run or model, but holds some; name one: run, saved$"):
        Tensors(place(around))
