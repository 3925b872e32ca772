"""Models in the layout of transformers' Llama and Qwen, and diffusion models adapted from them.

Dream (arXiv:2508.15487) is a masked model adapted from Qwen2.5: it is bidirectional, and computes
the logits of a token at the previous position. dLLM's A2D models are bidirectional and compute them
at the token's own position.

SDAR (arXiv:2510.06303) and Fast-dLLM v2 (arXiv:2509.26328) are block diffusion models: a block sees
itself and earlier blocks. SDAR was adapted from Qwen3, with logits at the token's own position, and
Fast-dLLM v2 from Qwen2.5, with logits at the previous position. Qwen3 and SDAR also have
mixture-of-experts versions.

RND1 was adapted from Qwen3 with experts, and CoDA (Salesforce, 2025) from Qwen3. They are
bidirectional, with logits at the previous position.

DiffuLLaMA (arXiv:2410.17891) was adapted from Llama 2. It is bidirectional, with logits at the
previous position. Its class DiscreteDiffusionModel has its own names of arrays; a DiffuLLaMA may
also be stored as a Llama.

Nemotron-Labs-Diffusion (arXiv:2607.05722) is block diffusion adapted from Ministral 3, without a
shift. It was also trained from left to right: attention among clean tokens is causal, so that the
same parameters are also a causal model.

Stable-DiffCoder (ByteDance Seed, 2026) is block diffusion like SDAR, adapted from Seed-Coder, a
Llama. So is DreamReasoner (arXiv:2606.19257), adapted from Qwen3: it is no Dream, whose name its
config.json has, since its logits are at the token's own position.

iLLaDA (arXiv:2606.25331) is a masked model that was trained from scratch, in the layout of a Llama:
bidirectional, with logits at the token's own position. So is EuroBERT (arXiv:2503.05500).

I-DLM (arXiv:2604.11035) has the config.json of an SDAR and `use_regular_causal`. Its attention is
causal, so that it is read as the left-to-right model that its sampler draws from.

WeDLM (arXiv:2512.22737) was adapted from Qwen2.5 and Qwen3, without a shift. Its attention is
causal along an order in which all tokens come before all masks.

SDLM (arXiv:2509.24007) was adapted from Qwen2.5. It predicts next tokens from windows of a token
and masks, which follow a causal prefix. Its config.json is that of a Qwen2, with a mask for texts.

Open-dLLM's models (Open-dCoder) were adapted from Qwen2.5 like Dream. Their config.json is that of
a Qwen2, but their tokenizer has a mask.
"""

import re
from collections.abc import Mapping
from typing import Any

from md4_jax.config import files
from md4_jax.model import causal_classes, dreamon, rotary
from md4_jax.model.peer import (
    Peer,
    agree,
    check_built,
    from_the_left,
    in_an_order,
    in_blocks,
    needed,
    of_masks,
)
from md4_jax.model.told import Told
from md4_jax.networks import published, published_experts
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

