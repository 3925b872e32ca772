"""Retries of writes that fail temporarily: on a full disk, or a restarting file server."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

FIRST_PAUSE = 1.0  # seconds; each later pause is twice as long


def pauses(times: int) -> Iterator[float]:
    """Yields the seconds to wait before each of `times` retries."""
    for number in range(times):
        yield FIRST_PAUSE * 2**number


def wait(what: str, pause: float) -> None:
    """Prints what failed, and waits."""
    print(f"warning: {what}. Trying again in {pause:g} s", file=sys.stderr, flush=True)
    time.sleep(pause)


def patiently(action: Callable[[], Any], times: int) -> Any:
    """Returns action(), retried up to `times` times after an OSError, with growing pauses."""
    for pause in pauses(times):
        try:
            return action()
        except OSError as error:
            wait(str(error), pause)
    return action()
