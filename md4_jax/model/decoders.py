"""Models in the layout of transformers' Llama and Qwen, and diffusion models made of them.

Dream (arXiv:2508.15487) was trained on from Qwen2.5 with masks: it sees both sides, and still takes
the logits of a token from the position before it. What dLLM calls A2D sees both sides and takes
them from the token's own position.
"""

from collections.abc import Mapping
from typing import Any

from md4_jax.config import files
from md4_jax.model.peer import UNKNOWN, Peer, agree, lacks, needed
from md4_jax.networks import published
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

CAUSAL = ("qwen2", "qwen3", "llama", "mistral")
MASKED = ("dream", "a2d-qwen2", "a2d-qwen3", "a2d-llama")
KINDS = (*MASKED, *CAUSAL)
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FIRST = "model.layers.0."
# The longest sequences by default: models are trained on as many as 32,768 tokens and more.
LENGTH = 2048
# Keys of config.json -> what they must say, if they are there.
BUILT = {
    "hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}  # fmt: skip


def peer(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Reads config.json and the shapes of the arrays; UserError for what is not known here."""
    _check(told, tensors)
    kind = str(told["model_type"]).lower()
    rows = tensors.shape(TABLE)[0]
    network = _network(told, tensors)
    agree(told, tensors, vocab_size=rows)
    sections = {
        "network": network,
        "process": {"name": "masking", "schedule": {"name": "linear"}},
        "objective": {"name": "md4"},
    }
    length = min(LENGTH, told.get("max_position_embeddings", LENGTH))
    ends = _first(told.get("eos_token_id"))
    tables = tuple(name for name in (TABLE, HEAD) if name in tensors)
    found = Peer(kind, length, rows, sections, published.from_llama, tables=tables, ends=ends)
    if kind in CAUSAL:
        network["causal"] = True
        sections["objective"] = {"name": "autoregressive"}
        sections["sample"] = {"name": "left_to_right"}
        begins = _first(told.get("bos_token_id"))
        if begins is None and ends is None:
            raise lacks(tensors, "bos_token_id")
        return found._replace(begins=ends if begins is None else begins)
    network["shifted"] = kind == "dream" or bool(told.get("right_shift_logits", False))
    return found._replace(symbols=rows - 1, mask=told.get("mask_token_id", UNKNOWN))


def _network(told: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Returns the section of the network."""
    size = tensors.shape(TABLE)[1]
    heads = needed(told, tensors, "num_attention_heads")
    queries = tensors.shape(f"{FIRST}self_attn.q_proj.weight")[0]
    rotary = _rotary(told)
    network = {
        **files.shipped("networks").LLADA,
        "size": size,
        "depth": tensors.count(r"model\.layers\.(\d+)\."),
        "hidden": tensors.shape(f"{FIRST}mlp.gate_proj.weight")[0],
        "heads": heads,
        "kv_heads": told.get("num_key_value_heads") or 0,
        "head_dim": 0 if queries == size else queries // heads,
        "qkv_bias": f"{FIRST}self_attn.q_proj.bias" in tensors,
        "qk_norm": f"{FIRST}self_attn.q_norm.weight" in tensors,
        "tied": bool(told.get("tie_word_embeddings", False)) or HEAD not in tensors,
        "rotary_base": float(told.get("rope_theta") or rotary.get("rope_theta") or 10_000.0),
        "rotary_scaling": _scaling(rotary),
        "norm_eps": float(told.get("rms_norm_eps", 1e-6)),
    }
    depth, hidden = network["depth"], network["hidden"]
    agree(told, tensors, hidden_size=size, num_hidden_layers=depth, intermediate_size=hidden)
    return network


def _check(told: Mapping[str, Any], tensors: Tensors) -> None:
    """Raises UserError for a switch of the architecture that is not known here."""
    for key, value in BUILT.items():
        if told.get(key, value) not in (value, None):
            raise UserError(
                f"{tensors.folder}: config.json says {key}={told[key]!r}; only {value!r} is known"
            )
    form = _form(_rotary(told))
    if form not in ("default", "llama3"):
        raise UserError(
            f"{tensors.folder}: config.json scales rotary positions by {form!r}, which is not "
            "known: only 'llama3' is"
        )
    if told.get("sliding_window") and told.get("use_sliding_window") is not False:
        raise UserError(
            f"{tensors.folder}: config.json says sliding_window={told['sliding_window']}: layers "
            "that see only near tokens are not known"
        )
    for name in ("self_attn.o_proj.bias", "mlp.gate_proj.bias"):
        if FIRST + name in tensors:
            raise UserError(f"{tensors.folder} has biases {FIRST + name!r}, which are not known")


def _rotary(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what config.json says of rotary positions, under either name that it has had."""
    return told.get("rope_scaling") or told.get("rope_parameters") or {}


def _form(rotary: Mapping[str, Any]) -> str:
    return rotary.get("rope_type", rotary.get("type", "default"))


def _scaling(rotary: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns network.rotary_scaling."""
    if _form(rotary) == "default":
        return ()
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return tuple(float(rotary[name]) for name in names)


def _first(found: Any) -> int | None:
    """Returns the first of several ids, or the only one."""
    if isinstance(found, list):
        return found[0] if found else None
    return found
