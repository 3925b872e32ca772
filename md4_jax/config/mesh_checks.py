"""Checks that the devices of the mesh can share what is computed."""

from typing import Any

from md4_jax.experiment import Experiment
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import batch_shards


def check_batches(experiment: Experiment) -> None:
    """Raises UserError if the devices cannot share a training batch."""
    shards, mesh = _shards(experiment)
    parts = max(1, experiment.train.microbatches) * shards  # 0 divides whatever the batch is
    if experiment.train.batch_size % parts:
        raise UserError(
            f"train.batch_size={experiment.train.batch_size} must be divisible by "
            f"train.microbatches={experiment.train.microbatches} times the {shards} batch shards "
            f"of the mesh {mesh} (data x fsdp x context x tensor), which is {parts}"
        )


def check_context(experiment: Experiment) -> None:
    """Raises UserError if the devices cannot share a sequence."""
    parts, length = experiment.mesh.shape["context"], experiment.data.length
    if parts > 1 and not experiment.network.splits:
        raise UserError(
            f"mesh.context={parts} splits sequences over devices, which needs "
            "network.name='transformer' or 'modernbert', without tables and gaps. Set "
            "mesh.context=1: mesh.data, mesh.fsdp and mesh.tensor fit every network"
        )
    if length % parts:
        raise UserError(
            f"data.length={length} must be divisible by mesh.context={parts}: each device has an "
            "equal part of a sequence"
        )


def check_bound_batch(experiment: Experiment, name: str, evaluator: Any) -> None:
    """Raises UserError if the devices cannot share a batch of an evaluator."""
    shards, mesh = _shards(experiment)
    if evaluator.sequences(experiment) % shards:
        raise UserError(
            f"evals.{name}.batch_size={evaluator.sequences(experiment)} must be divisible by "
            f"the {shards} batch shards of the mesh {mesh} (data x fsdp x context x tensor)"
        )


def _shards(experiment: Experiment) -> tuple[int, str]:
    """Returns into how many parts a batch is split, and the mesh as 4x2x1x1."""
    mesh = "x".join(str(size) for size in experiment.mesh.shape.values())
    return batch_shards(experiment.mesh), mesh
