"""Keys that runs of older versions do not have, or have under other names."""

from collections.abc import Mapping
from typing import Any

# Keys that older runs and short configs leave out -> their default.
ADDED = {
    "data.chat_template": "",
    "data.detokenise": "",
    "data.padding": "hidden",
    "data.turns": "all",
    "data.windows": "grid",
    "network.attention_dropout": 0.0,
    "network.balance": 0.0,
    "network.causal_context": False,
    "network.classes": 0,
    "network.condition": 0,
    "network.dense_layers": 0,
    "network.dropout": 0.0,
    "network.dropout_shared": False,
    "network.embedding": 0,
    "network.embedding_dropout": 0.0,
    "network.expert_hidden": 0,
    "network.experts": 0,
    "network.experts_per_token": 2,
    "network.feed_forward": "swiglu",
    "network.edits": False,
    "network.gaps": False,
    "network.head_bias": True,
    "network.head_dim": 0,
    "network.initial": "lecun",
    "network.input": "embedding",
    "network.kv_heads": 0,
    "network.label_dropout": 0.0,
    "network.lora_alpha": 16.0,
    "network.lora_dropout": 0.0,
    "network.lora_rank": 0,
    "network.parameters": "float32",
    "network.products": "float32",
    "network.qkv_bias": False,
    "network.out_bias": False,
    "network.positions": 0,
    "network.norm": "rms",
    "network.norm_eps": 1e-6,
    "network.norm_parameters": "auto",
    "network.query_scaling": [],
    "network.rotary_base": 10_000.0,
    "network.rotary_gain": 1.0,
    "network.rotary_part": 1.0,
    "network.rotary_ramp": "turns",
    "network.rotary_scaling": [],
    "network.router": "softmax",
    "network.router_bias": False,
    "network.router_groups": 1,
    "network.router_groups_taken": 1,
    "network.router_normalised": False,
    "network.router_scale": 1.0,
    "network.router_z": 0.0,
    "network.shared_hidden": 0,
    "network.shifted": False,
    "network.tables": 0,
    "network.tables_hidden": 0,
    "network.tables_tokens": 2**25,
    "network.tied": False,
    "network.time_embedding": "plain",
    "objective.cross_entropy": 0.0,
    "train.time_power": 1.0,
    "optim.clock": "steps",
    "optim.decayed": "matrices",
    "process.conditioning": "time",
}
# Defaults of networks that have others: name -> those keys of ADDED.
OF_NETWORKS = {
    "dit": {"network.rotary_base": 100.0, "network.embedding": 32},
    "modernbert": {
        "network.feed_forward": "geglu", "network.norm": "layer",
        "network.norm_parameters": "scale",
    },
    "diffusion_gemma": {
        "network.kv_heads": 4, "network.head_dim": 64, "network.expert_hidden": 512,
        "network.rotary_base": 1_000_000.0, "network.rotary_part": 0.25,
    },
}  # fmt: skip
# (section, its name, key, value) in older runs -> the value today.
RENAMED = {("process", "rates", "kernel", "gaussian"): "gaussian_symmetric"}


def added(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the default of each key that a config may leave out, for its network."""
    return ADDED | OF_NETWORKS.get(config.get("network", {}).get("name", ""), {})
