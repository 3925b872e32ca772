"""Text files and JSON lines from a disk."""

import dataclasses
import functools
import glob
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator

from md4_jax.data import contents
from md4_jax.data.sources.splits import bounds, check_split, digest
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists, is_remote, place

MIN_DOCUMENTS = 20


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """The documents of all files that match a pattern, in the order of their names.

    path        a file, a directory (all files below it), a glob pattern, in
                which ** also matches folders, or a tuple of these
    text_key    where a JSON line has its text
    validation  fraction of the documents if below 1, otherwise their number
    test        likewise; the last documents are test, those before validation

    A file named .jsonl holds one document a line, any other file is one
    document; either may be packed (.gz). OpenWebText's customary held-out set
    is its last 100,000 documents. With fewer than 20 documents it is the
    characters that are split, in the same order, and amounts count characters.

    Raises UserError when nothing matches or a file cannot be read as UTF-8 text.
    """

    path: str | tuple[str, ...]
    text_key: str = "text"
    validation: float = 0.05
    test: float = 0.05

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def fingerprint(self) -> str:
        """A hash of the files' names and contents, and of the arguments."""
        facts = contents.of_texts(self._files)
        return digest("text", facts, self.text_key, self.validation, self.test)

    def documents(self, split: str) -> Iterator[str]:
        """The documents of the split, one at a time."""
        check_split(split)
        count = sum(map(_count, self._files))
        amounts = {"validation": self.validation, "test": self.test}
        if count >= MIN_DOCUMENTS:
            start, stop = bounds(count, split, unit="documents", **amounts)
            return itertools.islice(self._all(), start, stop)
        length = sum(map(len, self._all()))
        start, stop = bounds(length, split, unit="characters", **amounts)
        return _characters(self._all(), start, stop)

    def _all(self) -> Iterator[str]:
        for path in self._files:
            yield from _lines(path, self.text_key) if _is_lines(path) else _whole(path)

    @functools.cached_property
    def _files(self) -> list[Place]:
        patterns = (self.path,) if isinstance(self.path, str) else tuple(self.path)
        found = sorted({path for pattern in patterns for path in _match(pattern)})
        if not found:
            raise UserError(f"data.path: no file matches {' or '.join(map(repr, patterns))}")
        return found


def _match(pattern: str) -> list[Place]:
    if is_remote(pattern):
        return _match_objects(place(pattern, "data.path"))
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):
        return [Place(pattern)]  # even if its name holds a *
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**")
    return [Place(p) for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]


def _match_objects(pattern: Place) -> list[Place]:
    """The objects at an address, below it or matching it."""
    if exists(pattern) and not pattern.is_dir():
        return [pattern]
    bucket = Place(*pattern.parts[:3])
    within = "/".join(pattern.parts[3:])
    found = bucket.glob(f"{within}/**" if pattern.is_dir() else within)
    return [path for path in found if not path.is_dir()]


def _is_lines(path: Place) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")


def _open(path: Place):
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _raw_lines(path: Place) -> Iterator[bytes]:
    """The file's lines; UserError when it cannot be read, or is packed and damaged."""
    try:
        with _open(path) as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _count(path: Place) -> int:
    """How many documents the file holds; blank lines are none."""
    return sum(1 for line in _raw_lines(path) if line.strip()) if _is_lines(path) else 1


def _whole(path: Place) -> Iterator[str]:
    yield _decode(path, b"".join(_raw_lines(path)), 0)


def _lines(path: Place, text_key: str) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(_raw_lines(path), 1):
        if line.strip():
            yield _text(path, number, _decode(path, line, offset), text_key)
        offset += len(line)


def _decode(path: Place, raw: bytes, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {raw[error.start : error.start + 1]!r} at offset "
            f"{offset + error.start}. Convert it to UTF-8, or take it out of data.path."
        ) from error


def _text(path: Place, number: int, line: str, text_key: str) -> str:
    """The text of one JSON line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}, line {number}: not a JSON object but a {type(record).__name__}")
    if text_key not in record:
        raise UserError(
            f"{path}, line {number}: no key {text_key!r} (data.text_key); "
            f"it has {', '.join(sorted(record))}"
        )
    if not isinstance(record[text_key], str):
        raise UserError(
            f"{path}, line {number}: {text_key!r} holds no text but a "
            f"{type(record[text_key]).__name__}"
        )
    return _without_surrogates(record[text_key])


def _without_surrogates(text: str) -> str:
    """Half a surrogate pair, which JSON can spell and UTF-8 cannot, becomes U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _characters(documents: Iterator[str], start: int, stop: int) -> Iterator[str]:
    """The characters [start, stop) of all documents together, as documents."""
    offset = 0
    for document in documents:
        part = document[max(0, start - offset) : max(0, stop - offset)]
        if part:
            yield part
        offset += len(document)
