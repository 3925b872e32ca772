"""Configs of published models, inferred from config.json and names and shapes of arrays."""

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from md4_jax.config import files
from md4_jax.data import bpe_files
from md4_jax.model import (
    decoders,
    dits,
    e2d2,
    esm,
    experts,
    gemma,
    gpt2,
    lfm2,
    maskgit,
    modernbert,
    smdm,
)
from md4_jax.model.peer import UNKNOWN, Peer, agree, check_built, needed
from md4_jax.model.told import Told
from md4_jax.networks import NETWORKS, published
from md4_jax.networks.published_gpt2 import DIFFUSION, prefix_of
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.tensors import Tensors

NAMED = (
    "bd3lm", "mdlm", "mdm_prime", "esolm", "e2d2", "duo", "udlm", "llada", "gpt2", "proseco",
    "modernbert", lfm2.KIND, esm.KIND, gemma.KIND, *experts.KINDS, *decoders.KINDS,
)  # fmt: skip

# Options of the reference implementation -> their only supported values.
MD4 = {"mlp_type": "glu", "cond_type": "adaln_zero", "causal": False, "norm_eps": 1e-5}


def peer(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Describes the model in a folder; told: its config.json. UserError if it is not supported."""
    kind, noted = kind_of(told, tensors), Told(told)
    if kind != gemma.KIND:  # which tells null from a key that is not there
        noted = noted.known()
    found = KINDS[kind](noted, tensors)
    return found._replace(kind=kind, unread={**noted.unread(), **found.unread})


def with_mask(told: Mapping[str, Any], folder: Place) -> Mapping[str, Any]:
    """Returns config.json with the mask of the folder's tokenizer, if it has no mask itself."""
    has = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    if told.get("mask_token_id") is not None or not has:
        return told
    mask = bpe_files.mask_of(folder)
    return told if mask is None else {**told, "mask_token_id": mask}


def kind_of(told: Mapping[str, Any], tensors: Tensors) -> str:
    """Returns the project that a folder comes from."""
    if prefix_of(tensors) == DIFFUSION:  # whatever its config.json says, which is a GPT-2's
        return "diffugpt"
    if kind := decoders.kind_by_class(told, tensors):
        return kind
    named = [str(told.get("model_type", "")), *map(str, told.get("architectures") or [])]
    for name in named:
        for kind in NAMED:
            if name.lower().removesuffix("modellm") == kind:
                return kind
    # Its arrays, but not under another name: Edit Flows of dLLM and models of images have them too.
    if "model.transformer.wte.weight" in tensors and not told.get("model_type"):
        return "llada"
    if any(name.startswith("Transformer_0/TransformerBlock_0/") for name in tensors):
        return "md4"
    if smdm.FIRST in tensors:
        return "smdm"
    if maskgit.is_one(tensors):
        return maskgit.KIND
    if dits.parts_of(tensors) > 1:
        return "mdm_prime"
    if dits.prefix_of(tensors) is not None:
        if not any("sigma_map." in name for name in tensors):
            return "radd"
        if "graph" in told:
            return "sedd"
        if "p_uniform" in told:
            return "gidd"
    said = ", ".join(filter(None, named)) or "no model_type"
    raise UserError(
        f"{tensors.folder} has an unsupported architecture (its config.json names {said}). "
        f"Supported are {', '.join(KINDS)} and models that md4_jax saved"
    )


def config_of(found: Peer, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a run that continues training; its data are not chosen yet."""
    config = files.shipped("base").get_config().to_dict()
    network = config["network"] | found.sections["network"]
    network["products"] = "float32"  # the same logits as theirs, to all digits
    known = {"name", *(field.name for field in dataclasses.fields(NETWORKS[network["name"]]))}
    config["network"] = {key: value for key, value in network.items() if key in known}
    config["data"] = {"name": "text", "path": "", "length": found.length}
    if tokenizer:  # images have none
        config["tokenizer"] = dict(tokenizer) | ({} if found.mask is None else {"mask": found.mask})
    # Copies: keys may be overridden, and models share what is the same for all of a kind.
    config |= {name: copy.deepcopy(found.sections[name]) for name in ("process", "objective")}
    config["sample"]["grid"] = "uniform"
    for name in ("data", "sample"):
        config[name] |= found.sections.get(name, {})
    config["optim"] |= {"learning_rate": 1e-4, "warmup_steps": 100}
    config["train"] |= {"num_steps": 10_000, "batch_size": 32}
    config["evals"]["validation"]["every"] = 1000
    config["checkpoint"]["every"] = 1000
    return config


def _llada(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Reads a LLaDA; its config.json has the options of OLMo's code."""
    built = {
        "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True,
        "alibi": False, "attention_layer_norm": False, "input_emb_norm": False,
        "scale_logits": False, "include_bias": False, "include_qkv_bias": False,
        "clip_qkv": None, "rope_scaling": None,
    }  # fmt: skip
    check_built(told, tensors, built)
    trunk = "model.transformer."
    rows, size = tensors.shape(f"{trunk}wte.weight")
    network = {
        **files.shipped("networks").LLADA,
        "size": size,
        "depth": tensors.count(rf"{re.escape(trunk)}blocks\.(\d+)\."),
        "hidden": tensors.shape(f"{trunk}blocks.0.ff_proj.weight")[0],
        "heads": needed(told, tensors, "n_heads"),
        "kv_heads": told.get("n_kv_heads") or 0,
        "tied": bool(told.get("weight_tying")) or f"{trunk}ff_out.weight" not in tensors,
    }
    network["rotary_base"] = float(told.get("rope_theta", network["rotary_base"]))
    network["norm_eps"] = float(told.get("rms_norm_eps", network["norm_eps"]))
    depth, hidden = network["depth"], network["hidden"]
    agree(told, tensors, d_model=size, n_layers=depth, mlp_hidden_size=hidden)
    mask = told.get("mask_token_id", UNKNOWN)
    rows = min(rows, max(told.get("vocab_size", rows), mask + 1))  # those beyond are padding
    sections = {"network": network, "process": {"name": "masking"}, "objective": {"name": "md4"}}
    sections["process"]["schedule"] = {"name": "linear"}
    length = told.get("max_sequence_length", 4096)
    tables = (f"{trunk}wte.weight", f"{trunk}ff_out.weight")
    return Peer(
        "", length, rows - 1, sections, published.from_llada, "GSAI-ML/LLaDA-8B-Base", tables, mask
    )


def _md4(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Reads a text model of MD4; its arrays are named by their paths in the parameters."""
    check_built(told, tensors, MD4)
    trunk, presets = "Transformer_0/", files.shipped("networks")
    block = f"{trunk}TransformerBlock_0/"
    timed = f"{block}Dense_0/kernel" in tensors
    outside = "Embed_0/embedding" in tensors
    rows, width = tensors.shape(f"{'' if outside else trunk}Embed_0/embedding")
    network = {
        **(presets.MD4 if timed else presets.MD4_TIME_FREE),
        "size": tensors.shape(f"{block}attention/wq/kernel")[0],
        "depth": tensors.count(rf"{trunk}TransformerBlock_(\d+)/"),
        "hidden": tensors.shape(f"{block}feed_forward/w1/kernel")[1],
        "heads": needed(told, tensors, "num_heads"),
        "embedding": width if outside else 0,
    }
    if timed:
        network["condition"] = tensors.shape("CondEmbedding_0/Dense_0/bias")[0]
    agree(told, tensors, n_layers=network["depth"], vocab_size=rows - 1)
    length = (told.get("data_shape") or [1024])[0]
    schedule = {"name": told.get("noise_schedule", "linear")}
    sections = {
        "network": network,
        "process": {"name": "masking", "schedule": schedule},
        "objective": {"name": "md4"},
    }
    return Peer("", length, rows - 1, sections, published.from_md4)


KINDS = {
    **dits.KINDS,
    "llada": _llada,
    "md4": _md4,
    "gpt2": gpt2.peer,
    "diffugpt": gpt2.peer,
    "modernbert": modernbert.peer,
    lfm2.KIND: lfm2.peer,
    "e2d2": e2d2.peer,
    esm.KIND: esm.peer,
    gemma.KIND: gemma.peer,
    "smdm": smdm.peer,
    maskgit.KIND: maskgit.peer,
    **experts.KINDS,
    **dict.fromkeys(decoders.KINDS, decoders.peer),
}
