"""Programs are compiled once, before their first call, and the compiler's memory is given back."""

import os
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.runtime import compiling

MIB = 2**20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell memory otherwise")
def test_freed_memory_is_given_back():
    blocks = [np.ones(1000, np.uint8) for _ in range(300_000)]
    # The last one stays, so that the C library does not give back the rest by itself.
    del blocks[:-1]
    before = resident()
    compiling.give_back()
    assert before - resident() > 200 * MIB


def test_a_program_is_compiled_once(monkeypatch):
    trims, compiled = [], []
    monkeypatch.setattr(compiling, "give_back", lambda: trims.append(len(compiled)))

    def listen(event: str, seconds: float, **more) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fn, x = jax.jit(lambda x: x * 3.25 + 0.125), jnp.arange(4.0)
        compiled.clear()
        program = compiling.compile_ahead(fn, x)
        assert fn(x).tolist() == program(x).tolist() == [0.125, 3.375, 6.625, 9.875]
        assert len(compiled) == 1 and trims == [1]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Glibc:
    """A C library that notes how much it is asked to keep."""

    def __init__(self):
        self.kept = []
        self.malloc_trim = self.kept.append


@pytest.mark.parametrize(
    "system, opened, library, kept",
    [
        ("linux", 1, Glibc(), [0]),
        ("linux", 1, types.SimpleNamespace(kept=[]), []),  # another one, without this function
        ("darwin", 0, Glibc(), []),
    ],
)
def test_memory_is_given_back_where_the_library_can(system, opened, library, kept, monkeypatch):
    asked = []
    monkeypatch.setattr(compiling.sys, "platform", system)
    monkeypatch.setattr(compiling.ctypes, "CDLL", lambda name: asked.append(name) or library)
    compiling.give_back()
    assert (library.kept, asked) == (kept, [None] * opened)
