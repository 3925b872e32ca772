"""Distils a small model and prints how far samples of few steps are from the data; JSON.

few_steps.py sdtt|dcd SEEDS [KEY=VALUE ...]: keys of the objective. The source is a chain of four
symbols of three kinds that mostly repeats itself. All laws of samples are enumerated, so that the
total variation from the source has no sampling noise: {"teacher": {steps: [of each seed]}, ...}.
"""

import json
import sys

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax

from md4_jax.config.load import parse
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.dcd import DCD
from md4_jax.objectives.sdtt import SDTT
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.options import TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import batch_of
from md4_jax.samplers.grids import uniform
from md4_jax.training.step import init_state, make_train_step

V, L, BATCH = 3, 4, 128
FIRST = np.array([0.5, 0.3, 0.2])
CHAIN = 0.8 * np.eye(V) + 0.2 * FIRST
STEPS = (1, 2, 4, 8, 16)
ROUND, ROUNDS, OF_TEACHER = 300, 4, 1500
SOURCE = {
    "sdtt": (Masking(V), AnyOrder(), lambda **keys: SDTT(steps=16, **keys)),
    "dcd": (Uniform(V), UniformELBO(), lambda **keys: DCD(steps=16, low=-4.0, high=6.0, **keys)),
}


def source() -> np.ndarray:
    """The probabilities of all sequences, [V^L]."""
    x = exact.sequences(V, L)
    return FIRST[x[:, 0]] * CHAIN[x[:, :-1], x[:, 1:]].prod(axis=1)


def law(denoiser, process, steps: int) -> np.ndarray:
    """The law of ancestral samples in so many equal steps, over all clean sequences."""
    grid = uniform(steps)
    if process.shows_clean:
        found = exact.ancestral_law(denoiser, process, grid, L)
        return found[(exact.sequences(V + 1, L) < V).all(axis=1)]
    z = exact.sequences(V, L)
    found = np.full(len(z), 1.0 / len(z))
    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        times = (jnp.full(len(z), time, jnp.float32) for time in (s, t))
        s, t = times
        logits = process.reverse_logits(denoiser(z, t), jnp.asarray(z), s, t)
        step = np.asarray(jax.nn.softmax(logits), np.float64)
        found = found @ np.prod([step[:, n][:, z[:, n]] for n in range(L)], axis=0)
    return found


def trained(network, process, objective, state, count: int, seed: int, rate: float):
    """The state after so many steps on draws of the source."""
    optimizer = optax.adam(rate)
    options = TrainOptions(num_steps=count, batch_size=BATCH, seed=seed, ema=0.98)
    step = jax.jit(make_train_step(network, objective, optimizer, options), donate_argnums=0)
    state = state._replace(opt_state=optimizer.init(state.params), step=jnp.int32(0))
    x, rng = exact.sequences(V, L), np.random.default_rng(seed)
    for _ in range(count):
        state, _ = step(state, batch_of(x[rng.choice(len(x), BATCH, p=source())]))
    return state


def measured(name: str, seed: int, **keys) -> dict[str, dict[int, float]]:
    """Total variation between samples and source, of the teacher and of its student, by steps."""
    process, bound, make = SOURCE[name]
    network = Transformer(V, size=32, depth=2, heads=2, hidden=64, scan_blocks=False).build()
    start = jax.jit(
        lambda: init_state(jax.random.key(seed), network, process, optax.adam(1.0), taught=True)
    )()
    state = trained(network, process, bound, start, OF_TEACHER, seed, 3e-3)
    copy = lambda: jax.tree.map(jnp.copy, state.ema)  # noqa: E731
    own = state._replace(params=copy(), ema=copy(), teacher=copy())
    teacher = copy()
    objective = make(round_steps=ROUND, **keys)
    student = trained(network, process, objective, own, ROUND * ROUNDS, seed + 1000, 1e-3)
    of = {"teacher": teacher, "student": student.ema}
    return {who: {n: apart(network, p, process, n) for n in STEPS} for who, p in of.items()}


def apart(network, params, process, steps: int) -> float:
    """Total variation between the law of samples and the source."""
    return 0.5 * float(np.abs(law(network.denoiser(params), process, steps) - source()).sum())


def main() -> None:
    name, seeds, *assignments = sys.argv[1:]
    keys = dict(word.split("=") for word in assignments)
    keys = {
        key: parse(value, None) if value[:1].isdigit() else value for key, value in keys.items()
    }
    found = [measured(name, seed, **keys) for seed in range(int(seeds))]
    table = {who: {n: [round(one[who][n], 4) for one in found] for n in STEPS} for who in found[0]}
    print(json.dumps(table))


if __name__ == "__main__":
    main()
