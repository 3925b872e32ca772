"""Files of torch.save, read without PyTorch and without running their code."""

import zipfile

import numpy as np
import pytest
import torch_saved
from autoencoder_folders import PUBLISHED
from torch_saved import Call, Named

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place
from md4_jax.runtime.tensors import Tensors


def read(path):
    return Tensors(place(path.parent), path.name)


def test_a_file_that_pytorch_wrote_is_read():
    found = read(PUBLISHED / "torch_saved.pt")
    expected = {
        "weight": [[1, 2, 3], [4, 5, 6]],
        "bias": [7, 8],
        "view": np.arange(4, 16).reshape(3, 4),  # of a larger array
        "scalar": 5,
        "half": [[0.5, -2]],
        "brain": [1.5, -3],
        "parameter": [9],
    }
    types = ["F32", "F32", "F32", "I64", "F16", "BF16", "F32"]
    assert list(found) == list(expected)
    assert [found.stored(name).type for name in found] == types
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name], np.float64), values, name)
        assert found.shape(name) == np.shape(values)


def test_arrays_at_the_top_are_read(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([7])}
    found = read(torch_saved.write(tmp_path / "a.pth", {**arrays, "epoch": 3}))
    assert dict(found).keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("named", [("os", "system"), ("builtins", "exec"), ("builtins", "eval")])
def test_no_code_of_a_file_is_run(named, tmp_path):
    text = f"echo hacked > {tmp_path / 'run'}"
    if named[0] == "builtins":
        text = f"open({str(tmp_path / 'run')!r}, 'w')"
    content = {"model": {"a": np.ones(2, np.float32)}, "args": Call(Named(*named), text)}
    found = read(torch_saved.write(tmp_path / "a.pt", content))
    np.testing.assert_array_equal(found["a"], [1, 1])
    assert not (tmp_path / "run").exists()


def damaged(name, tmp_path):
    file = tmp_path / "a.pt"
    if name == "old":
        file.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    elif name == "none":
        torch_saved.write(file, {"epoch": 3})
    elif name == "turned":
        torch_saved.write(file, {"a": np.arange(6, dtype=np.float32).reshape(2, 3).T})
    else:
        torch_saved.write(file, {"a": np.ones((2, 3), np.float32)})
        with zipfile.ZipFile(file) as archive:
            parts = {each: archive.read(each) for each in archive.namelist()}
        if name == "short":
            parts["archive/data/0"] = parts["archive/data/0"][:-1]
        if name == "big":
            parts["archive/byteorder"] = b"big"
        if name == "cut":
            parts["archive/data.pkl"] = parts["archive/data.pkl"][:-20]
        packed = zipfile.ZIP_DEFLATED if name == "packed" else zipfile.ZIP_STORED
        with zipfile.ZipFile(file, "w", packed) as archive:
            for each, content in parts.items():
                if name != "bare" or not each.endswith("data.pkl"):
                    archive.writestr(each, content)
    return file


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("old", "PyTorch 1.6 or later wrote, or it is damaged .*not a zip file.*weights_only=True"),
        ("none", "no arrays by name"),
        ("turned", "the array 'a' is not stored row by row"),
        ("short", "the array 'a' are compressed or incomplete"),
        ("packed", "the array 'a' are compressed or incomplete"),
        ("big", "big-endian"),
        ("cut", "or it is damaged"),
        ("bare", "it has no data.pkl"),
    ],
)
def test_other_files_are_refused(name, said, tmp_path):
    with pytest.raises(UserError, match=said):
        read(damaged(name, tmp_path))
