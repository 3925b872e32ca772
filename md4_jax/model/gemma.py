"""DiffusionGemma (Google, 2026): block diffusion by uniform noise with the layers of Gemma 4.

The image encoder is left out: prompts are text.
"""

from collections.abc import Mapping
from typing import Any

from md4_jax.model.peer import Peer, agree, first, needed
from md4_jax.model.told import Told
from md4_jax.networks.published_gemma import DECODER, ENCODER, from_diffusion_gemma, trunk_of
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

KIND = "diffusion_gemma"
# Keys of config.json's `text_config` -> their only supported values.
BUILT = {
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
# Options of single layers, whose values are found from the arrays.
PER_LAYER = {"head_dim", "num_key_value_heads"}
NEAR, ALL = "sliding_attention", "full_attention"
# Defaults of transformers for keys that config.json does not have.
ROTARY = {
    NEAR: {"rope_type": "default", "rope_theta": 10_000.0},
    ALL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
CANVAS, CAP, WINDOW = 256, 30.0, 512
# Keys of the image encoder, and one that text_config has too.
UNUSED = ("vision_config", "boi_token_id", "eoi_token_id", "image_token_id", "tie_word_embeddings")
# Arrays of the image encoder.
IMAGES = r"model\.encoder\.(vision_tower|embed_vision)\..*"
# Default largest length of sequences; the model supports far longer ones.
LENGTH = 4096
# How the published code samples: the temperature falls from 0.8 to 0.4.
SAMPLE = {
    "name": "entropy_bound", "steps": 48, "temperature": 0.8, "cooling": 0.5, "entropy_bound": 0.1,
    "stability_threshold": 1, "confidence_threshold": 0.005,
}  # fmt: skip


def peer(told: Told, tensors: Tensors) -> Peer:
    """Reads config.json and the shapes of arrays; UserError for unsupported models."""
    needed(told, tensors, "text_config")
    text = told.within("text_config")
    for key in ("final_logit_softcapping", "sliding_window"):
        if text.get(key, 0) is None:
            raise UserError(
                f"{tensors.folder}: config.json says text_config.{key}=null, which is not "
                "supported: it must be a number"
            )
    text = text.known()
    for key, value in BUILT.items():
        if text.get(key, value) != value:
            raise UserError(
                f"{tensors.folder}: config.json says text_config.{key}={text[key]!r}; only "
                f"{value!r} is supported"
            )
    _check_attention(text, tensors)
    for name in (f"{DECODER}self_conditioning.pre_norm.weight", *_scales()):
        if name not in tensors:
            raise UserError(
                f"{tensors.folder} has no array {name!r}, which every DiffusionGemma has"
            )
    trunk = trunk_of(tensors)
    symbols = tensors.shape(f"{trunk}embed_tokens.weight")[0]
    agree(text, tensors, vocab_size=symbols)
    canvas = told.without(*UNUSED).get("canvas_length") or CANVAS
    sections = {
        "network": _network(text, tensors, trunk),
        "process": {
            "name": "uniform", "schedule": {"name": "linear"}, "parametrisation": "mixture",
        },
        "objective": {"name": "cross_entropy", "block": canvas},
        "sample": dict(SAMPLE),
    }  # fmt: skip
    longest = min(LENGTH, text.get("max_position_embeddings", LENGTH))
    return Peer(
        KIND, longest - longest % canvas, symbols, sections, from_diffusion_gemma,
        "google/diffusiongemma-26B-A4B-it", ends=first(text.get("eos_token_id")), eot="<eos>",
        copied=_copied, buffers=IMAGES, doubled=True,
    )  # fmt: skip


def _check_attention(text: Told, tensors: Tensors) -> None:
    """Raises UserError for an encoder that is not causal, or layers with options of their own."""
    if text.get("use_bidirectional_attention") == "all":
        raise UserError(
            f"{tensors.folder}: config.json says text_config.use_bidirectional_attention='all'; "
            "only encoders that read text from left to right are supported"
        )
    for layer, options in (text.get("per_layer_config") or {}).items():
        if odd := options.keys() - PER_LAYER:
            raise UserError(
                f"{tensors.folder}: config.json says text_config.per_layer_config.{layer}="
                f"{options}, in which {min(odd)} is not supported"
            )


def _copied(name: str) -> str:
    """Returns the array of which one of the encoder, or of the head, is a copy."""
    if name == "lm_head.weight":
        return f"{DECODER}embed_tokens.weight"
    return name.replace(ENCODER, DECODER, 1) if name.startswith(ENCODER) else name


def _scales() -> tuple[str, str]:
    return tuple(f"{prefix}layers.0.layer_scalar" for prefix in (DECODER, ENCODER))


def _network(text: Mapping[str, Any], tensors: Tensors, trunk: str) -> dict[str, Any]:
    """Returns the section `network` of the config."""
    layers, escaped = f"{trunk}layers.", trunk.replace(".", r"\.")
    depth = tensors.count(rf"{escaped}layers\.(\d+)\.")
    every = _global_every(text, tensors, depth)
    near, everywhere = f"{layers}0.self_attn.", f"{layers}{every - 1}.self_attn."
    head_dim, global_head_dim = (
        tensors.shape(f"{prefix}q_norm.weight")[0] for prefix in (near, everywhere)
    )
    size = tensors.shape(f"{trunk}embed_tokens.weight")[1]
    heads = tensors.shape(f"{near}q_proj.weight")[0] // head_dim
    experts, width, _ = tensors.shape(f"{layers}0.experts.gate_up_proj")
    hidden = tensors.shape(f"{layers}0.mlp.gate_proj.weight")[0]
    local, whole = _rotary(text, tensors)
    agree(
        text, tensors, hidden_size=size, num_hidden_layers=depth, num_attention_heads=heads,
        intermediate_size=hidden, num_experts=experts, moe_intermediate_size=width // 2,
    )  # fmt: skip
    return {
        "name": KIND,
        "size": size,
        "depth": depth,
        "heads": heads,
        "kv_heads": tensors.shape(f"{near}k_proj.weight")[0] // head_dim,
        "head_dim": head_dim,
        "global_kv_heads": tensors.shape(f"{everywhere}k_proj.weight")[0] // global_head_dim,
        "global_head_dim": global_head_dim,
        "window": text.get("sliding_window", WINDOW),
        "global_every": every,
        "hidden": hidden,
        "experts": experts,
        "experts_per_token": needed(text, tensors, "top_k_experts"),
        "expert_hidden": width // 2,
        "local_base": float(local["rope_theta"]),
        "rotary_base": float(whole["rope_theta"]),
        "rotary_part": float(whole.get("partial_rotary_factor", 1.0)),
        "cap": float(text.get("final_logit_softcapping", CAP)),
        "norm_eps": float(text.get("rms_norm_eps", 1e-6)),
    }


def _global_every(text: Mapping[str, Any], tensors: Tensors, depth: int) -> int:
    """Returns global_every, from the arrays: every global_every-th layer is global.

    Global layers have no value matrix. UserError for layers in another order.
    """
    prefix = f"{trunk_of(tensors)}layers."
    seeing_all = [n for n in range(depth) if f"{prefix}{n}.self_attn.v_proj.weight" not in tensors]
    every = seeing_all[0] + 1 if seeing_all else 0
    kinds = text.get("layer_types") or [ALL if n in seeing_all else NEAR for n in range(depth)]
    regular = every > 1 and seeing_all == list(range(every - 1, depth, every))
    if not regular or kinds != [ALL if n in seeing_all else NEAR for n in range(depth)]:
        raise UserError(
            f"{tensors.folder}: config.json says layer_types={kinds}, and the layers {seeing_all} "
            f"of {depth} have no v_proj. Only models in which every n-th layer has {ALL} and no "
            "v_proj are supported"
        )
    return every


def _rotary(
    text: Mapping[str, Any], tensors: Tensors
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns the options of rotary positions of local and of global layers."""
    told = text.get("rope_parameters") or ROTARY
    found = tuple(told.get(kind, ROTARY[kind]) for kind in (NEAR, ALL))
    for kind, rope in zip((NEAR, ALL), found, strict=True):
        odd = rope.get("factor", 1.0) != 1.0 or (
            kind == NEAR and rope.get("partial_rotary_factor", 1.0) != 1.0
        )
        if odd or rope.get("rope_type", "default") != ROTARY[kind]["rope_type"]:
            raise UserError(
                f"{tensors.folder}: config.json says rope_parameters.{kind}={dict(rope)}, which "
                f"is not supported: except for the numbers it must be {ROTARY[kind]}"
            )
    return found
