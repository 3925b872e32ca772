"""Fingerprints of text files, and the check of cached tokens against their record."""

import contextlib
import functools
import hashlib
import json
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from md4_jax.data.cache import new_file
from md4_jax.data.sources.splits import digest
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, cache_root, is_remote, version

CHUNK_BYTES = 1 << 20


def of_texts(paths: Iterable[Place]) -> str:
    """Returns a hash of the names and contents of files, in their order; see `facts_of`."""
    return digest(*facts_of(paths))


def facts_of(paths: Iterable[Place]) -> list[list[str | int]]:
    """Returns [name, SHA-256] of each file.

    A local file is read again only if its size or one of its times has changed. For an object in a
    store the entry is [address, size, time] instead. UserError if a file cannot be read.
    """
    paths = list(paths)
    kept = cache_root() / "texts" / digest(*map(version, paths))
    with contextlib.suppress(OSError, ValueError):
        return json.loads(kept.read_text())
    found = [list(_content(path)) for path in paths]
    # Only to save time: without a writable cache it is computed each time.
    with contextlib.suppress(UserError), new_file(kept) as temporary:
        temporary.write_text(json.dumps(found))
    return found


def _content(path: Place) -> tuple:
    if is_remote(path):
        return version(path)
    try:
        with path.open("rb") as file:
            return path.name, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def check_same(what: str, state: Callable[[], Any], before: Any) -> None:
    """Raises UserError if data changed, or went away, while they were tokenised.

    state: returns what was `before` when the hash of the data was taken
    """
    with contextlib.suppress(OSError):
        if state() == before:
            return
    raise UserError(
        f"{what} changed while it was read, so the result is not kept. Start again when no other "
        "program writes to this data, or use a copy of it"
    )


def record(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of the record that belongs to a token file."""
    return path.parent / (path.name + ".json")


def damage(path: pathlib.Path, facts: Mapping[str, Any]) -> str:
    """Describes how cached tokens are damaged; '' if they are intact.

    facts: entries of the record other than number and checksum: `dtype`, `vocab_size` (greater than
    every id) and others. Each process reads the file once.
    """
    try:
        written = json.loads(record(path).read_text())
    except (OSError, ValueError, RecursionError):
        return "the record of its size and checksum is missing or unreadable"
    if not isinstance(written, dict):
        return "the record of its size and checksum is damaged"
    size, crc, largest = measured(version(path), facts["dtype"])
    item = np.dtype(facts["dtype"]).itemsize
    tokens = size / item if size % item else size // item
    for name, value in {**facts, "tokens": tokens, "crc32": crc}.items():
        if written.get(name) != value:
            return f"{name} is {value}, not {written.get(name)} as when it was written"
    if largest >= facts["vocab_size"]:
        return f"it has the id {largest}, and the vocabulary ends at {facts['vocab_size'] - 1}"
    return ""


@functools.cache  # unlimited: a least recently used shard is the next one to be asked for
def measured(of: tuple, dtype: str) -> tuple[int, int, int]:
    """Returns (bytes, CRC-32, largest id or -1) of one version of a file."""
    size, crc, largest = 0, 0, -1
    with open(of[0], "rb") as file:
        while raw := file.read(CHUNK_BYTES):
            size, crc = size + len(raw), zlib.crc32(raw, crc)
            whole = len(raw) - len(raw) % np.dtype(dtype).itemsize
            largest = max(largest, int(np.frombuffer(raw[:whole], dtype).max(initial=0)))
    return size, crc, largest
