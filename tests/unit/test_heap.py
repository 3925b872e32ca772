"""Memory that programs free stays with the process, and is given back on demand."""

import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from md4_jax.runtime import heap

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems tell memory otherwise")
# Calls a program with 256 MiB of temporaries, and prints the fresh pages of later calls in MiB.
CALLS = """
import resource, sys
from md4_jax.runtime import heap
if sys.argv[1] == "reuse":
    heap.reuse()
import jax, jax.numpy as jnp
fn, x = jax.jit(lambda x: jnp.sum((x @ x.T) @ x)), jnp.ones((8192, 64))
faults = []
for _ in range(6):
    fn(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print((faults[-1] - faults[2]) * resource.getpagesize() / 2**20)
"""


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Glibc:
    """A C library that notes what it is asked."""

    def __init__(self):
        self.kept, self.set = [], []
        self.malloc_trim = self.kept.append

    def mallopt(self, *setting):
        self.set.append(setting)


@pytest.fixture
def asks(monkeypatch):
    """Calls a function of heap on a system with this C library; returns what was changed in JAX."""

    def asks(fn, library, system="linux", **variables):
        changed = []
        monkeypatch.setattr(heap.sys, "platform", system)
        monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: library)
        monkeypatch.setattr(jax.config, "update", lambda *pair: changed.append(pair))
        for name in ("GLIBC_TUNABLES", *heap.VARIABLES, heap.ASYNC):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        fn()
        return changed

    return asks


@linux
def test_freed_memory_is_given_back():
    blocks = [np.ones(1000, np.uint8) for _ in range(300_000)]
    # The last one stays, so that the C library does not give back the rest by itself.
    del blocks[:-1]
    before = resident()
    heap.give_back()
    assert before - resident() > 200 * MIB


@pytest.mark.parametrize(
    "system, library, kept",
    [
        ("linux", Glibc(), [0]),
        ("linux", types.SimpleNamespace(kept=[]), []),  # another one, without this function
        ("darwin", Glibc(), []),
    ],
)
def test_memory_is_given_back_where_the_library_can(system, library, kept, asks):
    assert asks(heap.give_back, library, system) == [] and library.kept == kept


@pytest.mark.slow
@linux
def test_a_program_finds_the_memory_of_the_call_before():
    fresh, environment = {}, os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("GLIBC_TUNABLES", None)
    for word in ("reuse", "default"):
        command = [sys.executable, "-c", CALLS, word]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        fresh[word] = float(ended.stdout)
    if fresh["default"] < 32:
        pytest.skip("this C library keeps large buffers by itself")
    assert fresh["reuse"] < 4


KEEPS = [(heap.MMAP_MAX, 0), (heap.TRIM_THRESHOLD, -1)]
HERE = [("jax_cpu_enable_async_dispatch", False)]


@pytest.mark.parametrize(
    "variables, system, kept, changed",
    [
        ({}, "linux", KEEPS, HERE),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, "linux", KEEPS, HERE),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1024"}, "linux", [], HERE),
        ({"GLIBC_TUNABLES": "a=1:glibc.malloc.trim_threshold=1024"}, "linux", [], HERE),
        ({"MALLOC_TRIM_THRESHOLD_": "1024"}, "linux", [], HERE),
        ({"JAX_CPU_ENABLE_ASYNC_DISPATCH": "true"}, "linux", KEEPS, []),
        ({}, "darwin", [], HERE),
    ],
)
def test_settings_of_the_user_stay(variables, system, kept, changed, asks):
    library = Glibc()
    assert asks(heap.reuse, library, system, **variables) == changed
    assert library.set == kept


def test_a_library_without_settings_is_left_alone(asks):
    assert asks(heap.reuse, types.SimpleNamespace()) == HERE
