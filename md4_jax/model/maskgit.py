"""Halton-MaskGIT (arXiv:2503.17076) as a masked diffusion model of images with classes.

Its file has no settings: all but the number of heads follow from the arrays.
"""

import math
from collections.abc import Mapping
from typing import Any

from md4_jax.data.codes import CodeDomain, found_autoencoder
from md4_jax.model.peer import Peer, agree, lacks
from md4_jax.networks.published_maskgit import (
    HEAD,
    LABELS,
    LAYER,
    POSITIONS,
    REGISTERS,
    TABLE,
    from_maskgit,
)
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.tensors import Tensors

KIND = "maskgit"
FIRST = LAYER.format(0, "attn.wq.weight")
# Width -> number of heads, of the published sizes tiny, small, base, large and xlarge.
HEADS = {384: 6, 512: 6, 768: 12, 1024: 16, 1152: 16}
# Keys of the network that are the same for all.
FIXED = dict(
    feed_forward="swiglu", norm="rms", norm_eps=1e-5, norm_parameters="scale", qk_norm=True,
    head_bias=True, tied=True, time_conditioning=False, initial="torch", label_dropout=0.1,
)  # fmt: skip
FOLDER, FILE = "autoencoder", "vq_ds16_c2i.pt"
PUBLISHED = f"hf:FoundationVision/LlamaGen/{FILE}"


def is_one(tensors: Tensors) -> bool:
    """Returns whether the arrays are those of this network."""
    return all(name in tensors for name in (FIRST, LABELS, TABLE))


def peer(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Reads the shapes of arrays; UserError for an unknown number of heads."""
    if "in_proj.weight" in tensors:
        raise UserError(
            f"{tensors.folder} has a layer before the transformer that joins codes (in_proj, "
            "proj above 1), which is not supported: none of the published models has it"
        )
    rows, size = tensors.shape(TABLE)
    heads = told.get("n_heads", HEADS.get(size))
    if heads is None:
        raise lacks(tensors, "n_heads")
    width, length = tensors.shape(FIRST)[0], tensors.shape(POSITIONS)[0]
    agree(told, tensors, vocab_size=rows)
    if width % heads or math.isqrt(length) ** 2 != length:
        raise UserError(
            f"{tensors.folder} has {width} features of all heads and {length} positions, which do "
            f"not fit {heads} heads and a square image"
        )
    network = {
        **FIXED,
        "name": KIND, "size": size, "heads": heads, "positions": length,
        "head_dim": width // heads if width != size else 0,
        "depth": tensors.count(r"transformer\.layers\.(\d+)\."),
        "hidden": tensors.shape(LAYER.format(0, "ff.w1.weight"))[0],
        "classes": tensors.shape(LABELS)[0] - 1,
        "registers": tensors.shape(REGISTERS)[0] if REGISTERS in tensors else 0,
    }  # fmt: skip
    sections = {
        "network": network,
        "process": {"name": "masking", "schedule": {"name": "linear"}},
        "objective": {"name": "md4"},
        "sample": {"name": "halton", "steps": 32, "randomised": True},
        "data": {
            "name": "images", "autoencoder": _autoencoder(tensors.folder), "labels": True,
            "autoencoder_pixels": "auto", "size": 0, "flip": True, "validation": 0.01, "test": 0.01,
        },
    }  # fmt: skip
    return Peer(
        KIND, length, rows - 1, sections, from_maskgit,
        copied=lambda name: TABLE if name == HEAD else name,
    )  # fmt: skip


def _autoencoder(folder: Any) -> str:
    """Returns the autoencoder beside the model, else the published one."""
    beside = [Place(folder) / name for name in (FOLDER, FILE)]
    return next((str(each) for each in beside if each.exists()), PUBLISHED)


def domain(folder: Place, found: Peer, asked: dict[str, Any]) -> CodeDomain:
    """Makes the domain of codes, and sets `data.size`; UserError for another number of codes."""
    section = asked["data"]
    own = found_autoencoder(section["autoencoder"], section["autoencoder_pixels"])
    if own.codes != found.symbols:
        raise UserError(
            f"data.autoencoder={section['autoencoder']} has {own.codes} codes, but the model in "
            f"{folder} has {found.symbols}: give the autoencoder with which it was trained"
        )
    side = math.isqrt(found.length)
    section["size"] = side * own.factor
    labels = tuple(range(found.sections["network"]["classes"]))
    return CodeDomain((side, side, 1), own.codes, own.sha256, labels, own)
