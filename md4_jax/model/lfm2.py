"""LFM2.5-Encoder-Diffusion: a bidirectional LFM2 (arXiv:2511.23404) as a masked diffusion model.

LiquidAI trained their masked language model LFM2.5-Encoder further on conversations, as a masked
diffusion model. Each token is predicted at its own position.
"""

import re
from collections.abc import Mapping
from typing import Any

from md4_jax.config import files
from md4_jax.model.peer import Peer, agree, check_built, needed, of_masks
from md4_jax.networks.published_lfm2 import HEAD, LAYERS, TABLE, TRUNK, from_lfm2
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

KIND = "lfm2"
# Keys of config.json -> their only supported values.
BUILT = {
    "tie_word_embeddings": True, "tie_embedding": True, "rope_scaling": None, "conv_bias": False,
    "block_use_swiglu": True, "use_pos_enc": True,
}  # fmt: skip
# Default largest length of sequences: that of the encoders' training.
LENGTH = 8192


def peer(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Reads config.json and the shapes of arrays; UserError for unsupported models."""
    if TABLE not in tensors:
        raise UserError(
            f"{tensors.folder} has no array {TABLE!r}. Of the LFM2 models only those are supported "
            "that predict masked tokens (Lfm2BidirectionalForMaskedLM), not the left-to-right "
            "models, embedders and classifiers"
        )
    check_built(told, tensors, BUILT)
    return of_masks(told, tensors, _network(told, tensors), from_lfm2, (TABLE, HEAD), LENGTH)


def _network(told: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Returns the section `network` of the config."""
    size, depth = tensors.shape(TABLE)[1], tensors.count(rf"{re.escape(TRUNK)}layers\.(\d+)\.")
    attention = [n for n in range(depth) if LAYERS.format(n, "self_attn.q_proj.weight") in tensors]
    heads = needed(told, tensors, "num_attention_heads")
    network = {
        **files.shipped("networks").LFM2,
        "name": "lfm2",
        "size": size,
        "depth": depth,
        "hidden": tensors.shape(LAYERS.format(0, "feed_forward.w1.weight"))[0],
        "heads": heads,
        "kv_heads": told.get("num_key_value_heads") or heads,
        "norm_eps": float(told.get("norm_eps", 1e-5)),
        "rotary_base": _base(told, tensors),
        "attention_layers": tuple(attention),
    }
    agree(told, tensors, hidden_size=size, num_hidden_layers=depth, num_heads=heads)
    network |= _heads(tensors, attention, network) | _width(tensors, attention, depth)
    kinds = ["full_attention" if n in attention else "conv" for n in range(depth)]
    for key, found in (("layer_types", kinds), ("full_attn_idxs", attention)):
        if told.get(key) not in (None, found):
            raise UserError(
                f"{tensors.folder}: config.json says {key}={told[key]}, but the arrays are those "
                f"of {found}"
            )
    if "convolution_width" in network:
        agree(told, tensors, conv_L_cache=network["convolution_width"])
    return network


def _heads(tensors: Tensors, attention: list[int], network: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the size of a head, if it is not size / heads."""
    if not attention:
        return {}
    rows = tensors.shape(LAYERS.format(attention[0], "self_attn.q_proj.weight"))[0]
    each = rows // network["heads"]
    return {} if each * network["heads"] == network["size"] else {"head_dim": each}


def _width(tensors: Tensors, attention: list[int], depth: int) -> dict[str, Any]:
    """Returns the width of the convolutions, if there are any."""
    rest = [n for n in range(depth) if n not in attention]
    if not rest:
        return {}
    return {"convolution_width": tensors.shape(LAYERS.format(rest[0], "conv.conv.weight"))[2]}


def _base(told: Mapping[str, Any], tensors: Tensors) -> float:
    """Returns the base of rotary positions; transformers 5 stores it in `rope_parameters`."""
    rope = told.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise UserError(
            f"{tensors.folder}: config.json says rope_parameters={rope!r}; only the rope_type "
            "'default' is supported"
        )
    return float(rope.get("rope_theta", told.get("rope_theta", 1_000_000.0)))
