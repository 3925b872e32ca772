"""Token streams of large texts: files of ids, and a manifest that describes them."""

import functools
import json
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from md4_jax.data import contents
from md4_jax.data.cache import new_file
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists, is_remote, read_range, version

MANIFEST = "manifest.json"
LENGTH = np.dtype("<u4")
MAPS = 128  # each holds an open file, of which a process often may have only 1024
_POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power in the highest bit


class Cursor(NamedTuple):
    """Position in a text: after `taken` documents of the file with this number."""

    part: int
    taken: int


class Shard(NamedTuple):
    """Entry of the manifest: a file of ids, little-endian, one document after another.

    A file beside it, with the ending .lengths, has the number of tokens of each document, uint32.

    section   name of the part of the corpus, such as train
    end       place in the text after the last document
    """

    name: str
    section: str
    tokens: int
    documents: int
    crc32: int
    sha256: str
    end: Cursor


class Piece(NamedTuple):
    """Range [start, stop) of the tokens of a file."""

    shard: Shard
    start: int
    stop: int


class Prepared(NamedTuple):
    """Tokens of a corpus in a folder, on a disk or in an object store.

    dtype       of the ids
    vocab_size  a number greater than all ids
    separator   number of tokens after a document that are omitted at the end of a split
    facts       description of the text: the rest of the manifest
    """

    folder: Place
    dtype: str
    vocab_size: int
    separator: int
    facts: Mapping[str, Any]
    shards: tuple[Shard, ...] = ()
    is_complete: bool = False

    def write(self) -> None:
        """Writes the manifest atomically."""
        fields = {name: getattr(self, name) for name in self._fields if name != "folder"}
        shards = [{**shard._asdict(), "end": shard.end._asdict()} for shard in self.shards]
        text = json.dumps({**fields, "shards": shards}, indent=1)
        write(self.folder / MANIFEST, text.encode())

    def documents(self) -> dict[str, int]:
        """Returns {section: number of documents}."""
        return self._total("documents")

    def tokens(self) -> dict[str, int]:
        """Returns {section: number of tokens}."""
        return self._total("tokens")

    def _total(self, of: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for shard in self.shards:
            found[shard.section] = found.get(shard.section, 0) + getattr(shard, of)
        return found

    def damages(self) -> list[str]:
        """Returns `damage` of each shard; several threads read the files, or ask the store."""
        with ThreadPoolExecutor() as threads:
            return list(threads.map(self.damage, self.shards))

    def damage(self, shard: Shard) -> str:
        """Describes how a shard is damaged; '' if it is intact.

        In an object store only sizes are checked.
        """
        path, lengths = self.folder / shard.name, _lengths_of(self.folder / shard.name)
        if not exists(path) or not exists(lengths):
            return "it is not there"
        if lengths.stat().length != shard.documents * LENGTH.itemsize:
            return "the lengths of its documents are cut short"
        size = path.stat().length / np.dtype(self.dtype).itemsize
        if size != shard.tokens:
            return f"tokens is {size:g}, not {shard.tokens} as when it was written"
        if is_remote(path):
            return ""
        _, crc, largest = contents.measured(version(path), self.dtype)
        if crc != shard.crc32:
            return f"crc32 is {crc}, not {shard.crc32} as when it was written"
        if largest >= self.vocab_size:
            return f"it has the id {largest}, and the vocabulary ends at {self.vocab_size - 1}"
        return ""

    def pieces(self, ranges: Iterable[tuple[str, int, int]]) -> list[Piece]:
        """Returns the pieces of document ranges (section, first document, last plus one)."""
        found = []
        for section, start, stop in ranges:
            before = 0
            for shard in (shard for shard in self.shards if shard.section == section):
                first, last = (
                    min(max(0, edge - before), shard.documents) for edge in (start, stop)
                )
                before += shard.documents
                if first < last:
                    found.append(self._piece(shard, first, last))
        if found and self.separator:
            found[-1] = found[-1]._replace(stop=found[-1].stop - self.separator)
        return found

    def _piece(self, shard: Shard, first: int, last: int) -> Piece:
        if (first, last) == (0, shard.documents):
            return Piece(shard, 0, shard.tokens)
        path = _lengths_of(self.folder / shard.name)
        raw = read_range(path, 0, shard.documents * LENGTH.itemsize)
        ends = np.cumsum(np.frombuffer(raw, LENGTH), dtype=np.int64)
        if ends[-1] != shard.tokens:
            raise UserError(
                f"{path} is damaged: delete it, and it will be made again from the text"
            )
        return Piece(shard, int(ends[first - 1]) if first else 0, int(ends[last - 1]))

    def fingerprint(self, pieces: Iterable[Piece]) -> dict[str, int]:
        """Returns {tokens, crc32} of the concatenated pieces."""
        tokens, crc, item = 0, 0, np.dtype(self.dtype).itemsize
        for piece in pieces:
            count = piece.stop - piece.start
            own = piece.shard.crc32
            if count != piece.shard.tokens:
                path = self.folder / piece.shard.name
                own = zlib.crc32(read_range(path, piece.start * item, piece.stop * item))
            tokens, crc = tokens + count, joined_crc(crc, own, count * item)
        return {"tokens": tokens, "crc32": crc}


class TokenShards:
    """Token stream over several files; its slices are arrays.

    Files on a disk are memory-mapped, at most MAPS at a time. From an object store only the
    required bytes are fetched.
    """

    def __init__(self, folder: Place, dtype: str, pieces: list[Piece]):
        self.dtype, self._folder, self._pieces = np.dtype(dtype), folder, pieces
        counts = [piece.stop - piece.start for piece in pieces]
        self._starts = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, wanted: slice) -> np.ndarray:
        first, last, _ = wanted.indices(len(self))
        found = [np.empty(0, self.dtype)]
        while first < last:
            number = int(np.searchsorted(self._starts, first, "right")) - 1
            stop = min(last, int(self._starts[number + 1]))
            found.append(self._read(number, first, stop))
            first = stop
        return found[1] if len(found) == 2 else np.concatenate(found)

    def _read(self, number: int, first: int, stop: int) -> np.ndarray:
        """Reads the tokens [first, stop) of the stream, all within the piece of this number."""
        piece, before = self._pieces[number], int(self._starts[number])
        path = self._folder / piece.shard.name
        start, stop = (piece.start + edge - before for edge in (first, stop))
        if not is_remote(path):
            # A copy: a part of a map would keep its file open after `_mapped` has dropped it.
            return np.array(_mapped(str(path), self.dtype.name)[start:stop])
        item = self.dtype.itemsize
        return np.frombuffer(read_range(path, start * item, stop * item), self.dtype)


