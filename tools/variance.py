"""Measures the gradient variance of a run for several ways of drawing noise, at equal cost.

    python tools/variance.py --workdir RUN [--rows 16] [--repeats 100] [--split train]

Uses the averaged parameters of a trained masked model. Each number is the standard deviation of the
gradient of nats per token over repeated draws, sqrt(sum of the variances of its entries), +- one
standard error, in units of the first row. The column "draws" repeats the noise on one batch; the
column "all" uses another batch each time. Every row costs one pass over the same number of tokens.
All rows estimate the same gradient, so they differ only in variance.

    independent   u ~ U(0, 1) for each sequence
    offset        (u_0 + j / B) mod 1 with one u_0 for the batch
    antithetic    mirrored pairs with one offset, as the training step draws them

A run of block diffusion gets another table: the draws, and the clipped schedules of its block size
with masking rates from U[low, high]. These rows have different mean gradients, so each is in units
of the norm of its own mean gradient (corrected for noise). The last line is the schedule with the
smallest variance over batches, as arguments.
"""

import argparse
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from md4_jax.config import build, inputs, runs
from md4_jax.config import load as config
from md4_jax.data.corpus import Corpus
from md4_jax.data.shards import TokenShards
from md4_jax.experiment import Experiment
from md4_jax.objectives import OBJECTIVES
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.draws import antithetic_times
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Params, UserError, batch_of
from md4_jax.runtime.paths import place


def independent(key: Array, rows: int) -> Array:
    return jax.random.uniform(key, (rows,))


def offset(key: Array, rows: int) -> Array:
    return (jax.random.uniform(key) + jnp.arange(rows) / rows) % 1.0


def antithetic(key: Array, rows: int) -> Array:
    return antithetic_times(jax.random.uniform(key), rows)


TIMES = (independent, offset, antithetic)
ESTIMATORS = ("md4", "lambda_dce", "any_order")
# Ends of the interval of masking rates; high - low is at least WIDTH.
LOWS, HIGHS, WIDTH = (0.0, 0.15, 0.3, 0.45, 0.6), (0.5, 0.65, 0.8, 0.95, 1.0), 0.33


def loaded(workdir: str, split: str) -> tuple[Experiment, Params, np.ndarray | TokenShards]:
    """Returns the experiment, its averaged parameters and the tokens of a split."""
    directory = place(workdir)
    asked = config.stored(directory)
    if asked is None:
        raise UserError(f"{directory} holds no run: train one first with --workdir {directory}")
    domain, source = inputs.domain_and_source(asked, directory)
    experiment = build.experiment(asked, domain)
    if not isinstance(experiment.process, RevealsMasks):
        raise UserError(f"process.name={asked['process']['name']!r}: only masking has these draws")
    return (
        experiment,
        runs.averaged(experiment, directory)[1],
        Corpus(source, domain, experiment.data).stream(split),
    )


def drawn(stream: np.ndarray | TokenShards, length: int, repeats: int, rows: int) -> np.ndarray:
    """Returns batches of sequences at random offsets of a stream: int32 [repeats, rows, length].

    UserError if the stream has fewer tokens than a sequence.
    """
    if len(stream) < length:
        raise UserError(
            f"the split has {len(stream):,} tokens, fewer than a sequence of data.length={length}: "
            "take another --split"
        )
    places = len(stream) - length + 1
    starts = np.random.default_rng(0).integers(0, places, (repeats, rows)).tolist()
    # Token shards support only slices.
    cut = [[stream[start : start + length] for start in row] for row in starts]
    return np.array(cut, np.int32)


