"""Gradient accumulation: parts of a batch are computed one after another and averaged."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.experiment import Experiment
from md4_jax.options import TrainOptions
from md4_jax.protocols import Array, Params
from md4_jax.runtime.sharding import BATCH_AXES, constrain

# Tokens of a part if the number is chosen here: activations fit into a CPU's caches, and gradients
# of all parameters are not added too often. Relative to one part, a step of size (a) of
# tools/sizes.py takes 0.68 of the time and 0.30 of the memory for 64 x 256 tokens, and 0.96 and
# 0.71 for 16 x 256; size (b) 0.99 and 0.55 (bfloat16 products, 2 cores of an AMD EPYC). Two parts
# of a batch of images took longer: 1.12 of the time in configs/digits.py, 1.28 in a small U-Net.
TOKENS = 1024


def resolved(experiment: Experiment) -> TrainOptions:
    """Returns the `train` section, with microbatches=0 replaced by the chosen number.

    For a transformer of text on one CPU, it is the largest number of parts with an even number of
    sequences and at least TOKENS tokens each; otherwise 1.
    """
    train = experiment.train
    if train.microbatches:
        return train
    return dataclasses.replace(train, microbatches=_chosen_number(experiment, train.batch_size))


def _chosen_number(experiment: Experiment, rows: int) -> int:
    devices = experiment.mesh.devices
    if devices.size > 1 or devices.flat[0].platform != "cpu":
        return 1
    if experiment.config["network"]["name"] != "transformer":
        return 1
    most = rows * experiment.data.length // TOKENS
    return max((n for n in range(2, most + 1) if rows % (2 * n) == 0), default=1)


def accumulate(grad: Callable, microbatches: int, params: Params, rows: Any):
    """Averages grad(params, *rows) over microbatches, in one scan; 0 means 1 here."""
    if microbatches < 2:
        return grad(params, *rows)

    def split(x: Array) -> Array:
        # Every m-th pair of rows: rows stay on their device, times stay evenly spread, and
        # antithetic pairs stay together.
        rows = x.shape[0] // microbatches
        pair = 2 if rows % 2 == 0 else 1
        parts = x.reshape(rows // pair, microbatches, pair, *x.shape[1:])
        parts = jnp.swapaxes(parts, 0, 1).reshape(microbatches, rows, *x.shape[1:])
        return constrain(parts, None, BATCH_AXES)

    def body(total, microbatch):
        part = grad(params, *microbatch)
        return jax.tree.map(jnp.add, total, part), None

    microbatch_rows = jax.tree.map(split, rows)
    shapes = jax.eval_shape(grad, params, *jax.tree.map(lambda x: x[0], microbatch_rows))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(body, zeros, microbatch_rows)
    return jax.tree.map(lambda x: x / microbatches, total)