NEMOTRON, DIFFCODER = "nemotron_labs_diffusion", "stable_diffcoder"
OPEN_DLLM, WEDLM, CODA, SDLM = "open_dllm", "wedlm", "coda", "sdlm"
ILLADA, REASONER, EUROBERT = "illada", "dream_reasoner", "eurobert"
CAUSAL = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "ministral3")
BLOCKWISE = ("sdar", "sdar_moe", "fast_dllm_qwen", NEMOTRON, DIFFCODER, REASONER)
A2D = ("a2d-qwen2", "a2d-qwen3", "a2d-qwen3_moe", "a2d-llama", "a2d-ministral3")
MASKED = ("dream", "dreamon", OPEN_DLLM, WEDLM, CODA, SDLM, "rnd1", "diffullama", ILLADA)
MASKED += (EUROBERT, *A2D, *BLOCKWISE)
KINDS = (*MASKED, *CAUSAL)
SHIFTED = ("dream", "dreamon", OPEN_DLLM, CODA, "rnd1", "fast_dllm_qwen", "diffullama")
# Classes in `architectures` of config.json that have the model_type of a Llama.
DIFFULLAMA = "DiscreteDiffusionModel"
CLASSES = {DIFFULLAMA: "diffullama", "StableDiffcoderForCausalLM": DIFFCODER}
# Defaults of these models' code for keys that config.json does not have.
IMPLIED = {
    "dreamon": {"mask_token_id": 151_666, dreamon.KEY: 151_667},
    "rnd1": {"mask_token_id": 151_669},
    CODA: {"mask_token_id": 151_669, "rope_theta": 1e6},
    "sdar": {"block_size": 4, "mask_token_id": 151_669},
    "sdar_moe": {"block_size": 4, "mask_token_id": 151_669},
    "fast_dllm_qwen": {"bd_size": 32, "mask_token_id": 151_665},
    "diffullama": {"mask_token_id": 811},
    WEDLM: {"mask_token_id": 151_665},
    DIFFCODER: {"block_size": 4, "mask_token_id": 5},
    ILLADA: {"mask_token_id": 5},
    NEMOTRON: {"block_size": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    **{kind: {"rms_norm_eps": 1e-5} for kind in ("ministral3", "a2d-ministral3", EUROBERT)},
}
# Key of SDLM's config.json for the mask.
SDLM_MASK = "text_mask_token_id"
# Key of I-DLM's config.json for causal attention.
IDLM = "use_regular_causal"
# Values of dlm_paradigm in a Nemotron's config.json: how it is trained, or read.
LEFT_TO_RIGHT = "autoregressive"
PARADIGMS = ("bidirectional", "block_diff", LEFT_TO_RIGHT)
# Kinds whose layout of arrays is that of another kind.
BASES = {
    "dream": "qwen2", "dreamon": "qwen2", "fast_dllm_qwen": "qwen2", "sdar": "qwen3",
    "sdar_moe": "qwen3_moe", "rnd1": "qwen3_moe", "mistral": "llama", "diffullama": "llama",
    NEMOTRON: "ministral3", DIFFCODER: "llama", OPEN_DLLM: "qwen2", CODA: "qwen3",
    SDLM: "qwen2", ILLADA: "llama", REASONER: "qwen3", EUROBERT: "llama",
}  # fmt: skip
# Layout, whether logits are shifted, whether there are blocks -> model_type; others are A2D models.
NAMES = {
    ("qwen2", True, False): "Dream",
    ("qwen2", True, True): "Fast_dLLM_Qwen",
    ("qwen3", False, True): "sdar",
    ("qwen3_moe", False, True): "sdar_moe",
    ("qwen3_moe", True, False): "rnd1",
    ("llama", True, False): "diffullama",
}
EXPERTS = r"model\.layers\.(?:\d+)\.mlp\.experts\.(\d+)\."
# Default largest length of sequences; models are trained on 32,768 tokens and more.
LENGTH = 2048
# Keys of config.json -> their only supported values.
BUILT = {
    "hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False,
    "partial_rotary_factor": 1.0, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "causal_attn": False, "layer_norm_eps": None,
}  # fmt: skip


def peer(told: Told, tensors: Tensors) -> Peer:
    """Reads config.json and the shapes of arrays; UserError for unsupported models."""
    _check(told, tensors)
    kind = kind_by_class(told, tensors) or str(told.get("model_type", "")).lower()
    told = told.over(IMPLIED.get(kind, {}))
    names = published.llama_names(tensors)
    if kind == "diffullama":  # its code takes the rows from its tokenizer
        told = told.without("vocab_size")
    if kind == SDLM and SDLM_MASK in told:
        told = told | {"mask_token_id": told[SDLM_MASK]}
    if kind == CODA:
        told = _untied(told, tensors, names)
    network = _network(told, tensors, names) | rotary.keys_of(told, tensors, base_of(kind))
    # Qwen3's layers of experts have the same names as those of LLaDA-MoE.
    convert = published_experts.from_lladamoe if network["experts"] else published.from_llama
    found = of_masks(told, tensors, network, convert, (names.table, names.head), LENGTH)
    found = found._replace(told_of=told_of)
    if kind in CAUSAL:
        found = found._replace(unread=causal_classes.checked(told, tensors))
    if kind in CAUSAL or told.get("dlm_paradigm") == LEFT_TO_RIGHT or told.get(IDLM):
        told.without(block_key(kind))
        return from_the_left(found, told, tensors)
    if kind == WEDLM:
        return in_an_order(found, {"name": "wedlm"}, {"name": "streaming"})
    if kind == SDLM:
        size = told.get("block_size", 4)
        found = found._replace(told_of=None)
        sample = {"name": "longest_prefix", "width": size}
        return in_an_order(found, {"name": "sdlm", "block_size": size}, sample)
    network["shifted"] = bool(told.get("right_shift_logits", kind in SHIFTED))
    block = told.get(block_key(kind))
    if block is None:
        return dreamon.resizing(found, told, tensors)
    network["causal_context"] = bool(told.get("causal_context", kind == NEMOTRON))
    return in_blocks(found, block)


def kind_by_class(told: Mapping[str, Any], tensors: Tensors) -> str:
    """Returns the kind implied by the class in config.json, array names, or a mask; "": none."""
    names = published.llama_names(tensors)
    if names.trunk == published.DIFFUSION:
        return "diffullama"
    if told.get("model_type") == "qwen2" and {SDLM_MASK, "causal_attn"} & told.keys():
        return SDLM
    if told.get("model_type") == "qwen2" and told.get("mask_token_id") is not None:
        return OPEN_DLLM
    if str(told.get("model_type")).lower() == "dream" and told.get("block_size") is not None:
        return REASONER
    found = (CLASSES.get(name) for name in told.get("architectures") or [])
    return next(filter(None, found), "") if names.table in tensors else ""


def base_of(kind: str) -> str:
    """Returns the kind that defines the layout of a kind's arrays."""
    base = kind.removeprefix("a2d-")
    return BASES.get(base, base)


def block_key(kind: str) -> str:
    """Returns the key of config.json for the block size."""
    return "bd_size" if kind == "fast_dllm_qwen" else "block_size"


def told_of(
    told: Mapping[str, Any], kind: str, *, shifted: bool, block: int, context: bool
) -> dict[str, Any]:
    """Returns the config.json of a diffusion model that was adapted from a model of another kind.

    told     config.json of the other model
    block    number of tokens of a block; 0: the model reads whole texts
    context  network.causal_context

    A DiffuLLaMA stays one, whose arrays may have names of its own, and so does a Nemotron or a
    Stable-DiffCoder that still is what its authors' code computes.
    """
    base, context = base_of(kind), context and block > 0
    name = f"a2d-{base}" if context else NAMES.get((base, shifted, block > 0), f"a2d-{base}")
    stays = kind == NEMOTRON and context and not shifted
    stays = stays or (kind == DIFFCODER and block > 0 and not (context or shifted))
    name = kind if stays or kind == "diffullama" else name
    left = ["right_shift_logits", "block_size", "bd_size", "causal_context", "dlm_paradigm", IDLM]
    if name.lower() != kind:  # another project's code
        left += ["architectures", "auto_map"]
    found = {key: value for key, value in told.items() if key not in left}
    found["model_type"] = name
    if kind == CODA != name:  # others tie the head where config.json says so
        found["tie_word_embeddings"] = False
    if name in CLASSES.values():
        own = next(key for key, kind in CLASSES.items() if kind == name)
        found |= {"model_type": "llama", "architectures": [own]}
    if shifted != (name.lower() in SHIFTED):
        found["right_shift_logits"] = shifted
    if block:
        found[block_key(name.lower())] = block
    if name == NEMOTRON:
        found["dlm_paradigm"] = PARADIGMS[0]
    elif context:
        found["causal_context"] = True
    return found


def _untied(told: Told, tensors: Tensors, names: published.LlamaNames) -> Told:
    """Returns config.json of a CoDA, whose code never ties the head; UserError if there is none."""
    if names.head not in tensors:
        raise UserError(
            f"{tensors.folder} has no {names.head!r}: CoDA's code reads it, and has no tied head"
        )
    return told.without("tie_word_embeddings")


def _network(
    told: Mapping[str, Any], tensors: Tensors, names: published.LlamaNames
) -> dict[str, Any]:
    """Returns the section `network` of the config, without keys of positions."""
    size, first = tensors.shape(names.table)[1], f"{names.trunk}layers.0."
    heads = needed(told, tensors, "num_attention_heads")
    queries = tensors.shape(f"{first}self_attn.q_proj.weight")[0]
    network = {
        **files.shipped("networks").LLADA,
        "size": size,
        "depth": tensors.count(rf"{re.escape(names.trunk)}layers\.(\d+)\."),
        **_feed_forward(told, tensors, first),
        "heads": heads,
        "kv_heads": told.get("num_key_value_heads") or 0,
        "head_dim": 0 if queries == size else queries // heads,
        "qkv_bias": f"{first}self_attn.q_proj.bias" in tensors,
        "qk_norm": f"{first}self_attn.q_norm.weight" in tensors,
        "tied": bool(told.get("tie_word_embeddings", False)) or names.head not in tensors,
        "norm_eps": float(told.get("rms_norm_eps", 1e-6)),
    }
    agree(told, tensors, hidden_size=size, num_hidden_layers=network["depth"])
    return network


def _feed_forward(told: Mapping[str, Any], tensors: Tensors, first: str) -> dict[str, Any]:
    """Returns the keys of the network's feed-forward layers, dense or with experts.

    first: prefix of the names of the first layer's arrays
    """
    count = tensors.count(EXPERTS)
    if not count:
        hidden = tensors.shape(f"{first}mlp.gate_proj.weight")[0]
        agree(told, tensors, intermediate_size=hidden)
        return {"hidden": hidden, "experts": 0}
    hidden = tensors.shape(f"{first}mlp.experts.0.gate_proj.weight")[0]
    agree(told, tensors, num_experts=count, moe_intermediate_size=hidden)
    return {
        "hidden": hidden,
        "experts": count,
        "experts_per_token": needed(told, tensors, "num_experts_per_tok"),
        "expert_hidden": hidden,
        "router_normalised": bool(needed(told, tensors, "norm_topk_prob")),
    }


def _check(told: Mapping[str, Any], tensors: Tensors) -> None:
    """Raises UserError for unsupported options of the architecture."""
    check_built(told, tensors, BUILT)
    if told.get("dlm_paradigm", PARADIGMS[0]) not in PARADIGMS:
        raise UserError(
            f"{tensors.folder}: config.json says dlm_paradigm={told['dlm_paradigm']!r}; only "
            f"{', '.join(PARADIGMS)} are supported"
        )
    kinds = set(told.get("layer_types") or ()) - {"full_attention"}
    if kinds or (told.get("sliding_window") and told.get("use_sliding_window") is not False):
        raise UserError(
            f"{tensors.folder}: config.json says sliding_window={told.get('sliding_window')} and "
            f"layer_types={told.get('layer_types')}: layers with a sliding window are not supported"
        )
    first = published.llama_names(tensors)[0] + "layers.0."
    for name in ("self_attn.o_proj.bias", "mlp.gate_proj.bias"):
        if first + name in tensors:
            raise UserError(
                f"{tensors.folder} has the biases {first + name!r}, which are not supported"
            )
