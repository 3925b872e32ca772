"""Memory that the C library keeps for XLA's programs on CPUs, and gives back to the system."""

import ctypes
import os
import sys
from typing import Any

import jax

# Parameters of glibc's mallopt(3): free memory at the end of the heap above which it is given back,
# -1 for never, and the number of blocks that lie outside of the heap.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
# The user's own settings of these.
TUNABLES = ("glibc.malloc.trim_threshold", "glibc.malloc.mmap_")
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
ASYNC = "JAX_CPU_ENABLE_ASYNC_DISPATCH"


def reuse() -> None:
    """Lets each call of a program on CPUs use the memory that the call before has freed.

    Otherwise XLA asks the system for its large buffers at each call, and the system fills them with
    zeros. Programs then run in the thread that calls them, since the heaps of other threads keep no
    large buffers. On 2 cores of an AMD EPYC a training step of (a) and of (c) of tools/sizes.py
    takes 0.67 of its time, in 1.00 and 1.03 of the memory.

    Call it before JAX is first used. It changes the heap of the whole process: a command may do so,
    a library may not. Settings of the environment stay as they are, and so do the heaps of C
    libraries other than glibc.
    """
    if ASYNC not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in tunables for name in TUNABLES) or any(name in os.environ for name in VARIABLES):
        return
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, -1)


def give_back() -> None:
    """Returns free memory of the heap to the system, where the C library can (glibc)."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Any:
    """Returns a function of the C library, or None where it has none of this name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
