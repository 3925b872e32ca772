"""text8: the first 100 million characters of a 2006 Wikipedia, in 27 symbols."""

import dataclasses
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np

from md4_jax.data import contents, download
from md4_jax.data.sources.splits import bounds, digest
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, cache_root, exists, place, version

URL = "http://mattmahoney.net/dc/text8.zip"
ZIP_BYTES = 31_344_016
TEXT_BYTES = 100_000_000
TEXT_CRC = 0x7D6BE66F
MIN_BYTES = 100
# RuntimeError: a password or an unsupported compression; the last two: an invalid header.
ZIP_ERRORS = (
    OSError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError,
    struct.error,
)  # fmt: skip

_ALLOWED = np.zeros(256, bool)
_ALLOWED[list(b" abcdefghijklmnopqrstuvwxyz")] = True


@dataclasses.dataclass(frozen=True)
class Text8:
    """The text8 corpus: 90, 5 and 5 million characters for train, validation and test.

    path  the text8 file or its zip; None: text8 or text8.zip in the cache directory, downloaded if
          missing

    A shorter file is split in the same proportions, with a warning.

    Raises UserError for a file that is missing, too short, damaged or not text8, and if the
    download fails.
    """

    path: str | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        path = self._file()
        size = _text_size(path)
        if size == TEXT_BYTES:
            return ()
        warning = (
            f"{path} holds {size:,} characters, not the {TEXT_BYTES:,} of text8: it is split "
            "90/5/5 anyway, but results on it are not comparable with published text8 results."
        )
        return (warning,)

    def fingerprint(self) -> str:
        """Returns a hash of the name and content of the file."""
        return digest("text8", contents.of_texts([self._file()]))

    def documents(self, split: str) -> Iterator[str]:
        """Yields the split as one document."""
        path = self._file()
        content = _read(path)
        _check(path, content)
        start, stop = bounds(len(content), split, validation=0.05, test=0.05, unit="characters")
        yield content[start:stop].decode("ascii")

    def _file(self) -> Place:
        if self.path is not None:
            path = place(self.path, "data.path")
            if not exists(path) or path.is_dir():
                raise UserError(f"data.path: there is no file {path}")
            return path
        for name in ("text8", "text8.zip"):
            if (cache_root() / name).is_file():
                return cache_root() / name
        path = cache_root() / "text8.zip"
        advice = f"Fetch text8.zip elsewhere, then either put it at {path} or set data.path to it."
        return download.fetch(URL, path, size=ZIP_BYTES, instead=advice)


def _member(path: Place, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Returns the only file in the archive."""
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1:
        raise UserError(f"{path} should hold one file, text8, but holds {len(members)}")
    if members[0].file_size > TEXT_BYTES:
        raise UserError(
            f"{path} holds a file of {members[0].file_size:,} bytes, more than the "
            f"{TEXT_BYTES:,} of text8; for other text set data.name to 'text'"
        )
    return members[0]


def _text_size(path: Place) -> int:
    if path.suffix != ".zip":
        return version(path)[1]
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _member(path, archive).file_size
    except ZIP_ERRORS as error:
        raise UserError(_damaged(path, error)) from error


def _read(path: Place) -> bytes:
    if path.suffix != ".zip":
        return path.read_bytes()
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return archive.read(_member(path, archive))
    except ZIP_ERRORS as error:
        raise UserError(_damaged(path, error)) from error


def _damaged(path: Place, error: Exception) -> str:
    return f"{path} is not a whole zip file ({error}); delete it and fetch {URL} again"


def _check(path: Place, content: bytes) -> None:
    """Raises UserError unless the content is text8, or a shorter text in its 27 symbols."""
    if len(content) < MIN_BYTES:
        raise UserError(
            f"{path} holds {len(content)} bytes; text8 has {TEXT_BYTES:,} and at least "
            f"{MIN_BYTES} are needed for three splits"
        )
    wrong = np.flatnonzero(~_ALLOWED[np.frombuffer(content, np.uint8)])
    if wrong.size:
        offset = int(wrong[0])
        raise UserError(
            f"{path} is not text8: byte {content[offset : offset + 1]!r} at offset {offset}, "
            "where only 'a' to 'z' and the space are allowed. For other text set data.name to "
            "'text'."
        )
    crc = zlib.crc32(content)
    if len(content) == TEXT_BYTES and crc != TEXT_CRC:
        raise UserError(
            f"{path} has the size of text8 but its CRC-32 is {crc:08x} instead of {TEXT_CRC:08x}. "
            "It is damaged, or another corpus: for that set data.name to 'text'."
        )
