"""Locks of run directories: one holder, who is named, and none left behind."""

import json
import os
import subprocess
import sys
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
        words = f"is in use by process {holder.pid} on .* since 20.*: stop that one"
        with pytest.raises(UserError, match=words), locks.exclusive(place(tmp_path)):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locks.exclusive(place(tmp_path / "new")), locks.exclusive(place(tmp_path)):
        assert str(os.getpid()) in (tmp_path / locks.FILE).read_text()
    with locks.exclusive(place(tmp_path)):
        pass


def test_in_object_storage_a_lock_counts_while_it_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "is_remote", lambda path: True)
    monkeypatch.setattr(locks, "BEAT", 0.02)
    path = tmp_path / locks.FILE
    with locks.exclusive(place(tmp_path)):
        while not path.exists():
            time.sleep(0.01)
        first = json.loads(path.read_text())
        with pytest.raises(UserError, match=f"process {os.getpid()} .*or delete .*.in_use"):
            locks.exclusive(place(tmp_path)).__enter__()
        while json.loads(path.read_text()) == first:
            time.sleep(0.01)
    assert not path.exists()
    path.write_text(json.dumps({"owner": "a dead one", "beat": time.time() - locks.LOST - 1}))
    with locks.exclusive(place(tmp_path)):
        pass
