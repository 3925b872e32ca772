"""Arrays in a file of `torch.save`, read without PyTorch and without running code of the file.

The file is an uncompressed zip archive. `data.pkl` is the pickle of nested objects, in which each
array names the file `data/KEY` of its bytes, its offset there and its strides. Of the classes and
functions that a pickle may name, only those of arrays are known here; all others become objects
without content, so nothing else is run.
"""

import collections
import math
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place

# Class of the bytes of an array -> name of its type in safetensors, and bytes of an entry.
TYPES = {
    "DoubleStorage": ("F64", 8), "FloatStorage": ("F32", 4), "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2), "LongStorage": ("I64", 8), "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2), "CharStorage": ("I8", 1), "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}  # fmt: skip
# Keys under which training programs store the arrays of the model, beside those of the optimizer.
MODELS = ("model_state_dict", "model", "state_dict")
# Prefixes that DistributedDataParallel and torch.compile add to the names of arrays.
WRAPPERS = ("module.", "_orig_mod.")
LOCAL_HEADER = 30  # bytes of the header before a file of an archive, without names
DAMAGE = (
    zipfile.BadZipFile, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError,
    EOFError, RecursionError, OverflowError, NotImplementedError,
)  # fmt: skip


class Part(NamedTuple):
    """Array of a file: its type in safetensors, shape, and bytes [start, stop)."""

    type: str
    shape: tuple[int, ...]
    start: int
    stop: int


def arrays_of(file: Place) -> dict[str, Part]:
    """Returns the arrays of the model in a file by name, without reading them.

    UserError for a file in another format, for a damaged one, and for arrays that are not stored
    row by row.
    """
    try:
        with file.open("rb") as opened, zipfile.ZipFile(opened) as archive:
            return _found(opened, archive)
    except DAMAGE as error:
        raise UserError(
            f"{file} is not a file that torch.save of PyTorch 1.6 or later wrote, or it is damaged "
            f"({error}). If you trust it, convert it with torch.load(FILE, weights_only=True) and "
            "safetensors.torch.save_file(arrays, 'model.safetensors')"
        ) from error


def _found(opened: BinaryIO, archive: zipfile.ZipFile) -> dict[str, Part]:
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("it has no data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    order = f"{root}byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise ValueError("its numbers are big-endian")
    with archive.open(f"{root}data.pkl") as pickled:
        content = Reader(pickled).load()
    return {
        _unwrapped(name): _located(name, array, archive.getinfo(f"{root}data/{array.key}"), opened)
        for name, array in _model(content).items()
        if isinstance(array, Strided)
    }


def _model(content: Any) -> Mapping[str, Any]:
    """Returns the names and arrays of the model among what a program stored."""
    for key in MODELS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not any(isinstance(x, Strided) for x in content.values()):
        raise ValueError(f"it has no arrays by name, neither itself nor as {' or '.join(MODELS)}")
    return content


def _unwrapped(name: str) -> str:
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def _located(name: str, array: "Strided", info: zipfile.ZipInfo, opened: BinaryIO) -> Part:
    """Returns where an array is in the file; ValueError if it is not stored row by row."""
    kind, width = TYPES[array.storage]
    expected = [math.prod(array.shape[n + 1 :]) for n in range(len(array.shape))]
    pairs = zip(array.shape, array.strides, expected, strict=True)
    if any(size > 1 and has != needs for size, has, needs in pairs):
        raise ValueError(f"the array {name!r} is not stored row by row: use .contiguous()")
    begin, length = width * array.offset, width * math.prod(array.shape)
    if info.compress_type != zipfile.ZIP_STORED or begin < 0 or begin + length > info.file_size:
        raise ValueError(f"the bytes of the array {name!r} are compressed or incomplete")
    opened.seek(info.header_offset)
    header = opened.read(LOCAL_HEADER)
    names = sum(int.from_bytes(header[n : n + 2], "little") for n in (26, 28))
    start = info.header_offset + LOCAL_HEADER + names + begin
    return Part(kind, array.shape, start, start + length)


class Storage(NamedTuple):
    """Bytes of one or more arrays: the class of PyTorch, and the name of their file."""

    kind: str
    key: str


class Strided(NamedTuple):
    """Array of a pickle; offset and strides count entries."""

    storage: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Unknown:
    """Object of a class that is not needed: takes any content and keeps none."""

    def __new__(cls, *args: Any, **named: Any) -> "Unknown":
        return object.__new__(cls)

    def __init__(self, *args: Any, **named: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Ignores an entry of an unknown kind of list."""

    def extend(self, values: Any) -> None:
        """Ignores entries of an unknown kind of list."""


def _array(
    storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: Any
) -> Strided:
    shape, strides = (tuple(map(int, sizes)) for sizes in (shape, strides))
    if min(shape, default=0) < 0:
        raise ValueError("an array has a negative size")
    return Strided(storage.kind, storage.key, int(offset), shape, strides)


def _parameter(array: Strided, *rest: Any) -> Strided:
    return array


KNOWN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _array,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}


class Reader(pickle.Unpickler):
    """Unpickler that runs no code of the file, nor any that the file names, except `KNOWN`."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the function of a name; `Unknown` for all but those of arrays."""
        if module == "torch" and name in TYPES:
            return name
        return KNOWN.get((module, name), Unknown)

    def persistent_load(self, pid: Any) -> Storage:
        """Returns the storage of an array."""
        _, kind, key, *_ = pid
        return Storage(kind, key)
