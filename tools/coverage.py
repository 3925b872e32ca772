"""Measures how often the 95% interval of a likelihood bound contains the exact bound.

    python tools/coverage.py [--families md4,udlm] [--repeats 400] [--out FILE.json]

The tokens of a sequence are independent, and the denoiser reads one token at a time. So the exact
bound is a sum over tokens, computed by enumeration of all noise. Every repetition evaluates `ROWS`
sequences in batches of `BATCH`, like the evaluator `likelihood`, with 1.96 standard errors on both
sides. A row of the table is one family:

    new, same     percentage of the intervals that contain the bound: for new sequences in each
                  repetition, and for one sequence repeated `ROWS` times with different draws
    spread        standard deviation of the estimates over repetitions of one sequence, in bits per
                  character, and the mean of the reported standard errors
    work          network evaluations per sequence for a spread of 0.01 bits per character

"plain" has times from U(0, 1) and errors that treat sequences as independent. The other rows are as
in the evaluator: `evaluation_times`, and errors that account for strata.
"""

import argparse
import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.auditor.draws import Choices, enumerated
from md4_jax.auditor.problem import rule
from md4_jax.evals.likelihood import make_eval_step
from md4_jax.evals.metrics import Likelihood, bits
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.ctmc import CTMC
from md4_jax.objectives.d3pm import D3PM
from md4_jax.objectives.draws import early_times, evaluation_times
from md4_jax.objectives.genmd4 import GenMD4
from md4_jax.objectives.gidd import GIDD
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.processes.hybrid import Hybrid
from md4_jax.processes.masking import Masking
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import Cosine, Geometric, LogLinear
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Array, Blockwise, Denoiser, Network, batch_of
from md4_jax.runtime.paths import place

SYMBOLS, LENGTH, ROWS, BATCH = 8, 64, 256, 64
LAW = 1.0 / np.arange(1, SYMBOLS + 1) / np.sum(1.0 / np.arange(1, SYMBOLS + 1))
QUANTILE = 1.96
PANELS, KEYS, MOST_ERROR = 256, 8, 2e-4  # of the exact bound; the error in nats

FAMILIES = {
    "md4": (MD4(), Masking(SYMBOLS)),
    "md4 cosine": (MD4(), Masking(SYMBOLS, Cosine())),
    "genmd4": (GenMD4(), StateDependent(SYMBOLS).init()),
    "sedd_absorb": (ScoreEntropy(), Masking(SYMBOLS)),
    "sedd_uniform": (ScoreEntropy(), Uniform(SYMBOLS, LogLinear(), "score")),
    "sedd_uniform geometric": (ScoreEntropy(), Uniform(SYMBOLS, Geometric(1e-4), "score")),
    "udlm": (UniformELBO(), Uniform(SYMBOLS)),
    "udlm cosine": (UniformELBO(), Uniform(SYMBOLS, Cosine())),
    "gidd": (GIDD(), Hybrid(SYMBOLS)),
    "gidd more": (GIDD(), Hybrid(SYMBOLS, 0.4)),
    "d3pm": (D3PM(64), Uniform(SYMBOLS)),
    "ctmc": (CTMC(), Rates(SYMBOLS)),
    "block": (BlockDiffusion(16), Masking(SYMBOLS)),
}


class Measured(NamedTuple):
    """Outcome of all repetitions: coverage in percent, spread and mean error in bits per character.

    new, same  coverage for new sequences and for one sequence
    """

    new: float
    same: float
    spread: float
    error: float

    @property
    def work(self) -> float:
        """Returns the network evaluations per sequence for a spread of 0.01 bits per character."""
        return ROWS * (self.spread / 0.01) ** 2


def outputs(process: Any, z: Array, t: Array) -> Array:
    """Returns logits of a token's distribution plus an error that depends on z and t: [B, L, V]."""
    symbol = jnp.arange(SYMBOLS)
    error = 0.5 * jnp.cos(3.0 * t[..., None] + 2.1 * z[..., None] + 1.7 * symbol)
    logits = jnp.log(jnp.asarray(LAW, jnp.float32)) + error
    if getattr(process, "parametrisation", "") != "score":
        return logits
    # Score of the joint form: (1 + odds mu_y) / (1 + odds mu_z).
    scaled = jnp.log1p(process.odds(t)[..., None] * jax.nn.softmax(logits))
    return scaled - jnp.take_along_axis(scaled, z[..., None], axis=-1)


def network_of(process: Any) -> Network:
    """Returns a network without parameters that reads one token at a time."""

    def features(z: Array, t: Array) -> Array:
        return outputs(process, z, jnp.broadcast_to(t[:, None], z.shape))

    def of_blocks(z: Array, t: Array, clean: Array, block: int, *_) -> Array:
        return outputs(process, z, jnp.repeat(t, block, axis=1)[:, : z.shape[1]])

    bound = Denoiser(features, lambda h: h, blocks=Blockwise(of_blocks, None, None))
    bound = bound._replace(rebind=lambda count: bound)
    return Network(lambda key: {}, lambda params, context, keys: bound, time_free=False)


class Plain:
    """Objective with times drawn from U(0, 1)."""

    def __init__(self, objective: Any):
        self._objective = objective

    def __call__(self, *arguments: Any) -> tuple[Array, dict[str, Array]]:
        return self._objective(*arguments)


