"""Output of a process: streams that may go away without ending it, errors, silent libraries."""

import contextlib
import logging
import os
import re
import sys
from typing import Any, TextIO

from md4_jax.protocols import UserError


class Lasting:
    """A stream whose failed writes are dropped: a closed pipe, a lost terminal, a full disk."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # ValueError: it is closed
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive() -> None:
    """Makes this process go on when nobody can read what it prints; its logs are files anyway.

    Streams that are closed from the start are None: their numbers would go to the next files.
    """
    is_whole = sys.stdout and sys.stderr
    silent = None if is_whole else open(os.devnull, "w")  # noqa: SIM115
    sys.stdout, sys.stderr = Lasting(sys.stdout or silent), Lasting(sys.stderr or silent)


# Control characters but for line ends and tabs, changes of direction, and halves of a pair.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escapes what a terminal would obey, such as in samples and names from files."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def print_user_error(error: UserError) -> int:
    """Prints a UserError without a traceback; returns the exit code 2."""
    print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
    return 2


def silence_libraries() -> None:
    """Silences the logs of libraries; this package reports its errors itself."""
    for name in ("absl", "asyncio"):  # Orbax logs tracebacks of what it also raises
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # It prints by itself what the root logger would print once more.
    logging.getLogger("huggingface_hub").propagate = False
    # After a failed read, Orbax's unfinished reads raise when they are garbage-collected.
    others = sys.unraisablehook

    def hook(event) -> None:
        text = str(event.exc_value)
        if "Event loop is closed" not in text and "TensorStore" not in text:
            others(event)

    sys.unraisablehook = hook
