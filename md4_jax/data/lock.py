"""Lock between processes: one makes a file, the others wait for it."""

import contextlib
import pathlib
import time
from collections.abc import Iterator

from md4_jax.data.cache import check_made
from md4_jax.runtime.locks import sign, take

SECONDS = 0.5


@contextlib.contextmanager
def alone(path: pathlib.Path, work: str) -> Iterator[None]:
    """Holds the lock file `path` within the block; waits while another process holds it.

    While it waits it prints who holds the lock. The system frees the lock when its holder ends,
    even by a crash. On a file system without locks, two processes write the same files, each
    completely.

    work: what is done under the lock, for the message
    """
    check_made(path.parent)
    with open(path, "a+") as file:
        has_printed = False
        while not take(file):
            file.seek(0)
            if not has_printed and (owner := file.read()):
                print(f"waiting: {work} is under way in {owner}", flush=True)
                has_printed = True
            time.sleep(SECONDS)
        sign(file)
        yield
