"""Standard streams that may go away, with a terminal or a pipe, without ending a run."""

import contextlib
import sys
from typing import Any, TextIO


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
    """Makes this process go on when nobody can read what it prints; its logs are files anyway."""
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)
