"""Loading of stored parameters onto a mesh, array by array."""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from md4_jax.config.schema import build_section
from md4_jax.experiment import Experiment
from md4_jax.networks.depth import STACKED
from md4_jax.networks.linear import ADAPTERS
from md4_jax.networks.published import Arrays, Put, Read
from md4_jax.protocols import Array, Params, UserError
from md4_jax.runtime.sharding import path_name
from md4_jax.runtime.tensors import Tensors
from md4_jax.training.loop import fresh_parts
from md4_jax.training.precision import abstract_params
from md4_jax.training.trainable import joined, matching, new_parts

Convert = Callable[[Arrays, object, Put], Params]


def own(experiment: Experiment, tensors: Tensors) -> Params:
    """Reads the parameters written by `write`.

    Adapters and a head of quality are initialised if none were written. UserError if adapters were
    written and the network has none.
    """
    wanted, network = abstract_params(experiment), experiment.network
    stored = [name for name in tensors if re.search(ADAPTERS, name)]
    if stored and not network.adapters:
        raise UserError(
            f"{tensors.folder} holds adapters, which network.lora_rank=0 would ignore: load it "
            "with its own network.lora_rank, and merge the adapters into the matrices by "
            "save(PATH, merged=True)"
        )
    parts = (network.adapters, network.added)
    absent = [part for part in parts if part and not any(re.search(part, name) for name in tensors)]
    fresh = _by_path({"network": fresh_parts(experiment)}) if absent else {}

    def read(path: tuple, want: jax.ShapeDtypeStruct) -> Array:
        name = path_name(path)
        if any(re.search(part, name) for part in absent):
            return fresh[name].astype(want.dtype)
        return placed(want, [lambda: tensors[name]], f"{tensors.folder}: {name}")

    return jax.tree_util.tree_map_with_path(read, wanted)


def converted(
    experiment: Experiment,
    arrays: Arrays,
    convert: Convert,
    folder: str,
    begin: Callable[[Params, Put], Params] | None = None,
) -> Params:
    """Reads the parameters of a published network from its folder, which has no adapters.

    Adapters are initialised, and changed by `begin` if it is given; so is a head of quality. The
    process has no parameters.
    """
    shapes = _by_path(abstract_params(experiment)["network"])
    section = experiment.config["network"]
    options = build_section("network", section, vocab_size=experiment.domain.vocab_size)

    def put(path: str, layers: Sequence[Read]) -> Array:
        where = f"{folder}: {path}"
        if path not in shapes:
            raise UserError(f"{where} is not a parameter of the network of this config")
        return placed(shapes[path], layers, where, stacked=path.startswith(STACKED))

    network = convert(arrays, options, put)
    if new_parts(experiment.network):
        fresh = fresh_parts(experiment)
        if begin is not None:
            own = experiment.network.adapters
            begun, others = (matching(fresh, own, matches=which) for which in (True, False))
            fresh = joined(begin(begun, put), others)
        types = {path: shapes[path].dtype for path in _by_path(fresh)}
        fresh = jax.tree_util.tree_map_with_path(lambda p, x: x.astype(types[path_name(p)]), fresh)
        network = joined(fresh, network)
    if missing := shapes.keys() - _by_path(network).keys():
        raise UserError(f"{folder} has no array for the parameter {min(missing)}")
    return {"network": network, "process": experiment.process.init()}


def _by_path(params: Params) -> dict[str, Any]:
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}


def placed(
    want: jax.ShapeDtypeStruct, layers: Sequence[Read], name: str, *, stacked: bool = False
) -> Array:
    """Makes an array on its devices from `layers`, which read all of it, or its slices if stacked.

    This process holds one layer in addition to its part of the array. UserError if the shape is not
    the wanted one.
    """
    if not stacked:
        return _on_devices(layers[0](), want, name)
    mesh, spec = want.sharding.mesh, want.sharding.spec  # the axis of layers is never split
    one = jax.ShapeDtypeStruct(
        want.shape[1:], want.dtype, sharding=NamedSharding(mesh, P(*spec[1:]))
    )
    if len(layers) != want.shape[0]:
        raise UserError(f"{name} has {len(layers)} layers, but the model needs {want.shape[0]}")
    whole = jax.jit(lambda: jnp.zeros(want.shape, want.dtype), out_shardings=want.sharding)()
    for number, read in enumerate(layers):
        layer = _on_devices(read(), one, f"{name}, layer {number}")
        # Waits, so that memory of this layer is freed before the next one is read.
        whole = jax.block_until_ready(_setter(want.sharding)(whole, layer, number))
    return whole


def _on_devices(array: np.ndarray, want: jax.ShapeDtypeStruct, name: str) -> Array:
    if array.shape != want.shape:
        raise UserError(f"{name} has the shape {array.shape}, but the model needs {want.shape}")
    piece = lambda index: np.asarray(array[index], want.dtype)  # noqa: E731
    return jax.make_array_from_callback(want.shape, want.sharding, piece)


@functools.cache
def _setter(sharding: NamedSharding) -> Callable:
    """Returns a program (whole, layer, number) -> whole with that layer, in place."""
    update = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
    return jax.jit(update, donate_argnums=0, out_shardings=sharding)


@contextlib.contextmanager
def silent_checkpoints() -> Iterator[None]:
    """Silences the checkpoint library's log while reading."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