def gradients(
    experiment: Experiment, params: Params, tokens: np.ndarray, objective, times: Callable
) -> np.ndarray:
    """Returns the flattened gradient for each batch of tokens [R, B, L]: [R, parameters]."""

    def loss(params: Params, rows: Array, key: Array) -> Array:
        batch = batch_of(rows)
        keys = jax.random.split(jax.random.fold_in(key, 1), len(rows))
        denoiser = experiment.network.denoiser(params)
        nats, _ = objective(denoiser, experiment.process, batch, times(key, len(rows)), keys)
        return jnp.mean(nats) / rows.shape[1]

    one = jax.jit(lambda *arguments: ravel_pytree(jax.grad(loss)(*arguments))[0])
    keys = jax.random.split(jax.random.key(0), len(tokens))
    return np.stack([np.asarray(one(params, r, k)) for r, k in zip(tokens, keys, strict=True)])


def spread(rows: np.ndarray) -> tuple[float, float]:
    """Returns the standard deviation of the rows around their mean, and its standard error."""
    count = len(rows)
    squares = (
        np.sum((rows - rows.mean(axis=0)) ** 2, axis=1, dtype=np.float64) * count / (count - 1)
    )
    deviation = float(np.sqrt(squares.mean()))
    return deviation, float(squares.std(ddof=1) / np.sqrt(count) / (2 * deviation))


def clipping_table(
    experiment: Experiment, params: Params, same: np.ndarray, batches: np.ndarray
) -> None:
    """Prints the gradient noise and the mean gradient of each schedule of block diffusion."""
    block = experiment.objective.block
    forms = [BlockDiffusion(block)] + [
        BlockDiffusion(block, "times", low, high)
        for low in LOWS for high in HIGHS if high - low >= WIDTH
    ]  # fmt: skip
    print(
        f"| draws, blocks of {block} | low | high | draws | all | norm of the mean |\n"
        "|---|---|---|---|---|---|"
    )
    found = []
    for form in forms:
        rows = [
            gradients(experiment, params, tokens, form, antithetic) for tokens in (same, batches)
        ]
        (drawn, error), (noise, its_error) = (spread(part) for part in rows)
        mean = rows[1].mean(axis=0, dtype=np.float64)
        norm = np.sqrt(max(mean @ mean - noise**2 / len(batches), 1e-30))
        found.append((noise / norm, form))
        print(
            f"| {form.draws} | {form.low} | {form.high} | {drawn / norm:.3f} +- {error / norm:.3f} "
            f"| {noise / norm:.3f} +- {its_error / norm:.3f} | {norm:.4f} |",
            flush=True,
        )
    best = min(found, key=lambda pair: pair[0])[1]
    print("--config.objective." + " --config.objective.".join(
        f"{key}={getattr(best, key)}" for key in ("draws", "low", "high")
    ))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True, help="directory of a run")
    parser.add_argument("--rows", type=int, default=16, help="sequences of a batch")
    parser.add_argument("--repeats", type=int, default=100, help="draws")
    parser.add_argument("--split", default="train", choices=("train", "validation", "test"))
    flags = parser.parse_args()
    try:
        experiment, params, stream = loaded(flags.workdir, flags.split)
        batches = drawn(stream, experiment.data.length, flags.repeats, flags.rows)
    except UserError as error:
        sys.exit(f"error: {error}")
    same = np.broadcast_to(batches[:1], batches.shape)
    if isinstance(experiment.objective, BlockDiffusion):
        clipping_table(experiment, params, same, batches)
        return
    print("| estimator | times | draws | all | norm of the mean |\n|---|---|---|---|---|")
    units: list[float] = []
    for name in ESTIMATORS:
        for times in TIMES:
            found = [
                gradients(experiment, params, tokens, OBJECTIVES[name](), times)
                for tokens in (same, batches)
            ]
            spreads = [spread(rows) for rows in found]
            units = units or [deviation for deviation, _ in spreads]
            cells = [
                f"{d / u:.3f} +- {e / u:.3f}" for (d, e), u in zip(spreads, units, strict=True)
            ]
            norm = np.linalg.norm(found[1].mean(axis=0)) / units[1]
            print(
                f"| {name} | {times.__name__} | {cells[0]} | {cells[1]} | {norm:.3f} |", flush=True
            )


if __name__ == "__main__":
    main()
