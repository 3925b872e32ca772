"""Times sampling of E2D2 and of block diffusion, equally deep: docs/families/e2d2.md.

python tools/encoder_decoder.py --turns 5
"""

import argparse
import time

import jax
import numpy as np

from md4_jax.networks.encoder_decoder import EncoderDecoder
from md4_jax.networks.transformer import Transformer
from md4_jax.processes.masking import Masking
from md4_jax.samplers import loop
from md4_jax.samplers.blocks import Blocks
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform

ROWS, LENGTH, SYMBOLS, WIDTH, DEPTH = 4, 256, 27, 256, 12
BLOCKS = (4, 16)


def networks(decoder: int):
    """Returns E2D2 with `decoder` of DEPTH layers in its decoder, and block diffusion's network."""
    common = dict(size=WIDTH, heads=4, qk_norm=True, initial="torch", time_conditioning=False)
    light = EncoderDecoder(SYMBOLS, depth=DEPTH - decoder, decoder_depth=decoder, **common)
    return light.build(), Transformer(SYMBOLS, depth=DEPTH, **common).build()


def program(network, block: int):
    """Returns (params, keys) -> samples, one token per step, and their evaluations."""
    sampler, step = Blocks(block, LENGTH), Confidence(per_step=1)

    def run(params, keys):
        chain, _ = sampler(
            network.bind(params), Masking(SYMBOLS), step,
            grid=uniform(block), keys=keys, prompt=loop.no_prompt(ROWS, LENGTH),
        )  # fmt: skip
        return chain.z, chain.evaluations

    return jax.jit(run)


def seconds(run, *arguments) -> float:
    """Returns the time of one run of a compiled program."""
    began = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - began


def main() -> None:
    """Prints one row of the table per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--decoder", type=int, default=2, help="layers of the decoder")
    flags = parser.parse_args()
    decoder, turns = flags.decoder, flags.turns
    keys = jax.random.split(jax.random.key(1), ROWS)
    print("| layers of encoder and decoder | block | evaluations | seconds | transformer | ratio |")
    print("|---|---|---|---|---|---|")
    for block in BLOCKS:
        both = [
            (program(network, block), network.init(jax.random.key(0)))
            for network in networks(decoder)
        ]
        counts = [float(np.mean(np.asarray(run(params, keys)[1]))) for run, params in both]
        if counts[0] != counts[1]:
            raise SystemExit(f"error: {counts} evaluations")
        times = [[seconds(run, params, keys) for run, params in both] for _ in range(turns)]
        ratio = np.array(times)[:, 1] / np.array(times)[:, 0]
        middle, spread = np.median(times, axis=0), f"{ratio.min():.2f}-{ratio.max():.2f}"
        print(
            f"| {DEPTH - decoder} + {decoder} | {block} | {counts[0]:.0f} | {middle[0]:.2f} "
            f"| {middle[1]:.2f} | {np.median(ratio):.2f} ({spread}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
