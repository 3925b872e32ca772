"""Paths of files, local ones and addresses in object storage."""

import errno
import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from etils import epath

from md4_jax.protocols import UserError

Place = epath.Path  # type of every path in the package

# Scheme of an address -> the package with which fsspec reads and writes there.
STORES = {"gs": "gcsfs", "s3": "s3fs"}
PATTERN = "*?[\\"  # characters with a meaning in patterns of file names


def place(text: Any, key: str = "--workdir") -> Place:
    """Returns an absolute local path, ~ expanded, or an address such as gs://bucket/runs/a.

    key: the option that the user set, for the message. UserError for an address that no installed
    package can reach.
    """
    scheme, mark, _ = str(text).partition("://")
    if not mark:
        return epath.Path(os.path.abspath(os.path.expanduser(text)))
    if scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        raise UserError(f"{key}={text}: addresses begin with {known}, others are local paths")
    if importlib.util.find_spec(STORES[scheme]) is None:
        raise UserError(f"{key}={text} needs a package: pip install {STORES[scheme]}")
    return epath.Path(text)


def cache_root() -> pathlib.Path:
    """Returns the directory of files that can be made again: $MD4_JAX_CACHE or ~/.cache/md4_jax."""
    named = os.environ.get("MD4_JAX_CACHE")
    return pathlib.Path(named) if named else pathlib.Path.home() / ".cache" / "md4_jax"


def check_name(directory: Place) -> None:
    """Raises UserError for a directory whose checkpoints could be written and not be read.

    The checkpoint library finds its files by a pattern that begins with the path of the directory.
    """
    found = [c for c in PATTERN if c in str(directory)]
    if found:
        raise UserError(
            f"--workdir {directory}: checkpoints in a path with {' '.join(found)} could not be "
            "read again. Choose another --workdir; a run that lies there goes on once its "
            "directory has another name"
        )


def is_remote(path: Any) -> bool:
    """Returns whether the path is in object storage, where files cannot be appended to."""
    return "://" in str(path)


def exists(path: Place) -> bool:
    """Returns whether the file exists; UserError if its object store does not answer."""
    try:
        return path.exists()
    except Exception as error:  # each object store has errors of its own
        if not is_remote(path):
            raise
        raise UserError(f"{path} cannot be read: {_reason(error)}") from error


def version(path: Any) -> tuple[str | int, ...]:
    """Returns (address, bytes, times of change) of a file, which identify its content.

    A local file has two times. That of the content can be set back, which a copy that preserves
    times does; that of the last change of anything cannot.
    """
    if is_remote(path):
        found = path.stat()
        return str(path), found.length, int(found.mtime or 0)
    real = os.path.realpath(path)
    found = os.stat(real)
    return real, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_range(path: Place, start: int, stop: int) -> bytes:
    """Reads the bytes [start, stop) of a file; of an object in a store no others are fetched."""
    if is_remote(path):
        import fsspec

        store, name = fsspec.core.url_to_fs(str(path))
        return store.cat_file(name, start=start, end=stop)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def append(path: Place, text: str) -> None:
    """Appends to a file, which need not exist."""
    if is_remote(path):
        path.write_text((path.read_text() if path.exists() else "") + text)
        return
    with path.open("a") as file:
        file.write(text)


def replace(path: Place, text: str) -> None:
    """Writes a file, whole or not at all, even if the machine loses power meanwhile.

    In object storage every write is so.
    """
    if is_remote(path):
        path.write_text(text)
        return
    partial = path.parent / (path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or the new name could outlive the content
    partial.replace(path)
    _sync_names(path.parent)


def _sync_names(directory: Place) -> None:
    """Writes the names of the files in a local directory to the disk."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise
    finally:
        os.close(opened)


def move(path: Place, target: Place) -> None:
    """Moves a directory to a path that does not exist."""
    if not is_remote(path):
        os.replace(path, target)
        return
    for file in _files(path):
        file.copy(target / file.relative_to(path))
    path.rmtree()


def _files(directory: Place) -> Iterator[Place]:
    for path in directory.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def check_writable(directory: Place) -> None:
    """Makes the directory if need be; UserError with the reason if it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"--workdir {directory} cannot be written: {_reason(error)}") from error
    except Exception as error:  # each object store has errors of its own
        if not is_remote(directory):
            raise
        raise UserError(f"--workdir {directory} cannot be written: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"[:400]
