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
    """Holds the lock file `path` within the block; waits, and says for whom, while another does.

    work: what is done under the lock, for the message. The system frees the lock when its holder
    ends, in whatever way, so that a lock of a dead process is never waited for. On a file system
    without locks two processes write the same files, each whole.
    """
    check_made(path.parent)
    with open(path, "a+") as file:
        is_told = False
        while not take(file):
            file.seek(0)
            if not is_told and (owner := file.read()):
                print(f"waiting: {work} is under way in {owner}", flush=True)
                is_told = True
            time.sleep(SECONDS)
        sign(file)
        yield
