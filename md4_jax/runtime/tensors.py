"""Arrays in safetensors files: reading single arrays, and writing files of limited size.

A file consists of the length of its header in 8 bytes, the header (JSON with type, shape and
offsets of each array), and the arrays. Several files of a folder have an index with the file of
each array. A file of `torch.save` is read if it is named itself (`torch_files`).
"""

import json
import math
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from md4_jax.protocols import UserError
from md4_jax.runtime import torch_files
from md4_jax.runtime.paths import Place, read_range

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TORCH = (".pt", ".pth")  # endings of files of torch.save that are read if they are named
# Name of a type in the format -> its name in NumPy.
TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
# Largest file that is written.
FILE_BYTES = 5 * 2**30


class Stored(NamedTuple):
    """Location of one array: its bytes [start, stop) in a file."""

    file: Place
    type: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Tensors(Mapping):
    """Arrays of a folder by name. Each array is read only when it is accessed.

    only: name of a single file to read; "": all files of the model.
    UserError for a folder without safetensors, a missing or damaged file, and an unknown name.
    """

    def __init__(self, folder: Place, only: str = ""):
        self.folder = folder
        self._stored: dict[str, Stored] = {}
        for file in [_one(folder, only)] if only else _files(folder):
            self._stored |= _header(file)

    def __getitem__(self, name: str) -> np.ndarray:
        found = self.stored(name)
        raw = read_range(found.file, found.start, found.stop)
        return np.frombuffer(raw, jnp.dtype(TYPES[found.type])).reshape(found.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an array without reading it."""
        return self.stored(name).shape

    def small(self, name: str) -> np.ndarray:
        """Returns the values of an array that does not become a parameter."""
        return self[name]

    def stored(self, name: str) -> Stored:
        """Returns the location of an array."""
        if name not in self._stored:
            raise UserError(f"{self.folder} holds no array {name!r}, which the model needs")
        return self._stored[name]

    def count(self, pattern: str) -> int:
        """Returns 1 + the largest number that a pattern's group matches in the names, else 0."""
        found = (re.match(pattern, name) for name in self._stored)
        return max((int(match.group(1)) + 1 for match in found if match), default=0)


def is_folder(folder: Place) -> bool:
    """Returns whether a folder contains safetensors."""
    return folder.is_dir() and any(path.suffix == ".safetensors" for path in folder.iterdir())


def _one(folder: Place, file: str) -> Place:
    """Returns a file of a folder; UserError if it is missing, or a pickle instead."""
    if (folder / file).exists():
        return folder / file
    stem = file.removesuffix(".safetensors")
    pickles = [stem + ending for ending in PICKLES if (folder / (stem + ending)).exists()]
    raise _pickle(folder / pickles[0], file) if pickles else UserError(f"{folder} lacks {file}")


def _pickle(file: Place, name: str) -> UserError:
    return UserError(
        f"{file} is a pickle, which runs code when it is read: if you trust it, convert it with "
        f"torch.load(FILE, weights_only=True) and safetensors.torch.save_file(arrays, {name!r})"
    )


def _files(folder: Place) -> list[Place]:
    """Returns the files of the model; UserError if there are none, or if one is missing."""
    if (folder / INDEX).exists():
        names = sorted(set(_json(folder / INDEX)["weight_map"].values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise UserError(
                f"{folder} lacks {missing[0]}, one of the {len(names)} files that {INDEX} names: "
                "fetch it again"
            )
        return [folder / name for name in names]
    names = sorted(path.name for path in folder.iterdir())
    found = [name for name in names if name.endswith(".safetensors")]
    if FILE in found:
        found = [FILE]
    if len(found) == 1:
        return [folder / found[0]]
    if found:
        raise UserError(
            f"{folder} holds {len(found)} safetensors files and no {INDEX}: give one of the files"
        )
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise _pickle(folder / pickles[0], FILE)
    below = [name for name in names if (folder / name).is_dir() and _is_model(folder / name)]
    if below:
        shown = ", ".join(below[:5]) + ", ..." * (len(below) > 5)
        raise UserError(f"{folder} itself is no run or model, but holds some; name one: {shown}")
    if folder.name == "checkpoints" and any(name.isdecimal() for name in names):
        raise UserError(
            f"{folder} holds the checkpoints of a run: give the run, {folder.parent}, "
            "or one of them"
        )
    raise UserError(
        f"{folder} holds neither a run (checkpoints) nor a model (*.safetensors); a model in a "
        "subfolder on the hub is named as hf:USER/NAME/FOLDER/FILE.safetensors"
    )


def _is_model(folder: Place) -> bool:
    """Returns whether a folder is a run, or holds safetensors."""
    return (folder / "checkpoints").is_dir() or any(folder.glob("*.safetensors"))


def _header(file: Place) -> dict[str, Stored]:
    """Reads the locations of the arrays in a file; UserError if it is damaged."""
    if file.name.endswith(TORCH):
        return {name: Stored(file, *part) for name, part in torch_files.arrays_of(file).items()}
    size = file.stat().length
    try:
        length = int.from_bytes(read_range(file, 0, 8), "little")
        fields = json.loads(read_range(file, 8, 8 + min(length, size)))
        fields.pop("__metadata__", None)
        found = {name: _stored(file, 8 + length, entry) for name, entry in fields.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is not a safetensors file, or its start is damaged") from error
    end = max((stored.stop for stored in found.values()), default=8 + length)
    if end > size:
        raise UserError(f"{file} is cut short: it has {size} bytes of {end}; fetch it again")
    return found


def _stored(file: Place, begin: int, entry: Mapping[str, Any]) -> Stored:
    start, stop = (begin + offset for offset in entry["data_offsets"])
    if entry["dtype"] not in TYPES:
        raise UserError(f"{file} has arrays of the unknown type {entry['dtype']}")
    shape = tuple(map(operator.index, entry["shape"]))
    size = math.prod(shape) * jnp.dtype(TYPES[entry["dtype"]]).itemsize
    if not 0 <= begin <= start or stop - start != size:
        raise ValueError("an array has another size than its shape")
    return Stored(file, entry["dtype"], shape, start, stop)


def _json(file: Place) -> Any:
    try:
        return json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable JSON: {error}") from error


def write(
    folder: Place, arrays: Mapping[str, Any], most: int = FILE_BYTES, *, form: str = "md4_jax"
) -> None:
    """Writes arrays into one file, or into several of at most `most` bytes with an index.

    form: library named in the metadata; transformers reads only "pt".
    An array may be split over devices; it is fetched when its file is written.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, array in arrays.items():
        if groups[-1] and size + array.nbytes > most:
            groups, size = [*groups, []], 0
        groups[-1].append(name)
        size += array.nbytes
    where = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else FILE
        write_file(folder / file, {name: arrays[name] for name in group}, form)
        where |= dict.fromkeys(group, file)
    if len(groups) > 1:
        total = sum(array.nbytes for array in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(file: Place, arrays: Mapping[str, Any], form: str) -> None:
    """Writes arrays into one file; form: as in `write`."""
    from safetensors.numpy import save

    parts = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    file.write_bytes(save(parts, metadata={"format": form}))
