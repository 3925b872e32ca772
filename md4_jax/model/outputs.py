"""Logits of a model's network, at all positions or at one position of each sequence."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.experiment import sample_block
from md4_jax.model import inputs
from md4_jax.protocols import Array, Network, Params, UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.sharding import batch_shards, local_rows, to_global, to_host


def logits(model: Any, tokens: Any, t: Any, context: Mapping[str, Any], at: Any) -> np.ndarray:
    """Computes `Model.logits`; UserError for invalid inputs."""
    if model.experiment.objective.needs.ordered:
        raise UserError(
            f"{model.origin} predicts tokens in an order that is drawn for each text, so it has "
            "no logits of a whole text: use score, or sample with a prompt"
        )
    rows, times = inputs.checked(model.experiment, tokens, t)
    block = sample_block(model.experiment)
    if model.experiment.network.encodes and rows.shape[1] > block:
        raise UserError(
            f"{model.origin} has an encoder, which reads only the blocks before the current one: "
            f"give at most one block of {amount(block, 'token')}, not {rows.shape[1]}, or use "
            "score or sample"
        )
    contexts = inputs.contexts(context, rows)
    if model.experiment.network.classifies and at is not None:
        raise UserError(f"a classifier has no logits of single positions: remove at={at}")
    index = None if at is None else inputs.positions(at, rows)
    found = _computed(model, "logits", _program, (rows, times, contexts, index))
    return found if np.ndim(tokens) == 2 else found[0]


def logits_in_blocks(
    model: Any, z: np.ndarray, clean: np.ndarray, t: np.ndarray, at: np.ndarray, block: int
) -> np.ndarray:
    """Returns the logits of one position of each row in block diffusion, float32 [B, V].

    The block of the position is read from z [B, L], and earlier blocks from `clean`. at: int32 [B]

    t  float32 [B], time of all blocks
    """
    make = functools.partial(_program_in_blocks, block=block)
    return _computed(model, f"logits in blocks of {block}", make, (z, clean, t, at))


def _computed(
    model: Any, name: str, make: Callable[[Network], Callable[..., Array]], given: tuple
) -> np.ndarray:
    """Runs a program on these arrays [B, ...] on the model's devices.

    name: key of the program in the cache; make: makes the program from the network
    """
    experiment, programs, rows = model.experiment, model.programs, len(given[0])
    mesh = experiment.mesh
    own = local_rows(mesh, rows + -rows % batch_shards(mesh)).clip(max=rows - 1)
    given = jax.tree.map(lambda x: x[own], given)
    if name not in programs:
        programs[name] = jit(make(experiment.network), mesh, experiment.network)
    with jax.set_mesh(mesh):
        found = programs[name](model.params, *to_global(given, mesh))
    return to_host(found)[:rows]


def _program(network: Network) -> Callable[..., Array]:
    def run(params: Params, z: Array, t: Array, context: dict, index: Array | None) -> Array:
        denoiser = network.denoiser(params, context)
        if network.classifies:
            return denoiser.classify(z, t).astype(jnp.float32)
        if index is None:
            return denoiser(z, t).astype(jnp.float32)
        h = denoiser.features_at(z, t, index[:, None])
        return denoiser.unembed(h)[:, 0].astype(jnp.float32)

    return run


def _program_in_blocks(network: Network, block: int) -> Callable[..., Array]:
    def run(params: Params, z: Array, clean: Array, t: Array, at: Array) -> Array:
        denoiser, blocks = network.denoiser(params, {}), -(-z.shape[1] // block)
        t_BxG = jnp.broadcast_to(t[:, None], (len(t), blocks))
        h = denoiser.blocks.features(z, t_BxG, clean, block)
        h = jnp.take_along_axis(h, at[:, None, None], axis=1)
        return denoiser.unembed(h)[:, 0].astype(jnp.float32)

    return run
