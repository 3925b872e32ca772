"""Parameters placed on a mesh, array by array, from what a folder stores of them."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from md4_jax.config.schema import build_section
from md4_jax.experiment import Experiment
from md4_jax.networks.published import Arrays, Put, Read
from md4_jax.protocols import Array, Params, UserError
from md4_jax.runtime.sharding import path_name
from md4_jax.runtime.tensors import Tensors
from md4_jax.training.loop import abstract_state

Convert = Callable[[Arrays, object, Put], Params]


def own(experiment: Experiment, tensors: Tensors) -> Params:
    """Reads the parameters that `write` has written."""

    def read(path: tuple, want: jax.ShapeDtypeStruct) -> Array:
        name = path_name(path)
        return placed(want, [lambda: tensors[name]], f"{tensors.folder}: {name}")

    return jax.tree_util.tree_map_with_path(read, abstract_state(experiment).ema)


def converted(experiment: Experiment, arrays: Arrays, convert: Convert, folder: str) -> Params:
    """Reads the parameters of a published network from its folder. The process learns nothing."""
    wanted = jax.tree_util.tree_leaves_with_path(abstract_state(experiment).ema["network"])
    shapes = {path_name(path): leaf for path, leaf in wanted}
    section = experiment.config["network"]
    options = build_section("network", section, vocab_size=experiment.domain.vocab_size)

    def put(path: str, layers: Sequence[Read]) -> Array:
        where = f"{folder}: {path}"
        if path not in shapes:
            raise UserError(f"{where} is no parameter of the network of this config")
        return placed(shapes[path], layers, where, stacked=path.startswith("blocks/"))

    network = convert(arrays, options, put)
    found = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(network)}
    if missing := shapes.keys() - found:
        raise UserError(f"{folder} has nothing for the parameter {min(missing)}")
    return {"network": network, "process": experiment.process.init()}


def placed(
    want: jax.ShapeDtypeStruct, layers: Sequence[Read], name: str, *, stacked: bool = False
) -> Array:
    """Makes an array on its devices of what `layers` read: the whole, or its slices if stacked.

    This process holds one layer besides its part of the array. UserError for another shape than
    wanted.
    """
    if not stacked:
        return _on_devices(layers[0](), want, name)
    mesh, spec = want.sharding.mesh, want.sharding.spec  # the axis of layers is never split
    one = jax.ShapeDtypeStruct(
        want.shape[1:], want.dtype, sharding=NamedSharding(mesh, P(*spec[1:]))
    )
    if len(layers) != want.shape[0]:
        raise UserError(f"{name} has {len(layers)} layers, and the model needs {want.shape[0]}")
    whole = jax.jit(lambda: jnp.zeros(want.shape, want.dtype), out_shardings=want.sharding)()
    for number, read in enumerate(layers):
        layer = _on_devices(read(), one, f"{name}, layer {number}")
        # Waits, so that what was read is freed before the next layer.
        whole = jax.block_until_ready(_setter(want.sharding)(whole, layer, number))
    return whole


def _on_devices(array: np.ndarray, want: jax.ShapeDtypeStruct, name: str) -> Array:
    if array.shape != want.shape:
        raise UserError(f"{name} has the shape {array.shape}, and the model needs {want.shape}")
    piece = lambda index: np.asarray(array[index], want.dtype)  # noqa: E731
    return jax.make_array_from_callback(want.shape, want.sharding, piece)


@functools.cache
def _setter(sharding: NamedSharding) -> Callable:
    """Returns a program (whole, layer, number) -> whole with that layer, in place."""
    update = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
    return jax.jit(update, donate_argnums=0, out_shardings=sharding)
