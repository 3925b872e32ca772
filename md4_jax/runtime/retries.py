"""Repetition of writes that fail for a while: a disk that is full, a file server that restarts."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

FIRST_PAUSE = 1.0  # seconds; each later pause is twice as long


def pauses(times: int) -> Iterator[float]:
    """Yields the seconds to wait before each of so many repetitions."""
    for number in range(times):
        yield FIRST_PAUSE * 2**number


def wait(what: str, pause: float) -> None:
    """Says what failed, and waits."""
    print(f"warning: {what}. It is tried again in {pause:g} s", file=sys.stderr, flush=True)
    time.sleep(pause)


def patiently(action: Callable[[], Any], times: int) -> Any:
    """Returns action(); after an OSError it is repeated so many times, with growing pauses."""
    for pause in pauses(times):
        try:
            return action()
        except OSError as error:
            wait(str(error), pause)
    return action()
