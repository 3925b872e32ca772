"""Times left-to-right sampling with and without a key-value cache.

    python tools/left_to_right.py

Both draw the same tokens in one process. Prints the medians in seconds and their ratio.
"""

import statistics
import time

import jax
import numpy as np

from md4_jax.networks.transformer import Transformer
from md4_jax.processes.masking import Masking
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.left_to_right import LeftToRight
from md4_jax.samplers.loop import no_prompt, sample

# Number of sequences, their tokens, symbols, and width of the convolution.
SIZES = ((16, 256, 27, 3), (1, 256, 27, 3), (1, 512, 50257, 0))


def seconds(
    rows: int, length: int, symbols: int, width: int, cached: bool
) -> tuple[float, np.ndarray]:
    """Returns the median time of a batch of samples, and their tokens."""
    network = Transformer(
        symbols, size=256, depth=4, heads=4, causal=True, local_width=width,
        time_conditioning=False, scan_blocks=False,
    ).build()  # fmt: skip
    process, keys = Masking(symbols), jax.random.split(jax.random.key(2), rows)
    params = network.init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    shaken = [x + 0.1 * jax.random.normal(jax.random.key(n), x.shape) for n, x in enumerate(leaves)]
    params = {"network": tree.unflatten(shaken), "process": process}

    @jax.jit
    def drawn(params, keys):
        denoiser = network.denoiser(params)
        denoiser = denoiser if cached else denoiser._replace(blocks=None)
        prompt = no_prompt(rows, length)
        return sample(denoiser, process, LeftToRight(), grid=uniform(1), keys=keys, prompt=prompt)[
            0
        ].z

    tokens, times = np.asarray(drawn(params, keys)), []
    for _ in range(5 if cached else 2):
        begin = time.perf_counter()
        drawn(params, keys).block_until_ready()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), tokens


def main() -> None:
    for size in SIZES:
        (kept, tokens), (whole, others) = (
            seconds(*size, cached=cached) for cached in (True, False)
        )
        assert (tokens == others).all()
        rows, length, symbols, _ = size
        print(
            f"{rows} x {length} of {symbols} symbols: {kept:.3g} s instead of {whole:.3g}, "
            f"{whole / kept:.1f} times as fast",
            flush=True,
        )


if __name__ == "__main__":
    main()
