"""Checks that a published checkpoint has nothing that the network would ignore."""

import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

from md4_jax.model.peer import Peer
from md4_jax.protocols import UserError
from md4_jax.runtime.distributed import is_first
from md4_jax.runtime.tensors import Tensors

# Prefix of the names of the arrays of one layer.
LAYER = re.compile(r"(.*?[._/]\d+[./])")
# Angles of rotary positions, which are computed from config.json.
ANGLES = ".inv_freq"
FLOATS = ("F64", "F32", "F16", "BF16")


def check_types(told: Mapping[str, Any], tensors: Tensors) -> None:
    """Raises UserError for quantised matrices, whose values need scales that are not read here.

    told: config.json, which may name the method
    """
    for name in tensors:
        kind = tensors.stored(name).type
        if name.endswith(".weight") and kind not in FLOATS:
            how = (told.get("quantization_config") or {}).get("quant_method", "an unnamed method")
            raise UserError(
                f"{tensors.folder} is quantised ({how}): its array {name!r} has the type {kind}. "
                "Only matrices of floating-point numbers are supported: give the model before "
                "quantisation"
            )


def check_used(tensors: Tensors, peer: Peer, used: Collection[str]) -> None:
    """Raises UserError for an array of the model that is not a parameter of the network.

    These are arrays of a layer of which others are used, and biases of matrices that are used. The
    network without them would compute other outputs than its authors' code.

    used: names of the arrays that were converted to parameters
    """
    used = set(used)
    layers = {found[1] for found in map(LAYER.match, used) if found}
    for name in sorted(set(tensors) - used):
        layer = LAYER.match(name)
        matrix = re.sub(r"\bbias$", "weight", name)
        is_bias = matrix != name and (matrix in used or matrix in peer.tables)
        if not (is_bias or (layer and layer[1] in layers)):
            continue
        idle = name.endswith(ANGLES) or re.fullmatch(peer.buffers, name)
        if not idle and peer.copied(name) not in used:
            raise UserError(
                f"{tensors.folder} has the array {name!r}, but this kind of network "
                f"({peer.kind}) has no such parameter. Without it outputs would differ from those "
                "of the published model, which is therefore not supported"
            )


def warn(peer: Peer) -> None:
    """Prints a warning about keys of config.json that nothing has read."""
    if peer.unread and is_first():
        named = ", ".join(f"{key}={value!r}" for key, value in peer.unread.items())
        print(
            f"warning: config.json has keys that md4_jax does not know: {named}. If the network of "
            "the authors' code depends on one of them, its outputs differ from those computed here",
            file=sys.stderr,
        )
