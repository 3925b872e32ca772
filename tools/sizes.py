"""Times training steps at the sizes at which the MD4 reference implementation was timed.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python tools/sizes.py [a] [b] [c] [genmd4]

Float32, AdamW and the moving average, adaLN, two CPU cores. The speed of a machine changes from
day to day. A step is therefore compared by its share of the matrix rate, GFLOP of a step by the
formula / (seconds x rate), where the rate is that of a 2048 x 2048 x 2048 float32 product timed
between the windows of the step.
"""

import sys
from typing import NamedTuple

import program

CONFIG = "configs/base.py"
RATE = 212.0  # GFLOP/s of the product when the reference was timed


class Size(NamedTuple):
    """One size, and the time and memory of the reference.

    config: overrides of configs/base.py. gflop: work of a step by the formula. seconds and
    seconds_huge: the reference's step, without and with huge pages. peak: the reference's GiB.
    """

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
        n = program.bench(CONFIG, f"{size.config} network.scan_blocks=false")
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
