"""Logits of a model's network, of all positions or of one of each sequence."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.model import inputs
from md4_jax.protocols import Array, Network, Params
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.sharding import batch_shards, local_rows, to_global, to_host


def logits(model: Any, tokens: Any, t: Any, context: Mapping[str, Any], at: Any) -> np.ndarray:
    """Returns what `Model.logits` returns; UserError for inputs that do not fit."""
    experiment, programs = model.experiment, model.programs
    rows, times = inputs.checked(experiment, tokens, t)
    told = inputs.contexts(context, rows)
    index = None if at is None else inputs.positions(at, rows)
    mesh = experiment.mesh
    own = local_rows(mesh, len(rows) + -len(rows) % batch_shards(mesh)).clip(max=len(rows) - 1)
    given = jax.tree.map(lambda x: x[own], (rows, times, told, index))
    if "logits" not in programs:
        programs["logits"] = jit(_program(experiment.network), mesh, experiment.network)
    with jax.set_mesh(mesh):
        found = programs["logits"](model.params, *to_global(given, mesh))
    found = to_host(found)[: len(rows)]
    return found if np.ndim(tokens) == 2 else found[0]


def _program(network: Network) -> Callable[..., Array]:
    def run(params: Params, z: Array, t: Array, context: dict, index: Array | None) -> Array:
        denoiser = network.denoiser(params, context)
        if index is None:
            return denoiser(z, t).astype(jnp.float32)
        h = denoiser.features_at(z, t, index[:, None])
        return denoiser.unembed(h)[:, 0].astype(jnp.float32)

    return run
