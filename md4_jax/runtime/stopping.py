"""Points at which long work of several processes may be ended: between two batches."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_ask: ContextVar[Callable[[], None] | None] = ContextVar("stop_if_asked", default=None)


@contextlib.contextmanager
def asking(ask: Callable[[], None]) -> Iterator[None]:
    """Calls `ask`, which may raise to end the work, at each `stop_if_asked` within the block."""
    token = _ask.set(ask)
    try:
        yield
    finally:
        _ask.reset(token)


def stop_if_asked() -> None:
    """Ends the work here if it was asked to end; without `asking` it does nothing.

    All processes call it equally often, in places that all of them reach: they exchange here who
    was asked.
    """
    ask = _ask.get()
    if ask is not None:
        ask()
