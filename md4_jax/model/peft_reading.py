"""LoRA in PEFT's layout for a published model: merged into its matrices, or kept separate."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from md4_jax.model import peft_config
from md4_jax.model.origins import WEIGHT, Origin
from md4_jax.model.peft_config import Lora
from md4_jax.networks.depth import STACKED
from md4_jax.networks.published import Arrays, Put, View
from md4_jax.protocols import Array, Params, UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.sharding import path_name, to_host
from md4_jax.runtime.tensors import Tensors

NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
WHOLE = re.compile(r"base_model\.model\.(.+?)(?:\.base_layer)?\.weight")
Origins = Mapping[str, Sequence[Origin]]


class Adapters(NamedTuple):
    """Adapters of a folder, which have been checked against their base.

    lora     adapter_config.json
    tensors  matrices
    modules  names of the modules with an adapter
    """

    lora: Lora
    tensors: Tensors
    modules: frozenset[str]

    def matrix(self, module: str, which: str) -> np.ndarray:
        """Reads A [rank, in] or B [out, rank] as float32."""
        return np.asarray(self.tensors[_name(module, which)], np.float32)

    def check_read(self, names: set[str]) -> None:
        """Raises UserError for a module whose matrix is not part of the network.

        names: names of the base's arrays that were converted to parameters
        """
        for module in sorted(self.modules):
            if module + WEIGHT not in names:
                raise UserError(
                    f"{self._file}: it has an adapter of {module}, but no matrix of the network "
                    "is made from this module"
                )

    def settings(self, rank: int, origins: Origins) -> dict[str, Any]:
        """Returns the config keys of a network with these adapters.

        rank: network.lora_rank. UserError if adapters have other ranks, and for an adapter of a
        module that cannot have one in the network.
        """
        layers = {place.module for places in origins.values() for place in places}
        for module in sorted(self.modules):
            if module not in layers:
                raise self._cannot(
                    f"{module}, which is not a layer of attention or feed-forward", rank
                )
            if self.lora.rank(module) != rank:
                has = f"{module} with the rank {self.lora.rank(module)}"
                raise self._cannot(has, rank)
        kinds = {False: set(), True: set()}
        for layer, places in origins.items():
            kind = "/".join(layer.split("/")[-2:])
            kinds[any(place.module in self.modules for place in places)].add(kind)
        found = {
            "network.lora_alpha": float(self.lora.scale(min(self.modules)) * rank),
            "network.lora_dropout": float(self.lora.told.get("lora_dropout") or 0.0),
        }
        if kinds[False] - kinds[True]:
            found["train.trainable"] = f"({'|'.join(sorted(kinds[True]))})/lora"
        return found

    def begun(self, fresh: Params, put: Put, origins: Origins, scale: float) -> Params:
        """Returns adapters with these values; those not in the folder keep their initial values.

        fresh  initial adapters of the network, nested as in it
        put    makes a parameter from its path and the functions that read its layers
        scale  network.lora_alpha / network.lora_rank; if the scale of an adapter differs, its
               matrix B is rescaled
        """

        def one(path: tuple, x: Array) -> Array:
            name = path_name(path)
            layer, which, _ = name.rsplit("/", 2)
            if not any(place.module in self.modules for place in origins[layer]):
                return x
            own = np.asarray(to_host(x))
            layers = own if name.startswith(STACKED) else own[None]
            reads = [
                functools.partial(self._part, which == "lora_b", place, scale, values)
                for place, values in zip(origins[layer], layers, strict=True)
            ]
            return put(name, reads)

        return jax.tree_util.tree_map_with_path(one, fresh)

    def _part(self, is_second: bool, place: Origin, scale: float, fresh: np.ndarray) -> np.ndarray:
        """Returns one matrix of the adapter of a layer: A^T, or its columns of B^T."""
        if place.module not in self.modules:
            return fresh
        if not is_second:
            return self.matrix(place.module, "A").T
        ratio = self.lora.scale(place.module) / scale
        rows = self.matrix(place.module, "B")[place.start : place.stop].T
        return rows if ratio == 1.0 else rows * np.float32(ratio)

    def _cannot(self, has: str, rank: int) -> UserError:
        return UserError(
            f"{self._file} adapts {has}, but network.lora_rank={rank} makes adapters of this rank "
            "only for layers of attention and feed-forward: remove network.lora_rank to merge "
            "the adapter into the matrices"
        )

    @property
    def _file(self) -> Place:
        return self.tensors.folder / peft_config.ARRAYS


class Merged(View):
    """Arrays of a base; those with an adapter become W + scale B A, computed in float32."""

    def __init__(self, arrays: Arrays, adapters: Adapters):
        super().__init__(arrays)
        self._adapters = adapters

    def __getitem__(self, name: str) -> np.ndarray:
        array, found, module = self._arrays[name], self._adapters, name.removesuffix(WEIGHT)
        if module not in found.modules:
            return array
        change = found.matrix(module, "B") @ found.matrix(module, "A")
        return np.asarray(array, np.float32) + np.float32(found.lora.scale(module)) * change


def read(folder: Place, base: Tensors) -> Adapters:
    """Reads the LoRA of a folder for a base.

    UserError for a folder that is not a LoRA or does not match the base: missing or surplus tensors
    or modules, or other shapes or ranks.
    """
    lora, tensors = peft_config.read(folder), Tensors(folder, peft_config.ARRAYS)
    file, found = folder / peft_config.ARRAYS, set()
    for name in tensors:
        if match := NAME.fullmatch(name):
            found.add(match.group(1))
        else:
            _check_whole(tensors, base, name)
    if not found:
        raise UserError(f"{file} holds no matrices")
    for module in sorted(found):
        _check_module(lora, tensors, base, module)
    for name in sorted(base):
        module = name.removesuffix(WEIGHT)
        if module == name or module in found or len(base.shape(name)) != 2:
            continue
        if lora.needs(module):
            raise UserError(
                f"{file} lacks {_name(module, 'A')!r}: target_modules of {lora.file.name} asks for "
                f"an adapter of {module}, which {base.folder} has"
            )
    return Adapters(lora, tensors, frozenset(found))


def _name(module: str, which: str) -> str:
    return f"base_model.model.{module}.lora_{which}.weight"


def _check_whole(tensors: Tensors, base: Tensors, name: str) -> None:
    """Raises UserError for a tensor that is not an adapter's, unless it equals that of the base.

    PEFT writes the matrix of a head or an embedding together with its adapter.
    """
    file, match = tensors.folder / peft_config.ARRAYS, WHOLE.fullmatch(name)
    array = match.group(1) + WEIGHT if match else ""
    if array not in base:
        raise UserError(
            f"{file} holds {name!r}, which is not a matrix of a LoRA of linear layers and cannot "
            "be read"
        )
    shape, wanted = tensors.shape(name), base.shape(array)
    if shape != wanted or not np.array_equal(
        np.asarray(tensors[name], np.float32), np.asarray(base[array], np.float32)
    ):
        raise UserError(
            f"{file} contains the whole array {name} {shape}, which differs from {array} {wanted} "
            f"of {base.folder}: it was trained too, or belongs to another base model, but only "
            "adapters can be read"
        )


def _check_module(lora: Lora, tensors: Tensors, base: Tensors, module: str) -> None:
    """Raises UserError if a matrix of a module's adapter is missing or does not match the base."""
    file = tensors.folder / peft_config.ARRAYS
    array = module + WEIGHT
    if array not in base or len(base.shape(array)) != 2:
        raise UserError(
            f"{file} adapts {module}, but {base.folder} has no matrix {array!r}: the adapter "
            f"belongs to another base model ({lora.file.name} names {lora.base})"
        )
    if not lora.adapts(module):
        raise UserError(
            f"{file} adapts {module}, which is not among the target_modules of {lora.file.name}: "
            f"{lora.told['target_modules']!r}"
        )
    (out, into), rank = base.shape(array), lora.rank(module)
    for which, wanted in (("A", (rank, into)), ("B", (out, rank))):
        name = _name(module, which)
        if name not in tensors:
            raise UserError(f"{file} lacks {name!r}, the other matrix of an adapter")
        if tensors.shape(name) != wanted:
            raise UserError(
                f"{file}: {name} has the shape {tensors.shape(name)}, but must have {wanted} for "
                f"the rank {rank} of {lora.file.name} and {array} {(out, into)} of {base.folder}. "
                f"The base model of the adapter was {lora.base}"
            )


def beginning(
    adapters: Adapters, origins: Origins, options: Any
) -> Callable[[Params, Put], Params]:
    """Returns `begun` for a network with these options, for use by `parameters.converted`."""
    scale = options.lora_alpha / options.lora_rank
    return functools.partial(adapters.begun, origins=origins, scale=scale)
