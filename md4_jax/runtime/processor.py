"""Instructions of the processor of this machine."""

import functools
from pathlib import Path

# Flags of Linux for instructions that multiply bfloat16.
BFLOAT16 = {"amx_bf16", "avx512_bf16"}


@functools.cache
def multiplies_bfloat16(facts: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether Linux lists such instructions; False where it cannot be known."""
    try:
        lines = facts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not BFLOAT16.isdisjoint(flags.split())
