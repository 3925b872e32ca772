"""Files in the format of torch.save, written without PyTorch."""

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "int64": "LongStorage"}


class Named:
    """A function or class of a module that need not be installed."""

    def __init__(self, module: str, name: str):
        self.module, self.name = module, name


class Call:
    """An object that is made by calling `Named` with these arguments."""

    def __init__(self, named: Named, *args: Any):
        self.args = (named, *args)


class Pickler(pickle._Pickler):
    """Pickler that writes arrays as PyTorch does, with their bytes apart."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=2)
        self.storages: list[np.ndarray] = []

    def persistent_id(self, each: Any) -> Any:
        if not isinstance(each, Stored):
            return None
        kind = Named("torch", STORAGES[str(each.array.dtype)])
        self.storages.append(each.array)
        return ("storage", kind, str(len(self.storages) - 1), "cpu", each.array.size)

    def save(self, each: Any, save_persistent_id: bool = True) -> None:
        if isinstance(each, Named):
            self.write(b"c" + f"{each.module}\n{each.name}\n".encode())
        elif isinstance(each, Call):
            self.save(each.args[0])
            self.save(each.args[1:])
            self.write(pickle.REDUCE)
        elif isinstance(each, np.ndarray):
            strides = tuple(step // each.itemsize for step in each.strides)
            flat = each.ravel("K")
            parts = (Stored(flat), 0, each.shape, strides, False, OrderedDict())
            self.save(Call(Named("torch._utils", "_rebuild_tensor_v2"), *parts))
        else:
            super().save(each, save_persistent_id)


class Stored:
    """Bytes of an array."""

    def __init__(self, array: np.ndarray):
        self.array = array


def write(path: Path, content: Any) -> Path:
    """Writes objects with NumPy arrays in place of PyTorch's."""
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(content)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", file.getvalue())
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(pickler.storages):
            archive.writestr(f"archive/data/{key}", array.tobytes())
        archive.writestr("archive/version", "3\n")
    return path
