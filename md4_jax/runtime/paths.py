"""Paths of files: local ones, and addresses in object storage."""

import contextlib
import errno
import fcntl
import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from etils import epath

from md4_jax.protocols import UserError

Place = epath.Path  # type of every path in the package

# Scheme of an address -> the package that fsspec needs for it.
STORES = {"gs": "gcsfs", "s3": "s3fs"}
PATTERN = "*?[\\"  # special characters in file name patterns


def place(text: Any, key: str = "--workdir") -> Place:
    """Returns an absolute local path, with ~ expanded, or an address such as gs://bucket/runs/a.

    key: the option that the user set, for the message. UserError for an address that no installed
    package can reach.
    """
    scheme, mark, _ = str(text).partition("://")
    if not mark:
        return epath.Path(os.path.abspath(os.path.expanduser(text)))
    if scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        raise UserError(
            f"{key}={text}: an address must begin with {known}, and everything else is a local path"
        )
    if importlib.util.find_spec(STORES[scheme]) is None:
        raise UserError(f"{key}={text} needs a package: pip install {STORES[scheme]}")
    return epath.Path(text)


def cache_root() -> pathlib.Path:
    """Returns the cache directory: $MD4_JAX_CACHE or ~/.cache/md4_jax."""
    named = os.environ.get("MD4_JAX_CACHE")
    return pathlib.Path(named) if named else pathlib.Path.home() / ".cache" / "md4_jax"


def check_name(directory: Place) -> None:
    """Raises UserError for a directory in which checkpoints could be written but not read.

    The checkpoint library finds files by a pattern that begins with the path of the directory.
    """
    found = [c for c in PATTERN if c in str(directory)]
    if found:
        raise UserError(
            f"--workdir {directory}: checkpoints in a path with {' '.join(found)} could not be "
            "read again. Use another --workdir. To continue a run in it, rename the directory"
        )


def is_remote(path: Any) -> bool:
    """Returns whether the path is in object storage, where appending is impossible."""
    return "://" in str(path)


def exists(path: Place) -> bool:
    """Returns whether the file exists; UserError if its folder or object store is inaccessible."""
    try:
        if not is_remote(path):
            os.stat(path)  # epath would treat a folder without permission as empty
        return path.exists()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            return False
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # each object store has errors of its own
        if not is_remote(path):
            raise
        raise UserError(f"{path} cannot be read: {_reason(error)}") from error


def version(path: Any) -> tuple[str | int, ...]:
    """Returns (address, bytes, modification times) of a file, which identify its content.

    A local file has two times: the modification time of the content, which can be set back (by a
    copy that preserves times), and the time of the last change of any kind, which cannot.
    """
    if is_remote(path):
        found = path.stat()
        return str(path), found.length, int(found.mtime or 0)
    real = os.path.realpath(path)
    found = os.stat(real)
    return real, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextlib.contextmanager
def _as_disk(path: Place) -> Iterator[None]:
    """Converts errors of an object store to OSError, as a disk raises, so that callers retry.

    Errors of gcsfs and of its connections are not OSErrors.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, _reason(error), str(path)) from error


def read_range(path: Place, start: int, stop: int) -> bytes:
    """Reads the bytes [start, stop) of a file; from an object store, fetches only these."""
    if is_remote(path):
        import fsspec

        with _as_disk(path):
            store, name = fsspec.core.url_to_fs(str(path))
            return store.cat_file(name, start=start, end=stop)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


@contextlib.contextmanager
def alone(directory: Place) -> Iterator[None]:
    """Holds the lock of a local directory within the block; waits while another process has it."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        _lock(opened)
        yield
    finally:
        os.close(opened)


def _lock(opened: int) -> None:
    """Waits for the lock of an open file, which is held until it is closed."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(opened, fcntl.LOCK_EX)


def append(path: Place, text: str) -> None:
    """Appends lines to a file, created if missing, and waits until they are on the disk.

    If this fails, the file is unchanged, so that the same lines can be appended again. Removes a
    last line that was truncated by a crash. Processes that append to one local file take turns.
    """
    if is_remote(path):
        with _as_disk(path):
            path.write_text((path.read_text() if path.exists() else "") + text)
        return
    with open(path, "ab+", buffering=0) as file:
        _lock(file.fileno())  # otherwise the line of another process could be removed
        before = _whole_lines(file)
        file.truncate(before)
        try:
            left = text.encode()
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
            if not before:
                sync_names(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise


def _whole_lines(file: BinaryIO) -> int:
    """Returns the size of a file without an incomplete last line."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if not size or file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1


def replace(path: Place, text: str) -> None:
    """Writes a file atomically, even if the machine loses power.

    In object storage every write is atomic.
    """
    if is_remote(path):
        with _as_disk(path):
            path.write_text(text)
        return
    partial = path.parent / (path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Otherwise the new name could reach the disk before the content.
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()  # a full disk needs the space
        raise
    sync_names(path.parent)


def sync_names(directory: Place) -> None:
    """Flushes the file names of a local directory to the disk."""
    _sync(directory)


def sync_all(directory: Place) -> None:
    """Flushes all files and names in a local directory to the disk, its own name last."""
    if is_remote(directory):  # where every write is atomic
        return
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync(os.path.join(folder, name))
        _sync(folder)
    _sync(directory.parent)


def _sync(path: Any) -> None:
    opened = os.open(path, os.O_RDONLY)
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


def check_links(directory: Place) -> None:
    """Raises UserError for a symbolic link below a local directory that points outside.

    The directory may be untrusted: writing there must not change other files.
    """
    if is_remote(directory):
        return
    top = os.path.realpath(directory)
    for folder, folders, files in os.walk(directory):
        for path in (os.path.join(folder, name) for name in (*folders, *files)):
            target = os.path.realpath(path)
            if os.path.islink(path) and os.path.commonpath([top, target]) != top:
                raise UserError(
                    f"{path} is a symbolic link to {target}, which lies outside of {directory}. "
                    "Nothing is written through such a link: put the files here in its place, or "
                    "make --workdir itself the link"
                )


def check_writable(directory: Place, flag: str = "--workdir ", remedy: str = "") -> None:
    """Creates the directory if missing; UserError with the reason if it is not writable.

    flag: how the user named it, as the message begins. remedy: its end
    """
    try:
        if not is_remote(directory) and directory.is_file():
            raise UserError(f"{flag}{directory} is a file, and not a directory")
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
        if not is_remote(directory):
            sync_names(directory.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{flag}{directory} cannot be written: {_reason(error)}{remedy}") from error
    except Exception as error:  # each object store has errors of its own
        if not is_remote(directory):
            raise
        raise UserError(f"{flag}{directory} cannot be written: {_reason(error)}{remedy}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"[:400]
