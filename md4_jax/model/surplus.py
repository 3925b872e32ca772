"""Checks that a published checkpoint has nothing that the network would ignore."""

import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

from md4_jax.model.peer import Peer
from md4_jax.protocols import UserError
from md4_jax.runtime.distributed import is_first
from md4_jax.runtime.tensors import Tensors

# Arrays that no logit depends on: positions and their angles, which are computed from config.json,
# and heads of rewards, values, classes and a protein's contacts, beside the one of tokens.
IDLE = re.compile(
    r"(.*\.)?(inv_freq|cos_cached|sin_cached|position_ids)"
    r"|(score|classifier|v_head|value_head|reward_head|esm\.contact_head)\..*"
)
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


def check_head(told: Mapping[str, Any], tensors: Tensors, peer: Peer) -> None:
    """Raises UserError if config.json tells of a head of its own that the folder does not have."""
    if told.get("tie_word_embeddings") is False and peer.head and peer.head not in tensors:
        raise UserError(
            f"{tensors.folder} has no array {peer.head!r}, though config.json says "
            "tie_word_embeddings=False: without this output layer it cannot predict tokens. Is it "
            "an embedder or a classifier?"
        )


def check_used(tensors: Tensors, peer: Peer, used: Collection[str]) -> None:
    """Raises UserError for an array that is not a parameter of the network.

    The network without it may compute other outputs than its authors' code. IDLE arrays, buffers of
    the kind of network, and copies of arrays that are used are ignored.

    used: names of the arrays that were converted to parameters
    """
    used = set(used)
    for name in sorted(set(tensors) - used - set(peer.tables)):
        if IDLE.fullmatch(name) or re.fullmatch(peer.buffers, name) or peer.copied(name) in used:
            continue
        raise UserError(
            f"{tensors.folder} has the array {name!r}, but this kind of network "
            f"({peer.kind}) has no such parameter. Without it outputs may differ from those "
            "of the published model, which is therefore not supported. If its authors' code does "
            "not use the array either, load a copy of the folder without it"
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
