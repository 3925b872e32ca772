"""Atomic writes of files that can be recreated: downloads and tokens."""

import contextlib
import errno
import glob
import os
import pathlib
import time
import uuid
from collections.abc import Iterator

from md4_jax.protocols import UserError

# Seconds after its last write from which a temporary file is of a process that was killed.
DEAD = 86_400.0


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path, renamed to `path` when the block succeeds and deleted otherwise.

    Each writer has its own temporary file, and the rename is atomic. So several processes may
    make the same file at once, and no reader sees an incomplete file. Temporary files of this file
    that nobody has written to for a day are deleted: a killed process leaves its own.

    Raises UserError, naming the directory, if the disk is full or the directory is not writable.
    """
    check_made(path.parent)
    _delete_dead(path)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        temporary.touch(exist_ok=False)  # tempfile would hide it from others who share the cache
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    try:
        with full_disk_named(path.parent):
            yield temporary
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _delete_dead(path: pathlib.Path) -> None:
    """Deletes temporary files of `path` that were not written for DEAD seconds."""
    with contextlib.suppress(OSError):  # another process may delete them at the same time
        for left in path.parent.glob(glob.escape(path.name) + ".*.part"):
            if time.time() - left.stat().st_mtime > DEAD:
                left.unlink()


@contextlib.contextmanager
def full_disk_named(directory: pathlib.Path) -> Iterator[None]:
    """Turns errors of a full disk or an unwritable directory into a UserError that names it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise _unwritable(directory, error) from error


def check_made(directory: pathlib.Path) -> None:
    """Creates the directory if it does not exist; UserError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from error


def _unwritable(directory: pathlib.Path, error: OSError) -> UserError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Free some space there, or set" if is_full else "Set the environment variable"
    return UserError(
        f"cannot write to the cache directory {directory}: {error.strerror}. {remedy} "
        f"MD4_JAX_CACHE to a directory {'with more' if is_full else 'that you can write to'}"
    )
