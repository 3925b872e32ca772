"""ESM-2 as a masked diffusion model, and DPLM (arXiv:2402.18567), which was initialised from it.

Each residue is predicted at its own position. The network itself adds begin and end symbols.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from md4_jax.config import files
from md4_jax.data.proteins import ENTRIES, MASK, Proteins
from md4_jax.model.peer import Peer, agree, check_built, needed
from md4_jax.networks.published_esm import (
    BIAS,
    FINAL,
    HEAD,
    LAYER,
    LINEAR,
    NORMS,
    TABLE,
    from_esm,
)
from md4_jax.networks.rotary import Rope
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.paths import Place
from md4_jax.runtime.tensors import Tensors

KIND = "esm"
VOCABULARY = "vocab.txt"
# Keys of config.json -> their only supported values.
BUILT = {
    "hidden_act": "gelu", "emb_layer_norm_before": False, "is_decoder": False,
    "add_cross_attention": False, "tie_word_embeddings": True, "is_folding_model": False,
    "dplm_type": "dplm_esm", "rope_scaling": None,
}  # fmt: skip
# Default largest number of residues: ESM-2 and DPLM truncate longer proteins.
LENGTH = 1022
# Where transformers stores the angle of each pair of features: version 5, and earlier ones.
ANGLES = (
    "esm.rotary_embeddings.inv_freq",
    LAYER.format(0) + "attention.self.rotary_embeddings.inv_freq",
)
# Vectors of learned positions, which transformers 4 stores and a rotary model does not use.
UNUSED = r"esm\.embeddings\.position_embeddings\.weight"
# What DPLM never draws besides the mask.
NEVER = "<cls> <pad> <eos> X"


def peer(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Reads config.json and the shapes of arrays; UserError for unsupported models."""
    _check(told, tensors)
    sections = {
        "network": _network(told, tensors),
        "process": {"name": "masking", "schedule": {"name": "linear"}},
        "objective": {"name": "md4"},
        "sample": {"name": "reparameterized", "exclude": NEVER},
        "data": {"windows": "documents"},
    }
    length = min(LENGTH, told.get("max_position_embeddings", LENGTH + 4) - 4)
    tables = tuple(name for name in (TABLE, HEAD, BIAS) if name in tensors)
    return Peer(KIND, length, len(ENTRIES) - 1, sections, from_esm, tables=tables, buffers=UNUSED)


def tokenizer_of(folder: Place) -> dict[str, Any]:
    """Returns the section of the tokenizer; UserError for a folder with another vocabulary."""
    file = folder / VOCABULARY
    if file.is_file():
        found = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines())
        if found != ENTRIES:
            raise UserError(
                f"{file} does not have the vocabulary of ESM-2 and DPLM, which has the "
                f"{amount(len(ENTRIES), 'entry')} {' '.join(ENTRIES)}: it has "
                f"{amount(len(found), 'entry')}, beginning with {' '.join(found[:8])}"
            )
    return {"name": Proteins.name}


def _check(told: Mapping[str, Any], tensors: Tensors) -> None:
    """Raises UserError for unsupported options or vocabularies, and for missing arrays."""
    if told.get("position_embedding_type", "absolute") != "rotary":
        raise UserError(
            f"{tensors.folder}: config.json says "
            f"position_embedding_type={told.get('position_embedding_type', 'absolute')!r}; only "
            "'rotary', as in ESM-2, is supported"
        )
    check_built(told, tensors, BUILT)
    for name in (TABLE, BIAS, "lm_head.dense.weight"):
        if name not in tensors:
            raise UserError(
                f"{tensors.folder} has no array {name!r}, which every EsmForMaskedLM has: without "
                "this output layer it cannot predict amino acids"
            )
    rows, mask = tensors.shape(TABLE)[0], ENTRIES.index(MASK)
    if rows != len(ENTRIES) or told.get("mask_token_id", mask) != mask:
        raise UserError(
            f"{tensors.folder} has {rows} entries with the mask "
            f"{told.get('mask_token_id', mask)}, but the vocabulary of ESM-2 has {len(ENTRIES)} "
            f"with the mask {mask}: models of structures or nucleotides are not supported"
        )


