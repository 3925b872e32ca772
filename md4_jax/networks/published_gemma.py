"""Conversion of the parameters of published DiffusionGemma models to those of `DiffusionGemma`.

As in `published`, functions only rename, transpose and slice arrays.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from md4_jax.networks.linear import rounded
from md4_jax.networks.published import Arrays, Put, blocks, in_memory, nested, padded_rows
from md4_jax.protocols import Params

DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
MATRICES = {
    "attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj", "attention/out": "self_attn.o_proj",
    "feed_forward/gate": "mlp.gate_proj", "feed_forward/up": "mlp.up_proj",
    "feed_forward/down": "mlp.down_proj", "experts/router": "router.proj",
}  # fmt: skip
NORMS = {
    "attention/query_norm": "self_attn.q_norm", "attention/key_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_out_norm": "post_feedforward_layernorm",
    "dense_out_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_out_norm": "post_feedforward_layernorm_2",
}  # fmt: skip


def trunk_of(arrays: Mapping[str, Any]) -> str:
    """Returns the prefix of the names of the layers.

    Encoder and decoder share layers; a checkpoint may store them under one of two names, or both.
    """
    return DECODER if f"{DECODER}embed_tokens.weight" in arrays else ENCODER


def from_diffusion_gemma(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts transformers' DiffusionGemmaForBlockDiffusion, without its image encoder.

    Gate and up matrices of the experts are stacked in one array. Global layers use keys as values.
    """
    trunk, width = trunk_of(arrays), options.expert_hidden
    gives = {
        f"{ours}/kernel": lambda a, x=theirs: a(f"{x}.weight").T
        for ours, theirs in MATRICES.items()
    }
    gives |= {
        f"{ours}/scale": lambda a, x=theirs: a(f"{x}.weight") for ours, theirs in NORMS.items()
    }
    both = "experts.gate_up_proj"
    gives |= {
        "experts/router/scale": lambda a: a("router.scale"),
        "experts/router/expert_scale": lambda a: a("router.per_expert_scale"),
        "experts/experts_gate/kernel": lambda a: np.swapaxes(a(both)[:, :width], 1, 2),
        "experts/experts_up/kernel": lambda a: np.swapaxes(a(both)[:, width:], 1, 2),
        "experts/experts_down/kernel": lambda a: np.swapaxes(a("experts.down_proj"), 1, 2),
    }
    found = blocks(arrays, trunk + "layers.{}.{}", gives, options)
    for number in range(options.depth):
        if not options.is_near(number):
            del found[f"blocks_{number}/attention/value/kernel"]
    rows = rounded(options.vocab_size)
    found["embedding"] = lambda: padded_rows(arrays[f"{trunk}embed_tokens.weight"], rows)
    found["final_norm/scale"] = lambda: arrays[f"{trunk}norm.weight"]
    signal = f"{DECODER}self_conditioning."
    found["self_conditioning/signal_norm/scale"] = lambda: arrays[f"{signal}pre_norm.weight"]
    for name in ("gate", "up", "down"):
        found[f"self_conditioning/feed_forward/{name}/kernel"] = lambda n=name: (
            arrays[f"{signal}{n}_proj.weight"].T
        )
    for name, prefix in (("encoder_scales", ENCODER), ("decoder_scales", DECODER)):
        found[name] = lambda p=prefix: np.concatenate(
            [arrays[f"{p}layers.{n}.layer_scalar"] for n in range(options.depth)]
        )
    return nested(found, put)
