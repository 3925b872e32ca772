"""Text files and JSON lines, on a disk or in an object store."""

import dataclasses
import functools
import glob
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from md4_jax.data import contents
from md4_jax.data.labelled import Labelled
from md4_jax.data.sources.splits import bounds, check_split, digest
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists, is_remote, place

MIN_DOCUMENTS = 20
PARQUET = b"PAR1"  # the first and the last bytes of such a file


class Document(NamedTuple):
    """A text and its origin.

    line   line number in a file of JSON lines, from 1 on; 0: another kind of file
    start  number of characters of the file before the text
    label  value of data.label_key; '' without labels
    """

    text: str
    path: Place
    line: int = 0
    start: int = 0
    label: str | int = ""

    @property
    def where(self) -> str:
        """Names the file and the place in it."""
        line = f", line {self.line}" if self.line else ""
        return f"{self.path}{line}{f', from character {self.start} on' if self.start else ''}"


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Documents of all files that match a pattern, in the order of the file names.

    path        a file, a directory (all files below it), a glob pattern, in
                which ** also matches folders, or a tuple of these
    text_key    key of the text in a JSON line
    label_key   key of the label in a JSON line, a name or a number from 0 on; each document is
                then one sequence. "": no labels, and documents are joined
    validation  fraction of the documents if below 1, otherwise their number
    test        likewise; the last documents are test, those before validation

    A file named .jsonl holds one document per line, any other file is one document; both may be
    compressed (.gz). The customary held-out set of OpenWebText is its last 100,000 documents.
    Fewer than 20 documents without labels are split by characters instead, in the same order,
    and amounts then count characters.

    Raises UserError when nothing matches or a file cannot be read as UTF-8 text.
    """

    path: str | tuple[str, ...]
    text_key: str = "text"
    label_key: str = ""
    validation: float = 0.05
    test: float = 0.05

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def fingerprint(self) -> str:
        """Returns a hash of the files' names and contents, and of the arguments."""
        facts = contents.of_texts(self._files)
        labels = (self.label_key,) if self.label_key else ()
        return digest("text", facts, self.text_key, self.validation, self.test, *labels)

    def documents(self, split: str) -> Iterator[str]:
        """Yields the documents of the split, one at a time."""
        return (document.text for document in self._split(split))

    def labelled(self, split: str) -> Iterator[Labelled]:
        """Yields the documents of the split with their labels."""
        return (Labelled(d.text, d.label, d.where) for d in self._split(split))

    def origin(self, split: str, number: int) -> str:
        """Names the file, and the place in it, of one document of the split."""
        return next(itertools.islice(self._split(split), number, None)).where

    def _split(self, split: str) -> Iterator[Document]:
        check_split(split)
        count = sum(map(_count, self._files))
        amounts = {"validation": self.validation, "test": self.test}
        if count >= MIN_DOCUMENTS or self.label_key:
            start, stop = bounds(count, split, unit="documents", **amounts)
            return itertools.islice(self._all(), start, stop)
        length = sum(len(document.text) for document in self._all())
        start, stop = bounds(length, split, unit="characters", **amounts)
        return _characters(self._all(), start, stop)

    def _all(self) -> Iterator[Document]:
        for path in self._files:
            if _is_lines(path):
                yield from _lines(path, self.text_key, self.label_key)
            else:
                yield _whole(path)

    @functools.cached_property
    def _files(self) -> list[Place]:
        patterns = (self.path,) if isinstance(self.path, str) else tuple(self.path)
        found = sorted({path for pattern in patterns for path in _match(pattern)})
        if not found:
            raise UserError(f"data.path: no file matches {' or '.join(map(repr, patterns))}")
        for path in found:
            if path.suffix == ".parquet":
                raise _parquet(path)
            if self.label_key and not _is_lines(path):
                raise UserError(
                    f"data.label_key={self.label_key!r} needs files of JSON lines, .jsonl or "
                    f".jsonl.gz, and data.path has {path}"
                )
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
    """Finds the objects at an address, below it or matching it."""
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
    """Yields the lines of a file; UserError when it cannot be read or decompressed."""
    try:
        with _open(path) as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _count(path: Place) -> int:
    """Counts the documents of a file; blank lines are none."""
    return sum(1 for line in _raw_lines(path) if line.strip()) if _is_lines(path) else 1


def _whole(path: Place) -> Document:
    raw = b"".join(_raw_lines(path))
    if raw.startswith(PARQUET) and raw.endswith(PARQUET):
        raise _parquet(path)
    return Document(_decode(path, raw, 0), path)


def _parquet(path: Place) -> UserError:
    return UserError(
        f"data.path: {path} is a Parquet file, which is a table. Write it as JSON lines and "
        "use those, for instance with pandas: pandas.read_parquet(FILE).to_json('data.jsonl', "
        "orient='records', lines=True)"
    )


def _lines(path: Place, text_key: str, label_key: str) -> Iterator[Document]:
    offset = 0
    for number, line in enumerate(_raw_lines(path), 1):
        if line.strip():
            where = f"{path}, line {number}"
            record = _record(where, _decode(path, line, offset))
            label = _label(where, record, label_key) if label_key else ""
            yield Document(_text(where, record, text_key), path, number, 0, label)
        offset += len(line)


def _decode(path: Place, raw: bytes, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {raw[error.start : error.start + 1]!r} at offset "
            f"{offset + error.start}. Convert it to UTF-8, or take it out of data.path."
        ) from error


def _record(where: str, line: str) -> dict[str, Any]:
    """Parses the object of one JSON line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a JSON object but a {type(record).__name__}")
    return record


def _value(where: str, record: dict[str, Any], option: str, key: str) -> Any:
    if key not in record:
        raise UserError(
            f"{where}: no key {key!r} (data.{option}); it has {', '.join(sorted(record))}"
        )
    return record[key]


def _text(where: str, record: dict[str, Any], key: str) -> str:
    text = _value(where, record, "text_key", key)
    if not isinstance(text, str):
        raise UserError(f"{where}: {key!r} holds no text but a {type(text).__name__}")
    return _without_surrogates(text)


def _label(where: str, record: dict[str, Any], key: str) -> str | int:
    label = _value(where, record, "label_key", key)
    if not isinstance(label, str | int) or isinstance(label, bool):
        kind = type(label).__name__
        raise UserError(f"{where}: {key!r} is no class, a name or a whole number, but a {kind}")
    return label


def _without_surrogates(text: str) -> str:
    """Replaces half a surrogate pair, which JSON can hold and UTF-8 cannot, by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _characters(documents: Iterator[Document], start: int, stop: int) -> Iterator[Document]:
    """Cuts the characters [start, stop) out of all documents together, as documents."""
    offset = 0
    for document in documents:
        first = max(0, start - offset)
        part = document.text[first : max(0, stop - offset)]
        if part:
            yield document._replace(text=part, start=first)
        offset += len(document.text)
