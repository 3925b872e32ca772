"""Processes that encode texts, one per core, each started as `python -m md4_jax.data.workers`."""

import collections
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from md4_jax.protocols import UserError

WAITING = 2  # batches per process that are read ahead

# Concatenated ids of texts, and the number of ids of each.
Encoded = tuple[np.ndarray, np.ndarray]


def encoded(tokenizer: Any, end: np.ndarray, texts: list[str]) -> Encoded:
    """Encodes texts, each followed by `end`; UserError for a text that cannot be encoded."""
    found = [ids for one in tokenizer.encode_batch(texts) for ids in (one, end)]
    lengths = np.array([len(ids) for ids in found]).reshape(-1, 2).sum(-1)
    return np.concatenate([end[:0], *found]), lengths


class Pool:
    """Pool of encoding processes; without any, batches are encoded in this process."""

    def __init__(self, tokenizer: Any, end: np.ndarray, count: int):
        self._tokenizer, self._end = tokenizer, end
        self._free: queue.SimpleQueue = queue.SimpleQueue()
        self._processes = [_started() for _ in range(count)]
        for process in self._processes:  # the pipe is full until the process has started
            pickle.dump((tokenizer, end), process.stdin)
            process.stdin.flush()
            self._free.put(process)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()

    def map(self, batches: Iterable[Any], texts: Callable[[Any], list[str]]) -> Iterator[Any]:
        """Yields (batch, its encoded texts or a UserError), in the order of the batches."""
        count = len(self._processes)
        if not count:
            for batch in batches:
                yield batch, _tried(self._tokenizer, self._end, texts(batch))
            return
        waiting: collections.deque[tuple[Any, Future]] = collections.deque()
        with ThreadPoolExecutor(count) as threads:
            try:
                for batch in batches:
                    waiting.append((batch, threads.submit(self._ask, texts(batch))))
                    if len(waiting) > WAITING * count:
                        batch, future = waiting.popleft()
                        yield batch, future.result()
                for batch, future in waiting:
                    yield batch, future.result()
            finally:  # after Ctrl-C or an error nobody waits for batches that have not begun
                threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, texts: list[str]) -> Encoded | UserError:
        process = self._free.get()
        try:
            pickle.dump(texts, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(
                f"a tokenising process ended (exit code {process.wait()}), perhaps because memory "
                "ran out. Repeat the command: it continues after the last complete shard"
            ) from error
        finally:
            self._free.put(process)


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tried(tokenizer: Any, end: np.ndarray, texts: list[str]) -> Encoded | UserError:
    try:
        return encoded(tokenizer, end, texts)
    except UserError as error:
        return error


def _started() -> subprocess.Popen:
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "md4_jax.data.workers"],
        env={**os.environ, **settings, "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def main() -> None:
    """Encodes each list of texts on the standard input, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks handles it
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps output of libraries out of the answers
    tokenizer, end = pickle.load(source)
    while True:
        try:
            texts = pickle.load(source)
        except EOFError:
            return
        pickle.dump(_tried(tokenizer, end, texts), target, pickle.HIGHEST_PROTOCOL)
        target.flush()


if __name__ == "__main__":
    main()
