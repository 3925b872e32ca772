"""Parameters placed on a mesh, array by array, from what a folder stores of them."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from md4_jax.config.schema import build_section
from md4_jax.experiment import Experiment
from md4_jax.networks.published import Put, Read
from md4_jax.protocols import Array, Params, UserError
from md4_jax.runtime.sharding import path_name
from md4_jax.runtime.tensors import Tensors
from md4_jax.training.loop import abstract_state

Convert = Callable[[Tensors, object, Put], Params]


def own(experiment: Experiment, tensors: Tensors) -> Params:
    """Reads the parameters that `write` has written."""

    def read(path: tuple, want: jax.ShapeDtypeStruct) -> Array:
        name = path_name(path)
        return placed(want, [lambda: tensors[name]], f"{tensors.folder}: {name}")

    return jax.tree_util.tree_map_with_path(read, abstract_state(experiment).ema)


def converted(experiment: Experiment, tensors: Tensors, convert: Convert) -> Params:
    """Reads the parameters of a published network. The process learns nothing."""
    wanted = jax.tree_util.tree_leaves_with_path(abstract_state(experiment).ema["network"])
    shapes = {path_name(path): leaf for path, leaf in wanted}
    section = experiment.config["network"]
    options = build_section("network", section, vocab_size=experiment.domain.vocab_size)

    def put(path: str, layers: Sequence[Read]) -> Array:
        where = f"{tensors.folder}: {path}"
        if path not in shapes:
            raise UserError(f"{where} is no parameter of the network of this config")
        return placed(shapes[path], layers, where, stacked=path.startswith("blocks/"))

    network = convert(tensors, options, put)
    found = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(network)}
    if missing := shapes.keys() - found:
        raise UserError(f"{tensors.folder} has nothing for the parameter {min(missing)}")
    return {"network": network, "process": experiment.process.init()}


def placed(
    want: jax.ShapeDtypeStruct, layers: Sequence[Read], name: str, *, stacked: bool = False
) -> Array:
    """Makes an array on its devices of what `layers` read: the whole, or its slices if stacked.

    Memory holds one layer and the part of this process besides the array. UserError for another
    shape than wanted.
    """
    indices = want.sharding.addressable_devices_indices_map(want.shape)
    parts = {_key(index): index for index in indices.values()}
    piece = want.sharding.shard_shape(want.shape)
    pieces = {key: np.empty(piece, want.dtype) for key in parts}
    shape = want.shape[1:] if stacked else want.shape
    for number, read in enumerate(layers):
        array = read()
        if array.shape != shape or (stacked and len(layers) != want.shape[0]):
            found = (len(layers), *array.shape) if stacked else array.shape
            raise UserError(f"{name} has the shape {found}, and the model needs {want.shape}")
        for key, index in parts.items():
            if stacked:  # the axis of layers is never split
                pieces[key][number] = array[index[1:]]
            else:
                pieces[key][...] = array[index]
    return jax.make_array_from_callback(want.shape, want.sharding, lambda i: pieces[_key(i)])


def _key(index: tuple[slice, ...]) -> tuple:
    return tuple((part.start, part.stop) for part in index)
