"""Worker of `versus.py` that times one part of this package.

    python tools/versus_worker.py CONFIG PART [key=value ...]

CONFIG is a config file, or a size of sizes.py. PART is train, eval or sample. Sizes are timed on
random tokens; for a config file, give bench.random_tokens=V data.length=L.

Prints `INFO {...}` with facts about the compiled program, `READY` once it is warm, and `TIMES
{...}` (see `answer`) for each line `run K` on its standard input. `quit` ends it.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from sizes import CONFIG, SIZES

# A call is disturbed if other programs used more than this fraction of a core during it.
DISTURBED = 0.15
TICKS = os.sysconf("SC_CLK_TCK")


def make(config: str, name: str, keys: list[str]) -> tuple[Callable[[], Any], dict[str, float]]:
    """Compiles a part; returns a function that runs it and waits, and facts about it."""
    import jax

    from md4_jax.config import build, inputs, schema
    from md4_jax.perf.bench import MAKERS
    from md4_jax.runtime import heap

    heap.reuse()

    words = [*SIZES.get(config, "").split(), f"bench.parts={name}", *keys]
    asked = schema.load_config(
        CONFIG if config in SIZES else config, dict(word.split("=", 1) for word in words)
    )
    part = MAKERS[name](build.experiment(asked, inputs.random_tokens(asked, "bench")), None)
    facts = dict(compile=part.compile, gflop=part.flops / 1e9, temp=part.temporary / 2**20)
    return lambda: jax.block_until_ready(part.call()), facts


def answer(call: Callable[[], Any], count: int) -> dict[str, Any]:
    """Times calls until `count` were undisturbed, or 2 `count` were made.

    Returns lists with one entry per call: ts, seconds; oth, cores used by other programs; cpu, CPU
    seconds of this process; and rss, the peak resident memory so far in KiB.
    """
    seconds, others, own = [], [], []
    while sum(o < DISTURBED for o in others) < count and len(seconds) < 2 * count + 1:
        before = busy(), used(), time.perf_counter()
        call()
        passed = time.perf_counter() - before[2]
        mine = used() - before[1]
        seconds.append(passed)
        own.append(mine)
        others.append((busy() - before[0] - mine) / passed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return dict(ts=seconds, oth=others, cpu=own, rss=peak)


def busy() -> float:
    """Returns the busy seconds of all cores."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:9])
    return (user + nice + system + sum(interrupts)) / TICKS


def used() -> float:
    """Returns the CPU seconds of this process."""
    times = os.times()
    return times.user + times.system


def main() -> None:
    call, facts = make(sys.argv[1], sys.argv[2], sys.argv[3:])
    print("INFO", json.dumps(facts), flush=True)
    for _ in range(2):
        call()
    print("READY", flush=True)
    for line in sys.stdin:
        if line.startswith("quit"):
            return
        print("TIMES", json.dumps(answer(call, int(line.split()[1]))), flush=True)


if __name__ == "__main__":
    main()