@functools.lru_cache(maxsize=MAPS)
def _mapped(path: str, dtype: str) -> np.memmap:
    return np.memmap(path, dtype, mode="r")


def read_manifest(folder: Place) -> Prepared | None:
    """Reads the manifest in a folder; None if there is none, or it is incomplete."""
    if not exists(folder / MANIFEST):
        return None
    try:
        fields = json.loads((folder / MANIFEST).read_text())
        shards = [
            Shard(**{**shard, "end": Cursor(**shard["end"])}) for shard in fields.pop("shards")
        ]
        return Prepared(folder, shards=tuple(shards), **fields)
    except (ValueError, KeyError, TypeError):
        return None


def write(path: Place, raw: bytes) -> None:
    """Writes a file atomically; UserError if the disk is full."""
    if is_remote(path):  # where every write is atomic
        path.write_bytes(raw)
        return
    with new_file(path) as temporary:
        temporary.write_bytes(raw)


def write_lengths(path: Place, lengths: np.ndarray) -> None:
    """Writes the number of tokens of each document of a shard."""
    write(_lengths_of(path), lengths.astype(LENGTH).tobytes())


def _lengths_of(path: Place) -> Place:
    return path.with_suffix(".lengths")


def joined_crc(first: int, second: int, size: int) -> int:
    """Returns the CRC-32 of two concatenated texts from their own; the second has `size` bytes."""
    power, square = 1 << 31, 1 << 23  # 1, and x^8: a byte
    while size:
        if size & 1:
            power = _product(square, power)
        square, size = _product(square, square), size >> 1
    return _product(power, first) ^ second


def _product(a: int, b: int) -> int:
    """Multiplies polynomials modulo that of CRC-32."""
    found = 0
    for bit in reversed(range(32)):
        found ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found
