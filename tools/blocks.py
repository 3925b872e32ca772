"""Times block-by-block sampling with the key-value cache and without it.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python tools/blocks.py [KEY=VALUE ...]

Each row is one run of --mode bench with the untrained network of configs/block_text8.py. The
sampler is `ancestral` with one step per token of a block, at most 16 steps. A block attends to the
previous 256 tokens, which is the training length. The column "with" caches keys and values of
finished blocks. The column "without" recomputes them before each block and draws the same samples.
KEY=VALUE arguments are keys of the config.
"""

import sys

import program

MEMORY = 256
# Block, length and batch of each row, and whether it is also timed without the cache.
ROWS = (
    (1, 256, 8, False),
    (4, 256, 8, True),
    (16, 256, 8, True),
    (64, 256, 8, True),
    (256, 256, 8, True),
    (16, 256, 1, True),
    (16, 256, 32, True),
    (16, 1024, 8, False),
    (16, 2048, 8, False),
)


def timed(block: int, length: int, batch: int, cached: bool) -> dict[str, float]:
    words = (
        f"bench.random_tokens=27 sample.block={block} sample.length={length} "
        f"sample.batch_size={batch} sample.steps={min(block, 16)} sample.memory={MEMORY} "
        f"sample.cached={cached} sample.trace=false objective.block={block} "
    )
    words += " ".join(sys.argv[1:])
    return program.bench("configs/block_text8.py", words, part="sample", windows=3, seconds=1.0)


def main() -> None:
    print(
        "| block | length | batch | evaluations of a block, a sequence | tokens/s with (min-max) "
        "| without | ratio | temporaries MiB |\n" + "|---" * 8 + "|"
    )
    for block, length, batch, both in ROWS:
        n = timed(block, length, batch, True)
        ends = (length * batch / n[key] for key in ("seconds_max", "seconds_min"))
        spread = "-".join(f"{value:,.0f}" for value in ends)
        rest = "| |"
        if both:
            without = timed(block, length, batch, False)["tokens_per_second"]
            rest = f"| {without:,.0f} | {n['tokens_per_second'] / without:.1f}"
        print(
            f"| {block} | {length} | {batch} | {n['network_evaluations']:,.0f} "
            f"| {n['tokens_per_second']:,.0f} ({spread}) {rest} "
            f"| {n['temporary_mib']:,.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
