"""External reasons to stop or to save: signals and the clock."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from md4_jax.runtime.sharding import max_of_each
from md4_jax.runtime.stopping import asking

# Reason to stop when the time budget is spent; the other reasons are signal numbers above 1.
BUDGET = 1
# Seconds between two exchanges of several processes; each waits for the devices. In an evaluation
# they are fewer, since its next batches may take much longer than those before.
PAUSE, EVALUATION_PAUSE = 1.0, 0.25
# Parts of a second in which they exchange the time of a run: int32 then holds four years.
TICKS = 16


class Interrupted(BaseException):
    """Ends an evaluation because of a signal; no error, so that nothing else handles it."""


class Signals:
    """Records SIGTERM and Ctrl-C, to stop after the current step, and SIGHUP, to save.

    SIGTERM and Ctrl-C also end an evaluation, see `interrupting`.

    SIGHUP means that the terminal is gone, which is a reason to save but not to stop. If it was
    ignored before, as under nohup, it remains ignored.
    """

    def __init__(self):
        self.number: int | None = None
        self.hung_up = False
        self._evaluates = False
        self._before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)

    def _hang_up(self, number: int, frame: object) -> None:
        del number, frame
        self.hung_up = True

    def _note(self, number: int, frame: object) -> None:
        del frame
        if self.number is not None:  # second signal: stop at once
            self.release()
            signal.raise_signal(number)
        self.number = number
        # The step may take long, and the first one is compiled. print is not signal-safe.
        name, when = signal.Signals(number).name, "after this step"
        several = jax.process_count() > 1
        if self._evaluates:
            when = "after this batch or a few more, " if several else ""
            when += "without the results of this evaluation, which is made again when it is resumed"
        said = (
            f"{name}: the run saves and stops {when}. A second signal stops it at once, without "
            "saving"
        )
        with contextlib.suppress(OSError):  # the terminal, or who reads a pipe, is gone
            os.write(2, f"\n{said}\n".encode())
        if self._evaluates and not several:
            self._evaluates = False
            raise Interrupted

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raises Interrupted within the block as soon as there is a signal that stops the run.

        With several processes all raise it, at the same `stop_if_asked`, if any of them received a
        signal: otherwise the others would wait for it. They exchange this about every
        EVALUATION_PAUSE seconds.
        """
        several = jax.process_count() > 1
        self._evaluates = True
        try:
            if not several and self.number is not None:
                raise Interrupted
            meetings = Meetings(EVALUATION_PAUSE)
            with asking(lambda: self._agree(meetings)) if several else contextlib.nullcontext():
                yield
        finally:
            self._evaluates = False

    def _agree(self, meetings: "Meetings") -> None:
        if any(meetings.largest([self.number or 0]) or ()):
            raise Interrupted

    def release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Meetings:
    """Exchanges numbers of several processes after some of their steps, the same on all.

    About `pause` seconds lie between two exchanges. The number of steps between them is computed
    from the time of the slowest process since the last one; it at most doubles each time.
    """

    def __init__(self, pause: float):
        self._pause, self._met = pause, time.monotonic()
        self._stride = self._left = 1

    def largest(self, numbers: Sequence[int]) -> list[int] | None:
        """Returns the largest value of each number; None if this step exchanges nothing."""
        self._left -= 1
        if self._left:
            return None
        taken = int(1000 * (time.monotonic() - self._met))
        *found, taken = max_of_each([*numbers, taken])
        self._met = time.monotonic()
        fitting = int(1000 * self._pause * self._stride / max(taken, 1))
        self._stride = self._left = max(1, min(fitting, 2 * self._stride))
        return found


class Notice(NamedTuple):
    """Decision after a step, equal on all processes.

    stop  0, BUDGET, or the number of a signal that any process received
    save  whether the last save was too long ago, or the terminal is gone
    """

    stop: int = 0
    save: bool = False


class Notices:
    """Decides after each step whether to stop or to save.

    Several processes exchange their information about every PAUSE seconds, see `Meetings`.

    budget   seconds until the run stops; 0: none
    pause    seconds between saves; 0: any
    elapsed  seconds of the run, equal on all processes: at first those of earlier commands, if
             they count; later as of the last exchange
    """

    def __init__(self, signals: Signals, budget: float, pause: float, elapsed: float = 0.0):
        self._signals, self._budget, self._pause = signals, budget, pause
        self._saved, self._meetings = time.monotonic(), Meetings(PAUSE)
        self._began, self.elapsed = self._saved - elapsed, elapsed

    def left(self) -> float:
        """Returns the remaining seconds of the budget; infinity if there is none."""
        return max(0.0, self._budget - self.elapsed) if self._budget else math.inf

    def saved(self) -> None:
        """Notes that a save begins."""
        self._saved, self._signals.hung_up = time.monotonic(), False

    def after_step(self) -> Notice:
        """Returns the decision; every process must call this after each step."""
        now = time.monotonic()
        elapsed = now - self._began
        is_over = 0 < self._budget <= elapsed
        stop = self._signals.number or BUDGET * is_over
        save = self._signals.hung_up or 0 < self._pause <= now - self._saved
        if jax.process_count() == 1:
            self.elapsed = elapsed
            return Notice(stop, save)
        found = self._meetings.largest([stop, int(save), int(TICKS * elapsed)])
        if found is None:
            return Notice()
        stop, save, ticks = found
        self.elapsed = ticks / TICKS
        return Notice(stop, bool(save))
