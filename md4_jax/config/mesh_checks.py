"""Checks that batches and sequences can be split over the devices of the mesh."""

from typing import Any

from md4_jax.experiment import Experiment
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.sharding import batch_shards


def check_batches(experiment: Experiment) -> None:
    """Raises UserError if a training batch cannot be split over the devices."""
    shards, mesh = _shards(experiment)
    asked = experiment.train.microbatches
    parts = max(1, asked) * shards  # 0 means one
    if experiment.train.batch_size % parts:
        by = f"train.microbatches={asked} times " if asked else ""
        raise UserError(
            f"train.batch_size={experiment.train.batch_size} must be divisible by {by}the "
            f"{amount(shards, 'batch shard')} of the mesh {mesh} (data x fsdp x context x tensor)"
            + (f", which is {parts}" if asked else "")
        )


def check_context(experiment: Experiment) -> None:
    """Raises UserError if a sequence cannot be split over the devices."""
    parts, length = experiment.mesh.shape["context"], experiment.data.length
    if parts > 1 and not experiment.network.splits:
        raise UserError(
            f"mesh.context={parts} splits sequences over devices, which needs "
            "network.name='transformer', 'modernbert' or 'lfm2' with network.tables=0 and "
            "network.gaps=False. Set mesh.context=1: mesh.data, mesh.fsdp and mesh.tensor work "
            "with every network"
        )
    if length % parts:
        raise UserError(
            f"data.length={length} must be divisible by mesh.context={parts}: each device holds "
            "an equal part of a sequence"
        )


def check_bound_batch(experiment: Experiment, name: str, evaluator: Any) -> None:
    """Raises UserError if a batch of an evaluator cannot be split over the devices."""
    shards, mesh = _shards(experiment)
    if evaluator.sequences(experiment) % shards:
        raise UserError(
            f"evals.{name}.batch_size={evaluator.sequences(experiment)} must be divisible by "
            f"the {shards} batch shards of the mesh {mesh} (data x fsdp x context x tensor)"
        )


def _shards(experiment: Experiment) -> tuple[int, str]:
    """Returns (number of parts of a batch, mesh as text such as 4x2x1x1)."""
    mesh = "x".join(str(size) for size in experiment.mesh.shape.values())
    return batch_shards(experiment.mesh), mesh
