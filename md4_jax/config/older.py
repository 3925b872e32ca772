"""Compatibility with runs of older versions: missing keys and renamed keys."""

from collections.abc import Mapping
from typing import Any

from md4_jax.protocols import UserError

# Keys that older runs and short configs omit -> their default.
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
    "network.condition_activation": "sum",
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
    "network.quality": False,
    "network.query_scaling": [],
    "network.rotary_base": 10_000.0,
    "network.rotary_gain": 1.0,
    "network.rotary_part": 1.0,
    "network.rotary_ramp": "turns",
    "network.rotary_scaling": [],
    "network.rotary_type": "float32",
    "network.router": "softmax",
    "network.router_bias": False,
    "network.router_groups": 1,
    "network.router_groups_taken": 1,
    "network.router_block": 0,
    "network.router_block_taken": 0,
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
# Networks with other defaults: name -> those keys of ADDED.
OF_NETWORKS = {
    "dit": {"network.rotary_base": 100.0, "network.embedding": 32},
    "dit_classifier": {"network.rotary_base": 100.0, "network.embedding": 32},
    "modernbert": {
        "network.feed_forward": "geglu", "network.norm": "layer",
        "network.norm_parameters": "scale",
    },
    "esm": {
        "network.feed_forward": "gelu_exact", "network.norm": "layer", "network.norm_eps": 1e-5,
        "network.norm_parameters": "affine", "network.qkv_bias": True, "network.out_bias": True,
        "network.initial": "torch",
    },
    "lfm2": {"network.norm_eps": 1e-5, "network.norm_parameters": "scale"},
    "maskgit": {
        "network.positions": 256, "network.norm_eps": 1e-5, "network.norm_parameters": "scale",
        "network.tied": True, "network.initial": "torch",
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


def with_current_names(config: dict[str, Any]) -> dict[str, Any]:
    """Renames keys and values of an older version."""
    for (section, name, key, old), new in RENAMED.items():
        part = config.get(section)
        if isinstance(part, dict) and (part.get("name"), part.get(key)) == (name, old):
            config = {**config, section: {**part, key: new}}
    if "eval" in config and "evals" not in config:
        kept = {key: value for key, value in config.items() if key != "eval"}
        config = {**kept, "evals": _evaluators_of(config["eval"])}
    return _without_older_tables(config)


def _without_older_tables(config: dict[str, Any]) -> dict[str, Any]:
    """Drops the keys of earlier kinds of tables; UserError for a run that has such tables."""
    network, gone = config.get("network"), ("tables_rate", "tables_draws")
    if not isinstance(network, dict):
        return config
    # Today's counts came with this key.
    if network.get("tables") and "tables_hidden" not in network:
        raise UserError(
            f"network.tables={network['tables']}: this run has tables of an earlier kind, which "
            "this version cannot use. Use the version of md4_jax that trained the run (`commit` "
            "in its config.json), or train again"
        )
    return {**config, "network": {k: v for k, v in network.items() if k not in gone}}


def _evaluators_of(old: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the evaluators that the `eval` section of older versions stood for."""
    shared = ("draws", "batch_size", "stride", "seed", "objective")
    bound = {"name": "likelihood", **{key: old[key] for key in shared if key in old}}
    split, order = old.get("split", "test"), old.get("ngram_order", 0)
    every, limit = old.get("every", 0), old.get("limit", 0)
    return {
        "validation": {
            **bound, "split": "validation", "every": every, "final": False, "limit": limit
        },
        "test": {**bound, "split": split, "every": 0, "final": True},
        "ngrams": {"name": "ngrams", "split": split, "final": order > 0, "order": order or 5},
        "samples": {"name": "samples", "every": 0, "final": True},
    }  # fmt: skip