def exact_nats(objective: Any, process: Any) -> np.ndarray:
    """Returns the bound of each symbol in nats, by enumeration of the noise: float64 [V]."""
    # The bound of blocks equals that of `md4` for independent tokens.
    objective = MD4() if isinstance(objective, BlockDiffusion) else objective
    points, symbols = rule(getattr(objective, "timesteps", 1), PANELS), jnp.arange(SYMBOLS)
    bind = network_of(process).denoiser
    sizes: list[int] = []

    def nats(u: Array, x: Array, key: Array, index: Array) -> Array:
        """Returns the probability of these outcomes times their nats [N], from u, x, index [N]."""
        choices = Choices(index, key)
        varied, keys = enumerated(process, choices), jax.random.split(key, len(x))
        denoiser = bind({"network": {}, "process": process})
        found = objective(denoiser, varied, batch_of(x[:, None]), u, keys)[0]
        sizes[:] = choices.sizes
        return jnp.where(choices.weight > 0, choices.weight * found, 0.0)

    none = jnp.zeros(SYMBOLS, int)
    jax.eval_shape(nats, jnp.full(SYMBOLS, 0.5), symbols, jax.random.key(0), none)
    shape = (points.size, math.prod(sizes), SYMBOLS)
    when, which, x = (jnp.asarray(axis.ravel()) for axis in np.indices(shape))

    @jax.jit
    def total(key: Array) -> Array:
        u, weight = points.points(key)
        many = evaluation_times(objective, process, u)[1] is not None
        if many and not hasattr(objective, "timesteps"):  # the rule has the edges of its steps
            u, early = early_times(u, min(5, objective.time_power))
            weight = weight * early
        found = nats(u[when], x, key, which).reshape(shape)
        return jnp.sum(weight[:, None, None] * found, axis=(0, 1))

    found = np.stack([np.asarray(total(jax.random.key(k)), np.float64) for k in range(KEYS)])
    error = found.std(axis=0).max() / np.sqrt(KEYS)
    if error > MOST_ERROR:
        raise ArithmeticError(f"the exact bound is known to {error:.1e} nats only")
    return found.mean(axis=0)


def draw(seed: int, *shape: int) -> Array:
    """Draws independent tokens."""
    law = jnp.log(jnp.asarray(LAW, jnp.float32))
    return jax.random.categorical(jax.random.key(seed), law, shape=shape).astype(jnp.int32)


def estimates(
    objective: Any, process: Any, x: Array, draws: int, *, strata: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (bits per character, their standard errors), each [R], of x [R, ROWS, L].

    strata: whether errors account for the stratification of times
    """
    step = make_eval_step(network_of(process), objective, draws, seed=1)
    batches = x.reshape(-1, BATCH, x.shape[-1])
    params = {"network": {}, "process": process}
    one = jax.jit(lambda index: step(params, batch_of(batches[index]), index))
    found = [jax.tree.map(np.asarray, one(jnp.int32(i))) for i in range(len(batches))]
    tokens, each = np.full(BATCH, x.shape[-1]), len(batches) // len(x)
    out = []
    for first in range(0, len(found), each):
        total = Likelihood()
        for part in found[first : first + each]:
            total.add(part["nats"], tokens, strata=part["strata"] if strata else None)
        result = total.result()
        out.append((result["bits_per_token"], result["bits_per_token_se"]))
    values, errors = np.array(out).T
    return values, errors


def measured(objective: Any, process: Any, *, repeats: int, draws: int, plain: bool) -> Measured:
    """Measures the intervals of one family; plain: with times from U(0, 1) and simple errors."""
    exact = bits(exact_nats(objective, process))
    if hasattr(objective, "for_evaluation"):
        objective = objective if plain else objective.for_evaluation()
    used = Plain(objective) if plain else objective
    new = draw(2, repeats, ROWS, LENGTH)
    same = jnp.broadcast_to(draw(3, LENGTH), new.shape)

    def of(x: Array) -> tuple[np.ndarray, np.ndarray]:
        return estimates(used, process, x, draws, strata=not plain)

    def coverage(values: np.ndarray, errors: np.ndarray, bound: float) -> float:
        return 100.0 * float(np.mean(np.abs(values - bound) < QUANTILE * errors))

    values, errors = of(same)
    return Measured(
        coverage(*of(new), float(exact @ LAW)),
        coverage(values, errors, float(exact[np.asarray(same[0, 0])].mean())),
        float(values.std(ddof=1)),
        float(errors.mean()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default="", help="some of the families, with commas")
    parser.add_argument("--repeats", type=int, default=400, help="intervals of each kind")
    parser.add_argument("--draws", type=int, default=1, help="draws of a sequence")
    parser.add_argument("--out", default="", help="file for the numbers in JSON")
    flags = parser.parse_args()
    chosen = [name.strip() for name in flags.families.split(",") if name] or list(FAMILIES)
    results = {}
    print("| family | draws | new | same | spread | mean error | work |\n" + "|---" * 7 + "|")
    for name in chosen:
        for plain in (True, False):
            found = measured(*FAMILIES[name], repeats=flags.repeats, draws=flags.draws, plain=plain)
            kind = "plain" if plain else "evaluator"
            results[f"{name}: {kind}"] = found._asdict() | {"work": found.work}
            print(
                f"| {name} | {kind} | {found.new:.1f} | {found.same:.1f} | {found.spread:.4f} "
                f"| {found.error:.4f} | {found.work:.0f} |",
                flush=True,
            )
    if flags.out:
        place(flags.out).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
