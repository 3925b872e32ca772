"""Locks of directories and files between processes, on one machine or several."""

import contextlib
import datetime
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import IO

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, is_remote, replace

FILE = ".in_use"
# In object storage, a lock is written again so often, and one that is older than LOST is void.
BEAT, LOST = 60.0, 300.0


@contextlib.contextmanager
def exclusive(directory: Place) -> Iterator[None]:
    """Holds the lock of a run directory; UserError, which says who has it, if another process does.

    The operating system frees the lock of a local directory when its holder ends in any way. In
    object storage the holder writes it again every BEAT seconds, and it counts for LOST seconds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (_in_store if is_remote(directory) else _on_disk)(directory / FILE):
        yield


@contextlib.contextmanager
def _on_disk(path: Place) -> Iterator[None]:
    with open(path, "a+") as file:
        if not take(file):
            file.seek(0)
            raise UserError(
                f"{path.parent} is in use by {file.read() or 'another process'}: stop that one, "
                "or choose another --workdir"
            )
        sign(file)
        yield
        file.truncate(0)


@contextlib.contextmanager
def _in_store(path: Place) -> Iterator[None]:
    found = json.loads(path.read_text()) if path.exists() else None
    if found is not None and time.time() - found["beat"] < LOST:
        raise UserError(
            f"{path.parent} is in use by {found['owner']}: stop that one, or choose another "
            f"--workdir. If it has ended, wait {LOST:.0f} s or delete {path}"
        )
    ended, owner = threading.Event(), whoami()

    def beat() -> None:
        while True:
            with contextlib.suppress(Exception):  # the store may be away for a while
                replace(path, json.dumps({"owner": owner, "beat": time.time()}))
            if ended.wait(BEAT):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def take(file: IO[str]) -> bool:
    """Locks an open file; returns False if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def sign(file: IO[str]) -> None:
    """Writes who holds a locked file, for the messages of others."""
    file.truncate(0)
    file.write(whoami())
    file.flush()


def whoami() -> str:
    now = datetime.datetime.now().isoformat(" ", "seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {now}"
