"""The two vectors that training makes of an entry that begins texts and is a symbol too.

In a causal model of another project one row of the embedding is the vector of the beginning and of
the symbol, and, if the head is tied, of the symbol's logit. Here they are two rows, equal when they
are read: the mask's, which only begins texts, and the symbol's. Training changes them separately.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from md4_jax.model import peers
from md4_jax.model.layout import Layout, Numbered
from md4_jax.model.peer import Peer, first
from md4_jax.runtime.sharding import to_host


class Parted(NamedTuple):
    """An entry with two vectors that differ.

    entry    its row in the layout
    symbol   float32 [D], the vector of the symbol; an export has that of the beginning in its place
    most     largest difference of the two
    is_read  whether texts may contain the symbol: it ends them
    """

    entry: int
    symbol: np.ndarray
    most: float
    is_read: bool


def parted(model: Any, layout: Layout, options: Any) -> Parted | None:
    """Returns the entry of which a causal model has two vectors; None if an export needs only one.

    It does if they are equal, and if the head is not tied and no text contains the symbol.
    """
    ends = first(layout.config.get("eos_token_id"))
    entry = first(layout.config.get("bos_token_id", ends))
    table = model.params["network"].get("embedding")
    if not options.causal or layout.mask is not None or entry is None or table is None:
        return None
    if not (getattr(options, "tied", False) or entry == ends):
        return None
    rows = np.asarray(to_host(table), np.float32)
    most = float(np.abs(rows[entry] - rows[options.vocab_size]).max())
    return Parted(entry, rows[entry], most, entry == ends) if most else None


def with_head(
    told: Mapping[str, Any], arrays: Mapping[str, np.ndarray], found: Parted, folder: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Returns config.json and the arrays of an export, with the tied head as an array of its own.

    The head has the vector of the symbol, and the embedding that of the beginning. None if the
    layout has no head of its own.

    folder: the original folder, for messages
    """
    peer = _read(told, arrays, folder)
    if not (peer.sections["network"].get("tied") and peer.head):
        return None
    head = np.array(arrays[peer.tables[0]])
    head[found.entry] = found.symbol.astype(head.dtype)
    told, arrays = {**told, "tie_word_embeddings": False}, {**arrays, peer.head: head}
    return None if _read(told, arrays, folder).sections["network"]["tied"] else (told, arrays)


def _read(told: Mapping[str, Any], arrays: Mapping[str, np.ndarray], folder: str) -> Peer:
    """Returns the description of a model that is not yet written."""
    shapes = {name: ("F32", array.shape) for name, array in arrays.items()}
    return peers.peer(told, Numbered(Layout(told, shapes, None, {}), folder))


def warning(found: Parted, *, has_head: bool) -> str:
    """Returns what an export loses of the two vectors, '' for nothing.

    has_head: whether the head is an array of its own
    """
    if has_head and not found.is_read:
        return ""
    where = "after this entry inside a text" if has_head else "of the export"
    return (
        f"the logits {where} differ from those of the model. In the layout of the export the entry "
        f"{found.entry} is both the beginning of each text and a symbol. Training has made two "
        f"vectors of it, which differ by up to {found.most:.2g}; that of the beginning is "
        f"{'read in both places' if has_head else 'written'}. save keeps both"
    )
