"""Places of files: local paths and addresses of object storage alike."""

import errno
import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from etils import epath

from md4_jax.protocols import UserError

Place = epath.Path  # what all of the package takes for a file or a directory

# Scheme of an address -> the package through which fsspec reads and writes there.
STORES = {"gs": "gcsfs", "s3": "s3fs"}
PATTERN = "*?[\\"  # what a pattern of file names does not take for itself


def place(text: Any, key: str = "--workdir") -> Place:
    """An absolute local path, ~ expanded, or the address of an object store: gs://bucket/runs/a.

    key is what the user set to it. UserError for an address that nothing installed can reach.
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
    """The directory of what can be made again: $MD4_JAX_CACHE, or ~/.cache/md4_jax."""
    named = os.environ.get("MD4_JAX_CACHE")
    return pathlib.Path(named) if named else pathlib.Path.home() / ".cache" / "md4_jax"


def check_name(directory: Place) -> None:
    """UserError for a directory in which checkpoints could be written and then not be read.

    The checkpoint library collects its files by a pattern that begins with the directory's path.
    """
    found = [c for c in PATTERN if c in str(directory)]
    if found:
        raise UserError(
            f"--workdir {directory}: checkpoints in a path with {' '.join(found)} could not be "
            "read again. Choose another --workdir; a run that lies there goes on once its "
            "directory has another name"
        )


def is_remote(path: Any) -> bool:
    """Whether it is an address of object storage, where files are replaced and never added to."""
    return "://" in str(path)


def exists(path: Place) -> bool:
    """Whether it is there; UserError if an object store cannot be asked."""
    try:
        return path.exists()
    except Exception as error:  # each object store has errors of its own
        if not is_remote(path):
            raise
        raise UserError(f"{path} cannot be read: {_reason(error)}") from error


def version(path: Any) -> tuple[str | int, ...]:
    """(address, bytes, times of change) of a file, which tell one content from another.

    Of a local file two times: one can be set back, as copying does that preserves it, that of the
    last change of anything cannot.
    """
    if is_remote(path):
        found = path.stat()
        return str(path), found.length, int(found.mtime or 0)
    real = os.path.realpath(path)
    found = os.stat(real)
    return real, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def append(path: Place, text: str) -> None:
    """Adds to a file, which need not exist."""
    if is_remote(path):
        path.write_text((path.read_text() if path.exists() else "") + text)
        return
    with path.open("a") as file:
        file.write(text)


def replace(path: Place, text: str) -> None:
    """Writes a file, whole or not at all. Objects appear whole in any case."""
    if is_remote(path):
        path.write_text(text)
        return
    partial = path.parent / (path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or a machine that goes down could leave the name and no content
    partial.replace(path)


def move(path: Place, target: Place) -> None:
    """Moves a directory to where there is none."""
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
    """Makes the directory if need be; UserError with the reason if one cannot write there."""
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
