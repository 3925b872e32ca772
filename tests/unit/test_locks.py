"""Locks of run directories: one holder, who is named, and none left behind."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from md4_jax.protocols import UserError
from md4_jax.runtime import locks
from md4_jax.runtime.paths import place

HOLD = """
import sys, time
from md4_jax.runtime import locks
from md4_jax.runtime.paths import place
with locks.exclusive(place(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_ends(tmp_path):
    """Even by a kill."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        words = f"is in use by process {holder.pid} on .* since 20.*: stop that process"
        with pytest.raises(UserError, match=words), locks.exclusive(place(tmp_path)):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locks.exclusive(place(tmp_path / "new")), locks.exclusive(place(tmp_path)):
        assert str(os.getpid()) in (tmp_path / locks.FILE).read_text()
    with locks.exclusive(place(tmp_path)):
        pass


def test_the_name_of_a_holder_that_fails_is_taken_back(tmp_path):
    with pytest.raises(ZeroDivisionError), locks.exclusive(place(tmp_path)):
        raise ZeroDivisionError
    assert (tmp_path / locks.FILE).read_text() == ""


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """The lock of a directory that is treated as one in object storage, with fast clocks."""
    monkeypatch.setattr(locks, "is_remote", lambda path: True)
    monkeypatch.setattr(locks, "BEAT", 0.02)
    monkeypatch.setattr(locks, "LOST", 0.5)
    monkeypatch.setattr(locks, "SETTLED", 0.0)
    return tmp_path / locks.FILE


def lock(directory, said: list[str]):
    return locks.exclusive(place(directory), said.append)


def test_in_object_storage_a_lock_counts_while_it_beats(stored):
    said = []
    with lock(stored.parent, said):
        while not stored.exists():
            time.sleep(0.01)
        owner = json.loads(stored.read_text())["owner"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(locks, "_machine", lambda: "another")
            with pytest.raises(UserError, match=f"in use by process {os.getpid()} .*: stop"):
                lock(stored.parent, said).__enter__()
        assert f"was in use by {owner}: waiting" in said[0]
    assert not stored.exists()


def test_of_two_that_sign_a_free_lock_at_once_one_has_it(stored, monkeypatch):
    """The last signature stays: who finds another in place of its own gives up."""
    other = {"owner": "a faster one", "machine": "m", "process": 1, "beat": time.time()}
    monkeypatch.setattr(locks.time, "sleep", lambda _: stored.write_text(json.dumps(other)))
    with pytest.raises(UserError, match="in use by a faster one"):
        lock(stored.parent, []).__enter__()
    assert json.loads(stored.read_text()) == other


def test_a_lock_beats_whose_holder_has_a_clock_far_behind(stored, monkeypatch):
    """A time that is long ago is no sign that the holder has ended, only a missing beat is."""
    monkeypatch.setattr(locks, "BEAT", 0.2)
    told = ["the holder runs"]

    def beat():
        while told:
            beat = {
                "owner": "a slow clock",
                "machine": "m",
                "process": 1,
                "beat": time.time() - 100,
            }
            locks.replace(place(stored), json.dumps(beat))
            time.sleep(0.2)

    holder = threading.Thread(target=beat)
    holder.start()
    try:
        while not stored.exists():
            time.sleep(0.01)
        with pytest.raises(UserError, match="in use by a slow clock"):
            lock(stored.parent, []).__enter__()
    finally:
        told.clear()
        holder.join()


@pytest.mark.parametrize(("age", "wait"), [(0.0, 0.5), (0.3, 0.2), (9.0, 0.04), (-11.0, 0.5)])
def test_a_lock_that_no_longer_beats_is_waited_for(age, wait, stored):
    """At least two beats, and never longer than LOST, whatever the clock of its holder."""
    dead = {"owner": "a lost one", "machine": "m", "process": 1, "beat": time.time() - age}
    stored.write_text(json.dumps(dead))
    said, start = [], time.monotonic()
    with lock(stored.parent, said):
        passed = time.monotonic() - start
    assert wait - 0.1 < passed < wait + 10.0
    assert "to see whether it is still running" in said[0]


def test_the_lock_of_a_dead_process_of_this_machine_is_void_at_once(stored):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = {"owner": "a dead one", "machine": locks._machine(), "beat": time.time()}
    for process in (ended.pid, os.getpid()):
        stored.write_text(json.dumps({**dead, "process": process}))
        said = []
        with lock(stored.parent, said):
            assert not said
