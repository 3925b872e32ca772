"""DreamOn: a Dream in which a mask may become two masks, or none (arXiv:2602.01326).

Its network is Dream's. An additional entry of the vocabulary, `expand_token_id` of config.json,
means expansion of a mask, and the end-of-text token means deletion.
"""

from collections.abc import Mapping
from typing import Any

from md4_jax.data import bpe_files
from md4_jax.model.peer import UNKNOWN, Peer, first, lacks
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.tensors import Tensors

KEY, ENTRY = "expand_token_id", "<|expand|>"


def with_expansion(told: Mapping[str, Any], folder: Place) -> Mapping[str, Any]:
    """Adds the expansion to the config.json of a Dream, if its tokenizer has an entry for it."""
    kind = str(told.get("model_type", "")).lower()
    if kind != "dream" or told.get(KEY) is not None:
        return told
    if not bpe_files.is_in(folder):
        return told
    found = bpe_files.from_path(str(folder)).token_to_id(ENTRY)
    return told if found is None else {**told, KEY: found}


def resizing(found: Peer, told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Changes a model of masks to the process `resizing`, if config.json has an expansion.

    UserError for an expansion that is not a row of the vocabulary, or is another special entry.
    """
    expand, mask, end = told.get(KEY), found.mask, first(told.get("eos_token_id"))
    if expand is None or mask in (None, UNKNOWN):
        return found
    if end is None:
        raise lacks(tensors, "eos_token_id")
    if not 0 <= expand <= found.symbols or expand in (mask, end):
        raise UserError(
            f"{tensors.folder}: config.json says {KEY}={expand}, which must be one of the "
            f"{found.symbols + 1} ids of the vocabulary other than the mask {mask} and the end of "
            f"a text {end}"
        )
    # Symbols after the mask move down by one: data/byte_pairs.py.
    process = {
        **found.sections["process"], "name": "resizing",
        "expand": expand - (expand > mask), "delete": end - (end > mask),
    }  # fmt: skip
    sections = {**found.sections, "process": process, "sample": {"name": "resize"}}
    return found._replace(sections=sections, most=max(expand, end))
