"""Documents of one file: text, JSON, tables, FASTA, Parquet, and archives of text files."""

import codecs
import contextlib
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from md4_jax.data.sources.fasta import ENDINGS as FASTA
from md4_jax.data.sources.fasta import of_fasta
from md4_jax.data.sources.records import Document, Keys, check_key, of_json, of_line, of_table
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, is_remote

MARK = "\ufeff"  # byte order mark that Windows editors write before UTF-8 text
LOOKED_AT = 512  # bytes of a file, to recognise UTF-16
PARQUET = b"PAR1"  # the first and the last bytes of such a file
ROWS_AT_ONCE = 1024
COMPRESSED = {".gz": gzip.open, ".xz": lzma.open}
INNER = "_data.xz"  # ending of the tar archives inside that of OpenWebText
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", INNER)
LINES = (".jsonl", ".ndjson")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
RECORDS = (".json", *SEPARATORS, *FASTA)
TEXTS = (".txt", ".json", *LINES, *SEPARATORS, *FASTA)
ENDINGS = (".parquet", *ARCHIVES, *(text + end for text in TEXTS for end in ("", *COMPRESSED)))
FIRST_BYTES = 1 << 16
LARGEST = 1 << 30  # bytes of an unpacked document
ERRORS = (
    OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile,
    TypeError, ValueError, struct.error,  # a header of nonsense
    RuntimeError,  # a zip file with a password, or of a compression that Python does not have
)  # fmt: skip


def is_table(path: Place) -> bool:
    """Returns whether the file has a document in each line, row or record."""
    return path.suffix == ".parquet" or _kind(path) in LINES or is_new_table(path)


def is_new_table(path: Place) -> bool:
    """Returns whether the file has records that earlier versions read as one text."""
    return _kind(path) in (".ndjson", *RECORDS)


def is_archive(path: Place) -> bool:
    """Returns whether the file is an archive of text files."""
    return path.name.endswith(ARCHIVES)


def has_windows_ends(path: Place) -> bool:
    """Returns whether the first lines of a local file end in \\r\\n instead of \\n."""
    if is_remote(path) or is_table(path) or is_archive(path) or path.suffix in COMPRESSED:
        return False
    with _opened(path) as (_, content):
        return b"\r\n" in content.read(FIRST_BYTES)


def count(path: Place, keys: Keys) -> int:
    """Counts the documents of a file; blank lines are not documents."""
    if keys.is_plain:
        return sum(1 for _ in _members(path)) if is_archive(path) else 1
    if _kind(path) in LINES:
        return sum(1 for line in _raw_lines(path) if line.strip())
    if _kind(path) in RECORDS:
        with _explained(path):
            return sum(1 for _ in _records(path))
    if path.suffix == ".parquet":
        with _parquet(path) as table:
            return table.metadata.num_rows
    return sum(1 for _ in _members(path)) if is_archive(path) else 1


def read(path: Place, keys: Keys) -> Iterator[Document]:
    """Yields the documents of a file; UserError if it cannot be read."""
    if keys.is_plain:
        return _members(path) if is_archive(path) else iter([whole(path)])
    if _kind(path) in LINES:
        return _lines(path, keys)
    if _kind(path) in RECORDS:
        return _of_records(path, keys)
    if path.suffix == ".parquet":
        return _rows(path, keys)
    return _members(path) if is_archive(path) else iter([whole(path)])


def _kind(path: Place) -> str:
    """Returns the file name extension, in lower case and without .gz or .xz."""
    name = path.name.lower().removesuffix(".gz").removesuffix(".xz")
    return name[name.rfind(".") :] if "." in name else ""


