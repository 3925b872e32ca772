"""Documents of one file: text, JSON lines, Parquet, and archives of text files."""

import contextlib
import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from md4_jax.data.messages import conversation
from md4_jax.data.surrogates import without_surrogates
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place

MARK = "\ufeff"  # the byte order mark that editors of Windows write before a text in UTF-8
PARQUET = b"PAR1"  # the first and the last bytes of such a file
ROWS_AT_ONCE = 1024
COMPRESSED = {".gz": gzip.open, ".xz": lzma.open}
INNER = "_data.xz"  # the archives, each a tar, inside that of OpenWebText
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", INNER)
LARGEST = 1 << 30  # bytes of a document that is unpacked
ERRORS = (
    OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile,
    TypeError, ValueError, struct.error,  # a header of nonsense
    RuntimeError,  # a zip file with a password, or of a compression that Python does not have
)  # fmt: skip


class Document(NamedTuple):
    """A text and its origin.

    line      number of the line or row in its file, from 1 on; 0: another kind of file
    start     number of characters of the file before the text
    label     value of data.label_key; '' without labels
    prompt    value of data.prompt_key; '' without prompts
    messages  value of data.messages_key, each {"role": ..., "content": ...}; () without
    member    name in an archive; '' outside of archives
    position  bytes of the file that were read so far, for a display of progress
    """

    text: str
    path: Place
    line: int = 0
    start: int = 0
    label: str | int = ""
    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    member: str = ""
    position: int = 0

    @property
    def where(self) -> str:
        """Names the file and the place in it."""
        member = f", {self.member}" if self.member else ""
        line = f", line {self.line}" if self.line else ""
        start = f", from character {self.start} on" if self.start else ""
        return f"{self.path}{member}{line}{start}"


class Keys(NamedTuple):
    """Keys of a JSON line, or columns of a Parquet file: of its text, label, prompt and messages.

    '' for one that is not read.
    """

    text: str
    label: str = ""
    prompt: str = ""
    messages: str = ""

    def document(self, where: str, record: dict[str, Any], path: Place, number: int) -> Document:
        """Returns the document of a record, a line or a row; UserError if it lacks a key."""
        if self.messages:
            _check_key(where, record, "messages_key", self.messages)
            told = conversation(f"{where}: {self.messages!r}", record[self.messages])
            return Document("", path, number, messages=told)
        label = _label(where, record, self.label) if self.label else ""
        prompt = _text(where, record, "prompt_key", self.prompt) if self.prompt else ""
        text = _text(where, record, "text_key", self.text)
        return Document(text, path, number, label=label, prompt=prompt)


class Part(NamedTuple):
    """File of a corpus: its bytes, and a function that yields its documents."""

    size: int
    read: Callable[[], Iterator[Document]]


def is_table(path: Place) -> bool:
    """Returns whether the file has a document in each line or row."""
    return path.suffix == ".parquet" or _is_lines(path)


def is_archive(path: Place) -> bool:
    """Returns whether the file is an archive of text files."""
    return path.name.endswith(ARCHIVES)


def count(path: Place) -> int:
    """Counts the documents of a file; blank lines are none."""
    if _is_lines(path):
        return sum(1 for line in _raw_lines(path) if line.strip())
    if path.suffix == ".parquet":
        with _parquet(path) as table:
            return table.metadata.num_rows
    return sum(1 for _ in _members(path)) if is_archive(path) else 1


def read(path: Place, keys: Keys) -> Iterator[Document]:
    """Yields the documents of a file; UserError for one that cannot be read."""
    if _is_lines(path):
        return _lines(path, keys)
    if path.suffix == ".parquet":
        return _rows(path, keys)
    return _members(path) if is_archive(path) else iter([_whole(path)])


def _is_lines(path: Place) -> bool:
    return path.name.removesuffix(".gz").removesuffix(".xz").endswith(".jsonl")


@contextlib.contextmanager
def _opened(path: Place) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yields (file, its decompressed content); UserError when it cannot be read."""
    try:
        with path.open("rb") as file:
            yield file, COMPRESSED[path.suffix](file) if path.suffix in COMPRESSED else file
    except ERRORS as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _raw_lines(path: Place) -> Iterator[bytes]:
    with _opened(path) as (_, content):
        yield from _split(path, content)


def _split(path: Place, content: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file."""
    while line := content.readline(LARGEST + 1):
        yield bounded(f"a line of {path}", line)


