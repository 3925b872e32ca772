"""Times training steps at the sizes that the MD4 reference implementation was timed at.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python launch/sizes.py [a] [b] [c] [genmd4]

Float32, AdamW and the moving average, adaLN, two CPU cores. Machines differ from day to day, so a
step is compared by its share of the rate of a 2048 x 2048 x 2048 float32 product that is timed
between its windows: GFLOP of a step by the formula / (seconds x rate).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RATE = 212.0  # GFLOP/s of the product when the reference was timed


class Size(NamedTuple):
    """Overrides; GFLOP of a step; seconds of the reference, with huge pages too; its peak GiB."""

    config: str
    gflop: float
    seconds: float
    seconds_huge: float
    peak: float


TEXT = "bench.random_tokens=27 data.length=256"
SMALL = "network.size=256 network.depth=4 network.heads=4"
SIZES = {
    "a": Size(f"{TEXT} {SMALL} train.batch_size=16", 92.4, 0.958, 0.845, 2.35),
    "b": Size(f"{TEXT} train.batch_size=4", 551.3, 4.121, 3.63, 4.34),
    "c": Size(
        f"bench.random_tokens=50257 data.length=1024 {SMALL} train.batch_size=2",
        223.3, 3.848, 2.54, 4.83,
    ),
    "genmd4": Size(
        f"{TEXT} {SMALL} train.batch_size=16 process.name=state_dependent objective.name=genmd4",
        184.8, 1.844, 1.58, 3.22,
    ),
}  # fmt: skip


def bench_step(
    overrides: str,
    windows: int = 5,
    seconds: float = 2.0,
    *,
    part: str = "train",
    config: str = "configs/base.py",
) -> dict[str, float]:
    """The numbers of --mode bench for a part, the training step, of a config with overrides."""
    words = [*overrides.split(), f"bench.parts={part}"]
    words += [f"bench.windows={windows}", f"bench.seconds={seconds}"]
    command = [sys.executable, "-m", "md4_jax.main", "--mode", "bench", "--config"]
    command += [config, *(f"--config.{word}" for word in words)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    if ended.returncode:
        sys.exit(f"error: {' '.join(command)} failed:\n{ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])[part]


def main() -> None:
    unknown = set(sys.argv[1:]) - set(SIZES)
    if unknown:
        sys.exit(f"error: unknown size {', '.join(unknown)}; known: {', '.join(SIZES)}")
    print(
        "| size | s/step (min-max) | rate, GFLOP/s | of the rate | the reference's share; with "
        "huge pages | times the reference; with huge pages | temporaries MiB | peak RSS GiB "
        "(reference) |\n" + "|---" * 8 + "|"
    )
    for name in sys.argv[1:] or SIZES:
        size = SIZES[name]
        n = bench_step(f"{size.config} network.scan_blocks=false")
        share = size.gflop / (n["seconds"] * n["matrix_gflops"])
        others = [size.gflop / (s * RATE) for s in (size.seconds, size.seconds_huge)]
        print(
            f"| {name} | {n['seconds']:.3f} ({n['seconds_min']:.3f}-{n['seconds_max']:.3f}) "
            f"| {n['matrix_gflops']:.0f} | {share:.0%} | {others[0]:.0%}; {others[1]:.0%} "
            f"| {share / others[0]:.2f}; {share / others[1]:.2f} | {n['temporary_mib']:,.0f} "
            f"| {n['peak_rss_gib']:.2f} ({size.peak}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
