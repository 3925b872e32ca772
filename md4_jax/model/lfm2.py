"""LFM2 (arXiv:2511.23404): left-to-right models, encoders, and a masked diffusion model.

LiquidAI made the encoders LFM2.5-Encoder, which see both sides, of their left-to-right models, and
trained one further on conversations: LFM2.5-Encoder-Diffusion. Each token is predicted at its own
position.
"""

import re
from collections.abc import Mapping
from typing import Any

from md4_jax.config import files
from md4_jax.model.peer import Peer, agree, check_built, from_the_left, needed, of_masks
from md4_jax.networks.published_lfm2 import (
    CAUSAL,
    ENCODER,
    HEAD,
    LAYERS,
    TABLE,
    from_lfm2,
    trunk_of,
)
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

KIND = "lfm2"
# Classes: of a left-to-right model, and of a model that predicts masked tokens.
LEFT_TO_RIGHT, MASKED = "Lfm2ForCausalLM", "Lfm2BidirectionalForMaskedLM"
# Keys of config.json -> their only supported values.
BUILT = {
    "tie_word_embeddings": True, "tie_embedding": True, "rope_scaling": None, "conv_bias": False,
    "block_use_swiglu": True, "use_pos_enc": True,
}  # fmt: skip
# Default largest length of sequences: that of the encoders' training.
LENGTH = 8192


def peer(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Reads config.json and the shapes of arrays; UserError for unsupported models."""
    trunk, named = trunk_of(tensors), set(told.get("architectures") or ())
    is_causal = trunk == CAUSAL
    if trunk is None or (is_causal and not named <= {LEFT_TO_RIGHT}):
        raise UserError(
            f"{tensors.folder} has no array {ENCODER + TABLE!r}. Of the LFM2 models only those are "
            f"supported that predict masked tokens ({MASKED}), and the left-to-right models "
            f"({LEFT_TO_RIGHT}), but no embedders, classifiers and other classes"
        )
    check_built(told, tensors, BUILT)
    tables = trunk + TABLE, HEAD
    found = of_masks(told, tensors, _network(told, tensors, trunk), from_lfm2, tables, LENGTH)
    if not is_causal:
        return found
    # Its head is always tied.
    found = found._replace(told_of=told_of, renamed=renamed, head="")
    return from_the_left(found, told, tensors)


def told_of(
    told: Mapping[str, Any], kind: str, *, shifted: bool, block: int, context: bool
) -> dict[str, Any]:
    """Returns the config.json of a masked diffusion model that was made of a left-to-right one."""
    del kind, shifted, block, context  # which this network does not have
    found = {key: value for key, value in told.items() if key != "auto_map"}
    return found | {"architectures": [MASKED]}


def renamed(name: str) -> str:
    """Returns the name that an array of a left-to-right model has in an encoder."""
    return ENCODER + name.removeprefix(CAUSAL) if name.startswith(CAUSAL) else name


def _network(told: Mapping[str, Any], tensors: Tensors, trunk: str) -> dict[str, Any]:
    """Returns the section `network` of the config."""
    size, layers = tensors.shape(trunk + TABLE)[1], trunk + LAYERS
    depth = tensors.count(rf"{re.escape(trunk)}layers\.(\d+)\.")
    attention = [n for n in range(depth) if layers.format(n, "self_attn.q_proj.weight") in tensors]
    heads = needed(told, tensors, "num_attention_heads")
    network = {
        **files.shipped("networks").LFM2,
        "name": "lfm2",
        "size": size,
        "depth": depth,
        "hidden": tensors.shape(layers.format(0, "feed_forward.w1.weight"))[0],
        "heads": heads,
        "kv_heads": told.get("num_key_value_heads") or heads,
        "norm_eps": float(told.get("norm_eps", 1e-5)),
        "rotary_base": _base(told, tensors),
        "attention_layers": tuple(attention),
    }
    agree(told, tensors, hidden_size=size, num_hidden_layers=depth, num_heads=heads)
    network |= _heads(tensors, layers, network) | _width(tensors, layers, network)
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


def _heads(tensors: Tensors, layers: str, network: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the size of a head, if it is not size / heads. layers: form of the names."""
    if not network["attention_layers"]:
        return {}
    first = network["attention_layers"][0]
    rows = tensors.shape(layers.format(first, "self_attn.q_proj.weight"))[0]
    each = rows // network["heads"]
    return {} if each * network["heads"] == network["size"] else {"head_dim": each}


def _width(tensors: Tensors, layers: str, network: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the width of the convolutions, if there are any."""
    rest = set(range(network["depth"])) - set(network["attention_layers"])
    if not rest:
        return {}
    return {"convolution_width": tensors.shape(layers.format(min(rest), "conv.conv.weight"))[2]}


def _base(told: Mapping[str, Any], tensors: Tensors) -> float:
    """Returns the base of rotary positions; transformers 5 stores it in `rope_parameters`."""
    rope = told.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise UserError(
            f"{tensors.folder}: config.json says rope_parameters={rope!r}; only the rope_type "
            "'default' is supported"
        )
    return float(rope.get("rope_theta", told.get("rope_theta", 1_000_000.0)))