def bounded(where: str, raw: bytes) -> bytes:
    """Returns the content; UserError if it is larger than a document may be."""
    if len(raw) > LARGEST:
        raise UserError(
            f"{where} has more than {LARGEST:,} bytes when it is unpacked. Unpack it yourself if "
            "you trust it, and cut it into smaller documents"
        )
    return raw


def _whole(path: Place) -> Document:
    with _opened(path) as (file, content):
        raw = content.read() if content is file else content.read(LARGEST + 1)
    if path.suffix in COMPRESSED:
        raw = bounded(str(path), raw)
    if raw.startswith(PARQUET) and raw.endswith(PARQUET):
        raise UserError(f"data.path: {path} is a Parquet file: call it {path.name}.parquet")
    return Document(_decode(str(path), raw, 0), path, position=path.stat().length)


def _lines(path: Place, keys: Keys) -> Iterator[Document]:
    offset = 0
    with _opened(path) as (file, content):
        for number, line in enumerate(_split(path, content), 1):
            if line.strip():
                where = f"{path}, line {number}"
                record = _record(where, _decode(str(path), line, offset))
                found = keys.document(where, record, path, number)
                yield found._replace(position=file.tell())
            offset += len(line)


def _rows(path: Place, keys: Keys) -> Iterator[Document]:
    wanted = {f"{name}_key": key for name, key in keys._asdict().items() if key}
    with _parquet(path) as table:
        for option, key in wanted.items():
            _check_key(str(path), table.schema_arrow.names, option, key)
        size, number = path.stat().length, 0
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=[*dict.fromkeys(wanted.values())]):
            for record in batch.to_pylist():
                number += 1
                where = f"{path}, row {number}"
                found = keys.document(where, record, path, number)
                yield found._replace(position=size * number // table.metadata.num_rows)


@contextlib.contextmanager
def _parquet(path: Place) -> Iterator[Any]:
    """Yields a `pyarrow.parquet.ParquetFile`; UserError when it cannot be read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} needs a package: pip install pyarrow") from error
    try:
        with path.open("rb") as file:
            yield pyarrow.parquet.ParquetFile(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _members(path: Place) -> Iterator[Document]:
    """Yields the text files of an archive, those of an archive in it in the order of names."""
    with _opened(path) as (file, _):
        if path.suffix == ".zip":
            found = _of_zip(file)
        elif path.name.endswith(INNER):
            found = _in_order(file)
        else:
            found = _of_tar(file)
        for name, raw in found:
            text = _decode(f"{path}, {name}", raw, 0)
            yield Document(text, path, member=name, position=file.tell())


def _of_zip(file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                with archive.open(member) as content:
                    yield member.filename, bounded(member.filename, content.read(LARGEST + 1))


def _of_tar(content: BinaryIO) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=content, mode="r|*") as archive:
        for member in archive:
            if member.isfile():
                raw = bounded(member.name, archive.extractfile(member).read(LARGEST + 1))
                is_inner = member.name.endswith(INNER)
                yield from _in_order(io.BytesIO(raw)) if is_inner else [(member.name, raw)]


def _in_order(content: BinaryIO) -> list[tuple[str, bytes]]:
    return sorted(_of_tar(content))


def _decode(where: str, raw: bytes, offset: int) -> str:
    """Decodes bytes from `offset` on of a file, without the mark with which it may begin."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text: byte {raw[error.start : error.start + 1]!r} at offset "
            f"{offset + error.start}. Convert it to UTF-8, or take it out of data.path."
        ) from error
    return text if offset else text.removeprefix(MARK)


def _record(where: str, line: str) -> dict[str, Any]:
    """Parses the object of one JSON line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise UserError(f"{where}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a JSON object but a {type(record).__name__}")
    return record


def _check_key(where: str, keys: Any, option: str, key: str) -> None:
    if key not in keys:
        has = ", ".join(sorted(keys))
        raise UserError(f"{where}: no key {key!r} (data.{option}); it has {has}")


def _text(where: str, record: dict[str, Any], option: str, key: str) -> str:
    _check_key(where, record, option, key)
    text = record[key]
    if not isinstance(text, str):
        raise UserError(f"{where}: {key!r} holds no text but a {type(text).__name__}")
    return without_surrogates(text)


def _label(where: str, record: dict[str, Any], key: str) -> str | int:
    _check_key(where, record, "label_key", key)
    label = record[key]
    if not isinstance(label, str | int) or isinstance(label, bool):
        kind = type(label).__name__
        raise UserError(f"{where}: {key!r} is no class, a name or a whole number, but a {kind}")
    return label
