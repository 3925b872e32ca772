"""Output of a process: robust streams, error messages, and silencing of libraries."""

import contextlib
import logging
import os
import re
import sys
from typing import Any, TextIO

from md4_jax.protocols import UserError


class Lasting:
    """A stream that ignores failed writes: a closed pipe, a lost terminal, a full disk."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:  # the encoding of the locale lacks a character
            lacking = error.encoding
            return self.write(text.encode(lacking, "backslashreplace").decode(lacking))
        except (OSError, ValueError):  # ValueError: it is closed
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive() -> None:
    """Makes this process continue when its output cannot be written; its logs are in files.

    Streams that are closed at the start are None. Their file descriptors get the null device:
    otherwise the next files would have these numbers, to which libraries in C write.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    is_whole = sys.stdout and sys.stderr
    silent = None if is_whole else open(os.devnull, "w")  # noqa: SIM115
    sys.stdout, sys.stderr = Lasting(sys.stdout or silent), Lasting(sys.stderr or silent)


# Control characters except line ends and tabs, direction marks, and unpaired surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escapes control sequences for a terminal, for example in samples and file names."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def print_user_error(error: UserError) -> int:
    """Prints a UserError without a traceback; returns the exit code 2."""
    print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
    return 2


def silence_libraries() -> None:
    """Silences the logs of libraries; this package reports their errors itself."""
    for name in ("absl", "asyncio"):  # Orbax logs tracebacks of errors that it also raises
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # It prints messages itself, and the root logger would print them again.
    logging.getLogger("huggingface_hub").propagate = False
    # After a failed read, Orbax's unfinished reads raise when they are garbage-collected.
    others = sys.unraisablehook

    def hook(event) -> None:
        text = str(event.exc_value)
        if "Event loop is closed" not in text and "TensorStore" not in text:
            others(event)

    sys.unraisablehook = hook