def _network(told: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Returns the section `network` of the config."""
    size, depth = tensors.shape(TABLE)[1], tensors.count(r"esm\.encoder\.layer\.(\d+)\.")
    hidden = tensors.shape(LAYER.format(0) + "intermediate.dense.weight")[0]
    agree(
        told, tensors, hidden_size=size, num_hidden_layers=depth, intermediate_size=hidden,
        vocab_size=len(ENTRIES),
    )  # fmt: skip
    heads = needed(told, tensors, "num_attention_heads")
    rope = {} if told.get("rope_parameters") is None else told["rope_parameters"]
    if rope.get("rope_type", "default") != "default":
        raise UserError(
            f"{tensors.folder}: config.json says rope_parameters={rope!r}, which is not supported"
        )
    base = float(rope.get("rope_theta", told.get("rope_theta", 10_000.0)))
    return {
        **files.shipped("networks").ESM,
        "name": "esm", "size": size, "depth": depth, "hidden": hidden, "heads": heads,
        "rotary_base": base,
        "norm_eps": float(told.get("layer_norm_eps", 1e-12)),
        "token_dropout": bool(told.get("token_dropout", False)),
        "rotary_half": _is_half(tensors, base, size // heads),
    }  # fmt: skip


def arrays(o: Any, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and shapes of a network's arrays; rows: number of symbols with the mask."""

    def layer(name: str, out: int, into: int = 0) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (out, into) if into else (out,)
        yield f"{name}.bias", (out,)

    yield TABLE, (rows, o.size)
    yield ANGLES[0], (o.attention_size // 2,)
    sizes = {"feed_forward/up": (o.hidden, o.size), "feed_forward/down": (o.size, o.hidden)}
    for number in range(o.depth):
        block = LAYER.format(number)
        for ours, theirs in LINEAR.items():
            yield from layer(block + theirs, *sizes.get(ours, (o.size, o.size)))
        for theirs in NORMS.values():
            yield from layer(block + theirs, o.size)
    for name in FINAL.values():
        yield from layer(name, o.size)
    yield from layer("lm_head.dense", o.size, o.size)
    yield BIAS, (rows,)


def told(o: Any, length: int, rows: int) -> dict[str, Any]:
    """Returns config.json of a network that reads proteins of up to `length` residues."""
    return {
        "model_type": KIND, "architectures": ["EsmForMaskedLM"], "vocab_size": rows,
        "mask_token_id": rows - 1, "pad_token_id": ENTRIES.index("<pad>"),
        "hidden_size": o.size, "num_hidden_layers": o.depth, "num_attention_heads": o.heads,
        "intermediate_size": o.hidden, "max_position_embeddings": length + 4,
        "position_embedding_type": "rotary", "rope_theta": o.rotary_base,
        "token_dropout": o.token_dropout, "layer_norm_eps": o.norm_eps, "hidden_act": "gelu",
        "emb_layer_norm_before": False, "tie_word_embeddings": True,
        "hidden_dropout_prob": o.dropout, "attention_probs_dropout_prob": o.attention_dropout,
    }  # fmt: skip


def _is_half(tensors: Tensors, base: float, size: int) -> bool:
    """Returns whether the stored angles are rounded to float16; UserError for other values.

    transformers uses the stored values, not the formula.
    """
    name = next((name for name in ANGLES if name in tensors), None)
    if name is None:
        return False
    stored = np.asarray(tensors.small(name), np.float64)
    for half in (False, True):
        formula = Rope(base, half=half).frequency(size)
        if stored.shape == formula.shape and np.allclose(stored, formula, rtol=1e-6, atol=0):
            return half
    raise UserError(
        f"{tensors.folder}: the rotary frequencies {name!r} are not base^(-2 i / {size}) with "
        f"base rope_theta={base}"
    )
