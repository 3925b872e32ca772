"""Stopping and saving by signals and by the clock, alike on all processes."""

import contextlib
import math
import os
import signal
import threading

import numpy as np
import pytest

from md4_jax.runtime.stopping import stop_if_asked
from md4_jax.training import notices
from md4_jax.training.notices import BUDGET, Interrupted, Notice, Notices, Signals


class Clock:
    """A clock that each thread, which plays a process, advances by itself."""

    def __init__(self):
        self._own = threading.local()

    def monotonic(self) -> float:
        return getattr(self._own, "now", 100.0)

    def advance(self, seconds: float) -> None:
        self._own.now = self.monotonic() + seconds


class Received:
    """Signals of one process."""

    number, hung_up = None, False


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(notices.time, "monotonic", made.monotonic)
    return made


@pytest.fixture
def play(clock, monkeypatch):
    """Runs processes(index, exchanges) in threads that exchange numbers; returns their answers."""

    def play(process, count=2):
        barrier, told, exchanges = threading.Barrier(count, timeout=20), {}, []

        def max_of_each(numbers):
            told[threading.get_ident()] = np.array(numbers, np.int32).tolist()  # as on devices
            barrier.wait()
            found = [max(column) for column in zip(*told.values(), strict=True)]
            if barrier.wait() == 0:
                exchanges.append(found)
            return found

        monkeypatch.setattr(notices.jax, "process_count", lambda: count)
        monkeypatch.setattr(notices, "max_of_each", max_of_each)
        answers = [[] for _ in range(count)]
        threads = [
            threading.Thread(target=lambda i=i: answers[i].extend(process(i)), daemon=True)
            for i in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return answers, len(exchanges)

    return play


def test_one_process_decides_at_once(clock):
    received = Received()
    asked = Notices(received, budget=10.0, pause=3.0)
    assert asked.after_step() == Notice(0, False)
    clock.advance(3.0)
    assert asked.after_step() == Notice(0, True)
    asked.saved()
    assert asked.after_step() == Notice(0, False)
    clock.advance(7.0)
    assert asked.after_step() == Notice(BUDGET, True)
    received.number = signal.SIGTERM
    assert asked.after_step().stop == signal.SIGTERM


def test_seconds_of_earlier_commands_count(clock):
    asked = Notices(Received(), budget=10.0, pause=0.0, elapsed=6.0)
    assert asked.elapsed == 6.0
    clock.advance(3.0)
    assert asked.after_step() == Notice(0, False) and asked.elapsed == pytest.approx(9.0)
    assert asked.left() == pytest.approx(1.0)
    clock.advance(1.5)
    assert asked.after_step().stop == BUDGET and asked.left() == 0.0


def test_processes_agree_on_the_seconds(play, clock):
    """Those of the slowest, after each exchange, also of a run of many weeks."""

    def process(index):
        asked, found = Notices(Received(), 3e6, 0.0, elapsed=2.5e6 + 2.0 * index), []
        for _ in range(20):
            clock.advance(1.0)
            asked.after_step()
            found.append(asked.elapsed)
        return found

    (first, second), _ = play(process)
    assert first == second and 2.5e6 + 20.0 < first[-1] < 2.5e6 + 60.0


def test_without_a_budget_and_a_pause_the_clock_decides_nothing(clock):
    asked = Notices(Received(), budget=0.0, pause=0.0)
    clock.advance(1e9)
    assert asked.after_step() == Notice(0, False) and asked.left() == math.inf


@pytest.mark.parametrize("seconds, most, late", [(0.01, 25, 1.1), (3.0, 1000, 3.0)])
def test_processes_stop_at_the_same_step_and_seldom_wait(seconds, most, late, play, clock):
    """Ten seconds or a hundred steps after the start one process of two gets a signal."""
    steps = max(100, round(10 / seconds))

    def process(index):
        received = Received()
        asked = Notices(received, budget=0.0, pause=0.0)
        for step in range(1, 10 * steps):
            clock.advance(seconds * (1.0 + 0.1 * index))
            if step == steps and index == 1:
                received.number = signal.SIGTERM
            notice = asked.after_step()
            if notice.stop:
                return [(step, notice)]
        return []

    answers, exchanges = play(process)
    assert answers[0] == answers[1] and answers[0][0][1].stop == signal.SIGTERM
    assert 0 <= answers[0][0][0] - steps <= late / seconds - 1
    assert exchanges < most if most < 1000 else exchanges == answers[0][0][0]


def test_processes_save_and_end_together(play, clock):
    """Only the clock of one of them says so."""

    def process(index):
        asked, found = Notices(Received(), budget=30.0, pause=5.0), []
        for step in range(1, 400):
            clock.advance(0.1 * (1 + index))
            notice = asked.after_step()
            if notice.save:
                asked.saved()
            if notice != Notice():
                found.append((step, notice))
            if notice.stop:
                return found
        return found

    answers, _ = play(process)
    assert answers[0] == answers[1]
    assert 4 <= sum(notice.save for _, notice in answers[0]) <= 6
    assert answers[0][-1][1].stop == BUDGET and 150 <= answers[0][-1][0] <= 165


def test_a_signal_is_recorded_and_the_next_one_is_not(capfd):
    """The first is said at once: a step may take minutes, and a second signal loses it."""
    before = signal.getsignal(signal.SIGTERM)
    received = notices.Signals()
    signal.raise_signal(signal.SIGTERM)
    assert received.number == signal.SIGTERM
    assert "SIGTERM: the run saves and stops after this step" in capfd.readouterr().err
    received.release()
    assert signal.getsignal(signal.SIGTERM) == before


@contextlib.contextmanager
def unread():
    """Makes standard error a pipe whose reader has ended; not a fixture, since pytest resets it."""
    kept, (read, write) = os.dup(2), os.pipe()
    os.close(read)
    os.dup2(write, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(write)
        os.close(kept)


def test_a_signal_is_recorded_if_nobody_reads_what_is_said():
    """An error in the handler would end the run without a save."""
    signals = Signals()
    try:
        with unread():
            signal.raise_signal(signal.SIGTERM)
        assert signals.number == signal.SIGTERM
    finally:
        signals.release()


def test_a_lost_terminal_saves_once_and_does_not_stop():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    signals = Signals()
    made = Notices(signals, 0.0, 0.0)
    try:
        assert made.after_step() == Notice()
        signal.raise_signal(signal.SIGHUP)
        assert made.after_step() == Notice(0, True)
        made.saved()
        assert made.after_step() == Notice()
    finally:
        signals.release()
        assert signal.signal(signal.SIGHUP, before) == signal.SIG_DFL


def test_a_hang_up_that_is_ignored_stays_so():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        Signals().release()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_ends_an_evaluation_of_one_process():
    signals = Signals()
    try:
        with pytest.raises(Interrupted), signals.interrupting():
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("the evaluation goes on")
        assert signals.number == signal.SIGTERM
        with pytest.raises(Interrupted), signals.interrupting():
            pytest.fail("an evaluation begins")
    finally:
        signals.release()


@pytest.mark.parametrize(
    "early, seconds, late", [(False, 1.0, 1), (False, 0.01, 25), (True, 1.0, 0)]
)
def test_a_signal_ends_an_evaluation_of_several_processes(early, seconds, late, play, clock):
    """Before the same batch; one of them gets it, in the evaluation or before."""
    both = [Signals(), Signals()]

    def process(index):
        own, batches = both[index], []
        own.number = signal.SIGTERM if early and index else None
        stop_if_asked()
        try:
            with own.interrupting():
                for batch in range(200):
                    stop_if_asked()
                    batches.append(batch)
                    clock.advance(seconds * (1.0 + 0.1 * index))
                    own.number = signal.SIGTERM if index and batch == 100 else own.number
        except Interrupted:
            stop_if_asked()  # exchanges nothing
            return batches
        pytest.fail("the evaluation goes on")

    try:
        answers, exchanges = play(process)
    finally:
        for signals in reversed(both):
            signals.release()
    assert answers[0] == answers[1]
    assert 0 <= len(answers[0]) - (0 if early else 101) < max(late, 1)
    assert exchanges <= (15 if seconds == 0.01 else len(answers[0]) + 1)
