"""Locks of directories and files between processes, on one machine or several."""

import contextlib
import datetime
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, is_remote, replace

FILE = ".in_use"
# Seconds in object storage: a lock is rewritten every BEAT, and expires when older than LOST.
BEAT, LOST = 15.0, 60.0
# If several processes sign a free lock there within this many seconds, the last one gets it.
SETTLED = 3.0


@contextlib.contextmanager
def exclusive(directory: Place, say: Callable[[str], None] = print) -> Iterator[None]:
    """Holds the lock of a run directory; UserError, with the holder, if another process has it.

    The operating system frees the lock of a local directory when its holder ends in any way. In
    object storage the holder rewrites it every BEAT seconds. An existing lock there is valid if it
    is rewritten within LOST seconds; this process prints a message and waits that long. If the lock
    says that it is older, this process waits for two beats.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE
    with _in_store(path, say) if is_remote(directory) else _on_disk(path):
        yield


@contextlib.contextmanager
def _on_disk(path: Place) -> Iterator[None]:
    with open(path, "a+") as file:
        if not take(file):
            file.seek(0)
            raise _in_use(path, file.read() or "another process")
        sign(file)
        try:
            yield
        finally:
            file.truncate(0)


@contextlib.contextmanager
def _in_store(path: Place, say: Callable[[str], None]) -> Iterator[None]:
    _outlast(path, say)
    ended = threading.Event()
    signature = {"owner": whoami(), "machine": _machine(), "process": os.getpid()}

    def sign_again() -> None:
        replace(path, json.dumps({**signature, "beat": time.time()}))

    sign_again()
    time.sleep(SETTLED)
    now = _read(path)
    if now is not None and signature.items() - now.items():
        raise _in_use(path, now["owner"])

    def beat() -> None:
        while not ended.wait(BEAT):
            with contextlib.suppress(Exception):  # the store may be unavailable for a while
                sign_again()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def _outlast(path: Place, say: Callable[[str], None]) -> None:
    """Waits until a lock in object storage expires; UserError as soon as it is rewritten."""
    found = _read(path)
    if found is None or _is_dead(found):
        return
    # At least two beats: the clock of its machine may be behind, or the store may have been away.
    left = min(max(found["beat"] + LOST - time.time(), 2 * BEAT), LOST)
    say(
        f"{path.parent} was in use by {found['owner']}: waiting {left:.0f} s to see whether it is "
        "still running"
    )
    until = time.monotonic() + left
    while time.monotonic() < until:
        time.sleep(min(1.0, BEAT))
        now = _read(path)
        if now is None:
            return
        if now != found:
            raise _in_use(path, now["owner"])


def _read(path: Place) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def _is_dead(found: dict) -> bool:
    """Returns whether a lock belongs to a process of this machine that has ended."""
    if found["machine"] != _machine():
        return False
    try:
        os.kill(found["process"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return found["process"] == os.getpid()  # the first process of a container that was restarted


def _machine() -> str:
    """Returns an identifier shared by processes that see each other's process ids."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has these files
        names.append(os.readlink("/proc/self/ns/pid"))
        with open("/proc/sys/kernel/random/boot_id") as file:
            names.append(file.read().strip())
    return " ".join(names)


def _in_use(path: Place, owner: str) -> UserError:
    return UserError(
        f"{path.parent} is in use by {owner}: stop that process, or use another --workdir"
    )


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
    """Writes the holder into a locked file, for the messages of other processes."""
    file.truncate(0)
    file.write(whoami())
    file.flush()


def whoami() -> str:
    now = datetime.datetime.now().isoformat(" ", "seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {now}"
