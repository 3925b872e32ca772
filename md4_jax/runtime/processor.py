"""Instruction set of this machine's processor."""

import functools
from pathlib import Path


@functools.cache
def multiplies_bfloat16(facts: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether bfloat16 products are faster than float32 ones on this processor.

    True with AMX, and on AMD processors with AVX512-BF16. On an Intel Xeon with AVX512-BF16 but
    without AMX, a training step with bfloat16 took 1.2 to 1.6 times as long (docs/speed.md). False
    if Linux does not provide the information.
    """
    try:
        lines = facts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    entries = [(name.strip(), value) for name, _, value in (x.partition(":") for x in lines)]
    # The first entry of each name: all cores are equal.
    first = dict(reversed(entries))
    flags, maker = first.get("flags", "").split(), first.get("vendor_id", "").strip()
    return "amx_bf16" in flags or ("avx512_bf16" in flags and maker == "AuthenticAMD")
