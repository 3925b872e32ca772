"""Origins of a network's matrices in a published checkpoint: module and rows.

A module of PyTorch stores W^T [out, in]. Several matrices here may be rows of one module there,
such as query, key and value of a DiT.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from md4_jax.model.peer import Peer
from md4_jax.networks.dropout import ADAPTED
from md4_jax.networks.published import Read
from md4_jax.protocols import UserError

Shapes = Mapping[str, tuple[int, ...]]
WEIGHT = ".weight"


class Origin(NamedTuple):
    """Rows [start, stop) of the matrix of a module."""

    module: str
    start: int
    stop: int


class _RowNumbers(dict):
    """Arrays with one column that contains their row indices, made from shapes.

    last: name of the array that was read last.
    """

    last = ""

    def __getitem__(self, name: str) -> np.ndarray:
        self.last = name
        return np.arange(super().__getitem__(name)[0])[:, None]


def origins(peer: Peer, shapes: Shapes, options: Any, folder: str) -> dict[str, list[Origin]]:
    """Returns the origins of the layers that may have adapters, by path.

    peer, shapes  a published model, and the shapes of its arrays by name
    options       of the converted network
    folder        of the published model, for messages

    A path such as `blocks/attention/query` has an origin for each layer. UserError for a checkpoint
    that is not from PyTorch, or has no such modules.
    """
    if not any(name.endswith(WEIGHT) for name in shapes):
        raise UserError(
            f"{folder} is not a checkpoint of PyTorch ({peer.kind}): adapters in PEFT's layout "
            "belong to PyTorch modules"
        )
    check_modules(peer, folder)
    numbers, found = _RowNumbers(shapes), {}

    def put(path: str, layers: Sequence[Read]) -> None:
        layer, _, name = path.rpartition("/")
        if name == "kernel" and layer.split("/")[-1] in ADAPTED:
            found[layer] = [_origin(read(), numbers.last, layer, folder) for read in layers]

    peer.convert(numbers, options, put)
    return found


def check_modules(peer: Peer, folder: Any) -> None:
    """Raises UserError if the model's modules do not correspond one-to-one to layers here.

    Modules may store transposed matrices. In DiffusionGemma encoder and decoder have separate
    modules with shared matrices: an adapter of only one of them, or different adapters, would not
    be an adapter of the shared layer.
    """
    if peer.doubled:
        raise UserError(
            f"{folder} ({peer.kind}) has two modules for each layer, one of the encoder and one "
            "of the decoder, which share their matrices. An adapter in PEFT's layout belongs to "
            "a single module, so it cannot be read or written for these layers: use save, or "
            "export the whole model"
        )
    if peer.transposed:
        raise UserError(
            f"{folder} ({peer.kind}) stores matrices as [in, out], but adapters in PEFT's layout "
            "are only supported for modules that store them as [out, in]"
        )


def _origin(kernel: np.ndarray, name: str, layer: str, folder: str) -> Origin:
    """Returns the origin of the kernel [1, out], which contains row indices."""
    first, count = int(kernel[0, 0]), kernel.shape[-1]
    if not name.endswith(WEIGHT) or not np.array_equal(kernel, first + np.arange(count)[None]):
        raise UserError(f"{folder}: {layer} does not consist of whole rows of one matrix ({name})")
    return Origin(name.removesuffix(WEIGHT), first, first + count)
