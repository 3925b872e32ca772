"""Times sampling of Eso-LM with and without a key-value cache: docs/families/eso_lm.md.

python tools/eso_lm.py --turns 5
"""

import argparse
import time

import jax
import numpy as np

from md4_jax.networks.transformer import Transformer
from md4_jax.processes.masking import Masking
from md4_jax.samplers import loop
from md4_jax.samplers.eso import Eso
from md4_jax.samplers.grids import uniform

ROWS, LENGTH, SYMBOLS = 4, 256, 27
CASES = ((0.125, 64), (0.5, 64), (1.0, 64), (1.0, 16))


def program(network, alpha_0: float, steps: int, *, cached: bool):
    """Returns (params, keys) -> samples and their evaluations."""
    step, prompt = Eso(alpha_0, cached), loop.no_prompt(ROWS, LENGTH)

    def run(params, keys):
        denoiser = network.bind(params)
        arguments = dict(grid=uniform(steps), keys=keys, prompt=prompt)
        chain, _ = loop.sample(denoiser, Masking(SYMBOLS), step, **arguments)
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
    turns = parser.parse_args().turns
    network = Transformer(SYMBOLS, size=256, depth=4, heads=4, time_conditioning=False).build()
    params, keys = network.init(jax.random.key(0)), jax.random.split(jax.random.key(1), ROWS)
    print("| alpha_0 | steps | evaluations | seconds with the cache | without | ratio |")
    print("|---|---|---|---|---|---|")
    for alpha_0, steps in CASES:
        both = [program(network, alpha_0, steps, cached=cached) for cached in (True, False)]
        (z, evaluations), (same, _) = (run(params, keys) for run in both)
        differ = float(np.mean(np.asarray(z) != np.asarray(same)))
        if differ > 0.01:
            raise SystemExit(f"error: {differ:.0%} of the tokens differ without the cache")
        times = np.array([[seconds(run, params, keys) for run in both] for _ in range(turns)])
        ratio = times[:, 1] / times[:, 0]
        middle, spread = np.median(times, axis=0), f"{ratio.min():.1f}-{ratio.max():.1f}"
        print(
            f"| {alpha_0} | {steps} | {np.mean(np.asarray(evaluations)):.0f} | {middle[0]:.2f} "
            f"| {middle[1]:.2f} | {np.median(ratio):.1f} ({spread}) |"
        )


if __name__ == "__main__":
    main()
