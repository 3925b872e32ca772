"""Published mixture-of-experts diffusion models: LLaDA-MoE and LLaDA2.

LLaDA-MoE (arXiv:2509.24389) is a LLaDA with experts. LLaDA2 (arXiv:2512.15745) is a block diffusion
model: a token sees all of its own block of 32 tokens and the blocks before it. The network of
LLaDA2.1 is the same. In LLaDA2.2 the tokens of a block share a few of the experts.
"""

import re
from collections.abc import Mapping
from typing import Any

from md4_jax.config import files
from md4_jax.model.peer import UNKNOWN, Peer, agree, check_built, in_blocks, needed, of_masks
from md4_jax.model.told import Told
from md4_jax.networks import published_experts
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

# Row of the mask of both, <|mask|>, which config.json does not name, and their numbers of rows.
MASK, ROWS = 156895, 157184
BLOCK = 32
LENGTH = 4096
LAYER = r"model\.layers\.(\d+)\."
HEAD = "lm_head.weight"
# Keys of config.json -> their only supported values.
BUILT = {"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False}
LLADA_MOE = {
    "attention_bias": False, "clip_qkv": None, "partial_rotary_factor": 1, "norm_topk_prob": False,
    "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax",
    "routed_scaling_factor": 1,
}  # fmt: skip
# Keys of LLaDA2.2 for entries with which its sampler edits texts.
LEVENSHTEIN = ("delete_token_id", "split_token_id")
LLADA2 = {"norm_topk_prob": True, "score_function": "sigmoid"}


def llada_moe(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Reads config.json and the shapes of arrays; UserError for unsupported models."""
    check_built(told, tensors, BUILT | LLADA_MOE)
    network = _network(told, tensors, "self_attn.q_proj", "self_attn.q_norm", "shared_expert")
    agree(told, tensors, expert_intermediate_size=network["expert_hidden"])
    return _peer(told, tensors, network, published_experts.from_lladamoe)


def llada2(told: Told, tensors: Tensors) -> Peer:
    """Reads LLaDA2; blocks have 32 tokens, unless a model that was exported here has others."""
    check_built(told, tensors, BUILT | LLADA2)
    told = told.without("sliding_window")  # which use_sliding_window=False turns off
    bias = "model.layers.0.attention.dense.bias"
    if bias in tensors:
        raise UserError(f"{tensors.folder} has the biases {bias!r}, which are not supported")
    names = "attention.query_key_value", "attention.query_layernorm", "mlp.shared_experts"
    network = _network(told, tensors, *names)
    agree(told, tensors, moe_intermediate_size=network["expert_hidden"])
    network |= {
        "qkv_bias": "model.layers.0.attention.query_key_value.bias" in tensors,
        "rotary_part": float(told.get("partial_rotary_factor", 0.5)),
        "router": "sigmoid", "router_bias": True, "router_normalised": True,
        "router_scale": float(needed(told, tensors, "routed_scaling_factor")),
    }  # fmt: skip
    block = told.get("block_size", BLOCK)
    network |= _choice(told, tensors, block)
    return in_blocks(_peer(told, tensors, network, published_experts.from_llada2), block)


def _choice(told: Told, tensors: Tensors, block: int) -> dict[str, Any]:
    """Returns the keys of the choice of experts: from groups, or in LLaDA2.2 from those of a block.

    The config.json of LLaDA2.2 has groups too, which its code does not use.
    """
    if told.get("expert_capacity"):
        told.without("n_group", "topk_group", *LEVENSHTEIN)
        return {"router_block": block, "router_block_taken": told["expert_capacity"]}
    return {
        "router_groups": needed(told, tensors, "n_group"),
        "router_groups_taken": needed(told, tensors, "topk_group"),
    }


def _peer(told: Mapping[str, Any], tensors: Tensors, network: dict[str, Any], convert: Any) -> Peer:
    tables = _table(tensors), HEAD
    found = of_masks(told, tensors, network, convert, tables, LENGTH)
    is_theirs = found.mask == UNKNOWN and found.symbols == ROWS - 1
    return found._replace(mask=MASK) if is_theirs else found


def _network(
    told: Mapping[str, Any], tensors: Tensors, queries: str, query_norm: str, shared: str
) -> dict[str, Any]:
    """Returns the section of the network. The names are those of arrays of a layer."""
    first = _dense_layers(tensors)
    size, layer = tensors.shape(_table(tensors))[1], f"model.layers.{first}."
    heads = needed(told, tensors, "num_attention_heads")
    kv_heads = told.get("num_key_value_heads") or heads
    each = tensors.shape(f"{layer}{queries}.weight")[0]
    each //= heads + 2 * kv_heads if queries.endswith("query_key_value") else heads
    experts = tensors.count(rf"{LAYER.replace('(', '(?:')}mlp\.experts\.(\d+)\.")
    expert = tensors.shape(f"{layer}mlp.experts.0.gate_proj.weight")[0]
    common = f"{layer}{shared}.gate_proj.weight"
    dense = "model.layers.0.mlp.gate_proj.weight"
    network = {
        **files.shipped("networks").LLADA,
        "size": size,
        "depth": tensors.count(LAYER),
        "hidden": tensors.shape(dense)[0] if first else expert,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 0 if each * heads == size else each,
        "qk_norm": f"{layer}{query_norm}.weight" in tensors,
        "tied": bool(told.get("tie_word_embeddings", False)) or HEAD not in tensors,
        "rotary_base": float(needed(told, tensors, "rope_theta")),
        "norm_eps": float(told.get("rms_norm_eps", 1e-5)),
        "experts": experts,
        "experts_per_token": needed(told, tensors, "num_experts_per_tok"),
        "expert_hidden": expert,
        "shared_hidden": tensors.shape(common)[0] if common in tensors else 0,
        "dense_layers": first,
    }
    agree(
        told, tensors, hidden_size=size, num_hidden_layers=network["depth"], num_experts=experts,
        first_k_dense_replace=first,
    )  # fmt: skip
    return network


def _dense_layers(tensors: Tensors) -> int:
    """Returns the number of layers before those with experts; UserError if dense ones follow."""
    found = (re.match(LAYER + r"mlp\.gate_proj\.", name) for name in tensors)
    dense = {int(match.group(1)) for match in found if match}
    if dense != set(range(len(dense))):
        raise UserError(
            f"{tensors.folder}: the layers {sorted(dense)} have no experts, but only the first "
            "layers may have none"
        )
    return len(dense)


def _table(tensors: Tensors) -> str:
    names = "model.embed_tokens.weight", "model.word_embeddings.weight"
    found = [name for name in names if name in tensors]
    if not found:
        raise UserError(f"{tensors.folder} has no array {' or '.join(names)}")
    return found[0]


# Values of model_type, and what is left of the names of the classes.
KINDS = {"lladamoe": llada_moe} | dict.fromkeys(
    ("llada2_moe", "llada2moe", "llada21_moe", "llada21moe"), llada2
)
