"""Times sampling of the partition network, and measures the variance of its bound.

    python tools/partition.py

Draws 4 x 256 tokens in 64 steps, in turns: with the encoder reading only visible tokens, with the
encoder reading the whole text, and by a transformer of nearly the same number of parameters. Prints
the medians of samples per second. Then it prints the variances of MD4's bound and of the bound of
two groups over draws of time and masks, for the same network and tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from md4_jax.networks.partition import Partition
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.partition import Partition as PartitionBound
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Network, Params, batch_of
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import no_prompt, sample

ROWS, LENGTH, STEPS, SYMBOLS = 4, 256, 64, 27
AT_ONCE = 32  # draws of a bound
SIZES = dict(vocab_size=SYMBOLS, size=256, depth=4, heads=4, time_conditioning=False)


def shaken(network: Network, scale: float) -> Params:
    """Returns initial parameters with added noise."""
    leaves, tree = jax.tree.flatten(network.init(jax.random.key(0)))
    noisy = [
        x + scale * jax.random.normal(jax.random.key(n), x.shape) for n, x in enumerate(leaves)
    ]
    return tree.unflatten(noisy)


def sampler(network: Network, *, quick: bool) -> Callable:
    """Returns keys -> tokens, compiled."""
    params = {"network": shaken(network, 0.05), "process": Masking(SYMBOLS)}

    @jax.jit
    def drawn(params: Params, keys: jax.Array) -> jax.Array:
        denoiser, process = network.denoiser(params), params["process"]
        if not quick:
            shortcuts = denoiser.accelerator._replace(features_at=None)
            denoiser = denoiser._replace(accelerator=shortcuts)
        prompt = no_prompt(ROWS, LENGTH)
        return sample(
            denoiser, process, Ancestral(), grid=uniform(STEPS), keys=keys, prompt=prompt
        )[0].z

    return lambda keys: drawn(params, keys)


def time_samples(runs: int) -> None:
    """Prints samples per second of each variant, as medians of `runs` alternating runs."""
    own = Partition(**SIZES, scan_blocks=False).build()
    other = Transformer(**SIZES, scan_blocks=False).build()
    ways = {
        "partition, visible tokens": sampler(own, quick=True),
        "partition, whole text": sampler(own, quick=False),
        "transformer": sampler(other, quick=True),
    }
    for network, name in ((own, "partition"), (other, "transformer")):
        shapes = jax.eval_shape(network.init, jax.random.key(0))
        print(f"{name}: {network.size(shapes):,} parameters")
    times = {name: [] for name in ways}
    for run in range(runs + 1):
        keys = jax.random.split(jax.random.key(run), ROWS)
        for name, draw in ways.items():
            begin = time.perf_counter()
            draw(keys).block_until_ready()
            times[name].append(time.perf_counter() - begin)
    for name, found in times.items():
        median = statistics.median(found[1:])  # the first also compiles
        print(f"{name}: {ROWS / median:.2f} samples/s ({min(found[1:]):.2f} to "
              f"{max(found[1:]):.2f} s a batch)", flush=True)  # fmt: skip


def measure_noise(draws: int) -> None:
    """Prints mean and variance of both bounds over `draws` draws, with independent times."""
    network, process = Partition(**SIZES, scan_blocks=False).build(), Masking(SYMBOLS)
    params = shaken(network, 0.02)
    tokens = jax.random.randint(jax.random.key(5), (1, LENGTH), 0, SYMBOLS)
    batch = batch_of(jnp.tile(tokens, (AT_ONCE, 1)))
    bounds = {"md4": MD4(), "partition": PartitionBound()}
    values = {name: [] for name in bounds}
    for name, bound in bounds.items():

        @jax.jit
        def nats(params: Params, u: jax.Array, keys: jax.Array, bound=bound) -> jax.Array:
            return bound(network.bind(params), process, batch, u, keys)[0]

        for draw in range(draws // AT_ONCE):
            one, two = jax.random.split(jax.random.key(draw))
            keys = jax.random.split(two, AT_ONCE)
            values[name].extend(map(float, nats(params, jax.random.uniform(one, (AT_ONCE,)), keys)))
    for name, found in values.items():
        deviation = statistics.stdev(found)
        print(f"{name}: mean {statistics.mean(found):.1f} +- {deviation / len(found) ** 0.5:.1f} "
              f"nats, standard deviation {deviation:.1f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each sampler")
    parser.add_argument("--draws", type=int, default=1024, help="draws of each bound")
    asked = parser.parse_args()
    time_samples(asked.runs)
    measure_noise(asked.draws)


if __name__ == "__main__":
    main()