@contextlib.contextmanager
def _opened(path: Place) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yields (file, its decompressed content); UserError if it cannot be read."""
    if path.suffix in COMPRESSED and not path.stat().length:  # gzip would read it as no text
        raise UserError(
            f"{path} cannot be read: it has 0 bytes, which no compressed file has. Fetch it again"
        )
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
    """Returns the content; UserError if it exceeds the largest size of a document."""
    if len(raw) > LARGEST:
        raise UserError(
            f"{where} has more than {LARGEST:,} bytes after decompression. Decompress it yourself "
            "if you trust it, and split it into smaller documents"
        )
    return raw


def _content(path: Place) -> bytes:
    with _opened(path) as (file, content):
        raw = content.read() if content is file else content.read(LARGEST + 1)
    return bounded(str(path), raw) if path.suffix in COMPRESSED else raw


def whole(path: Place) -> Document:
    """Returns a file as one text, whatever its name."""
    raw = _content(path)
    if raw.startswith(PARQUET) and raw.endswith(PARQUET):
        raise UserError(f"data.path: {path} is a Parquet file: rename it to {path.name}.parquet")
    return Document(_decode(str(path), raw, 0), path, position=path.stat().length)


def _lines(path: Place, keys: Keys) -> Iterator[Document]:
    offset = 0
    with _opened(path) as (file, content):
        for number, line in enumerate(_split(path, content), 1):
            if line.strip():
                where = f"{path}, line {number}"
                record = of_line(where, _decode(str(path), line, offset))
                found = keys.document(where, record, path, number)
                yield found._replace(position=file.tell())
            offset += len(line)


def _of_records(path: Place, keys: Keys) -> Iterator[Document]:
    """Yields the documents of a JSON file or of a table with a header."""
    with _explained(path):
        for number, where, record, position in _records(path):
            if _kind(path) in SEPARATORS and _is_number(record.get(keys.label)):
                record[keys.label] = int(record[keys.label])  # every cell of a table is text
            yield keys.document(where, record, path, number)._replace(position=position)


@contextlib.contextmanager
def _explained(path: Place) -> Iterator[None]:
    """Adds advice to a UserError: how to read the file as plain text."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{error}. A {_kind(path)} file is read as records. To train on its characters as they "
            "are, give it a name that ends in .txt, or set data.text_key='' for all files"
        ) from error


def _records(path: Place) -> Iterator[tuple[int, str, dict[str, Any], int]]:
    """Yields (number of the row or line, place, record, bytes read so far)."""
    kind = _kind(path)
    if kind == ".json":
        size, found = path.stat().length, _decode(str(path), _content(path), 0)
        for number, (where, record) in enumerate(of_json(str(path), found), 1):
            yield number, where, record, size
        return
    with _opened(path) as (file, content):
        lines = _texts(path, content)
        if kind in FASTA:
            for line, record in of_fasta(str(path), lines):
                yield line, f"{path}, line {line}", record, file.tell()
            return
        found = of_table(str(path), lines, SEPARATORS[kind])
        for number, (line, record) in enumerate(found, 1):
            yield number, f"{path}, line {line}", record, file.tell()


def _texts(path: Place, content: BinaryIO) -> Iterator[str]:
    offset = 0
    for line in _split(path, content):
        yield _decode(str(path), line, offset)
        offset += len(line)


def _is_number(label: Any) -> bool:
    """Returns whether a cell holds a whole number in the usual notation."""
    return isinstance(label, str) and label.isdecimal() and str(int(label)) == label


def _rows(path: Place, keys: Keys) -> Iterator[Document]:
    wanted = {f"{name}_key": key for name, key in keys._asdict().items() if key}
    with _parquet(path) as table:
        for option, key in wanted.items():
            check_key(str(path), table.schema_arrow.names, option, key)
        size, number = path.stat().length, 0
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=[*dict.fromkeys(wanted.values())]):
            for record in batch.to_pylist():
                number += 1
                where = f"{path}, row {number}"
                found = keys.document(where, record, path, number)
                yield found._replace(position=size * number // table.metadata.num_rows)


@contextlib.contextmanager
def _parquet(path: Place) -> Iterator[Any]:
    """Yields a `pyarrow.parquet.ParquetFile`; UserError if it cannot be read."""
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
    """Yields the text files of an archive; archives inside it are read in the order of names."""
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
    """Decodes the bytes of a file from `offset` on, without an initial byte order mark."""
    if not offset and _is_utf16(raw):
        raise UserError(f"{where} is UTF-16 text: convert it to UTF-8")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text: byte {raw[error.start : error.start + 1]!r} at offset "
            f"{offset + error.start}. Convert it to UTF-8, or take it out of data.path."
        ) from error
    return text if offset else text.removeprefix(MARK)


def _is_utf16(raw: bytes) -> bool:
    """Returns whether bytes begin with the mark of UTF-16, or have a zero in about every pair.

    Without its mark UTF-16 text can be valid UTF-8, with a NUL beside each character.
    """
    begin = raw[:LOOKED_AT]
    odd, even = begin[1::2].count(0), begin[::2].count(0)
    is_paired = len(begin) > 3 and min(odd, even) == 0 and 4 * max(odd, even) > len(begin)
    return is_paired or raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
