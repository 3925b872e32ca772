"""DiTs of SEDD, MDLM and other models with the same array names."""

import re
from typing import Any

import numpy as np

from md4_jax.config import files
from md4_jax.data import smiles
from md4_jax.model.peer import Peer, agree, in_an_order, in_blocks, lacks, needed
from md4_jax.model.told import Told
from md4_jax.networks import published
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.tensors import Tensors

LOG_LINEAR = {"name": "log_linear", "eps": 1e-3}
# Rows and length of the UDLM on molecules, kuleshov-group/udlm-qm9, and its vocabulary.
MOLECULES, OF_MOLECULES = (35, 32), "yairschiff/qm9-tokenizer"
# Label dropout in UDLM's training.
LABEL_DROPOUT = 0.1
# Base of rotary positions in all published models of this kind, and the relative error of bfloat16.
ROTARY_BASE, ROUNDED = 10_000.0, 5e-3


def _mdlm(told: Told, tensors: Tensors) -> Peer:
    return _dit(told, tensors, _masks(told), {"name": "md4"})


def _masks(told: Told, **more: Any) -> dict[str, Any]:
    """Returns the section `process` of masks, with other keys."""
    conditioning = "sigma" if told.get("time_conditioning") else "zero"
    return {"name": "masking", "schedule": LOG_LINEAR, "conditioning": conditioning, **more}


def _proseco(told: Told, tensors: Tensors) -> Peer:
    """Reads a ProSeCo, an MDLM that also corrects its tokens, with labels if there are any."""
    found = _mdlm(told, tensors)
    _agree_on_labels(found, told, tensors)
    own = {"objective": {"name": "proseco"}, "sample": {"name": "proseco"}}
    return found._replace(sections={**found.sections, **own})


def _bd3lm(told: Told, tensors: Tensors) -> Peer:
    if told.get("causal"):
        raise UserError(
            f"{tensors.folder}: config.json says causal=True: it is the autoregressive baseline "
            "of BD3-LM, which is not supported"
        )
    return in_blocks(_mdlm(told, tensors), needed(told, tensors, "block_size"))


def _esolm(told: Told, tensors: Tensors) -> Peer:
    share = float(needed(told, tensors, "alpha_0"))
    return in_an_order(_mdlm(told, tensors), {"name": "eso", "alpha_0": share}, {"name": "eso"})


def _prime(told: Told, tensors: Tensors) -> Peer:
    """Reads an MDM-Prime, whose table has a row for each value of a sub-token, and one for none."""
    process = _masks(told, name="partial_masking", parts=parts_of(tensors))
    return _dit(told, tensors, process, {"name": "prime"})


def _duo(told: Told, tensors: Tensors) -> Peer:
    conditioning = "sigma" if told.get("time_conditioning", True) else "zero"
    process = {
        "name": "uniform", "schedule": LOG_LINEAR, "parametrisation": "joint",
        "conditioning": conditioning,
    }  # fmt: skip
    return _dit(told, tensors, process, {"name": "uniform_elbo"})


def _udlm(told: Told, tensors: Tensors) -> Peer:
    """Reads a UDLM, in which all rows of the vocabulary are symbols, including the mask's.

    The vocabulary is BERT's, or that of molecules, if their sizes fit.
    """
    found = _duo(told, tensors)
    _agree_on_labels(found, told, tensors)
    if (found.symbols, found.length) == MOLECULES:
        return found._replace(tokenizer=OF_MOLECULES, eot=smiles.END)
    return found._replace(tokenizer="google-bert/bert-base-uncased", eot="[SEP]")


def _agree_on_labels(found: Peer, told: Told, tensors: Tensors) -> None:
    """Raises UserError if config.json says other classes than the arrays have vectors for."""
    classes = found.sections["network"]["classes"]
    if bool(told.get("cfg")) != (classes > 0):
        raise UserError(
            f"{tensors.folder}: config.json says cfg={bool(told.get('cfg'))}, but its arrays have "
            f"vectors for {amount(classes, 'class')}"
        )
    if classes:
        agree(told, tensors, cfg_num_classes=classes)


def _gidd(told: Told, tensors: Tensors) -> Peer:
    process = {"name": "hybrid", "uniform": float(told["p_uniform"]), "gamma": 1.0}
    names = {"n_heads": "num_attention_heads", "model_length": "max_seq_len"}
    told |= {ours: needed(told, tensors, theirs) for ours, theirs in names.items()}
    agree(told, tensors, num_hidden_layers=tensors.count(r"blocks\.(\d+)\."))
    return _dit(told, tensors, process, {"name": "gidd", "weights": "dynamic"})


def _sedd(told: Told, tensors: Tensors) -> Peer:
    noise, graph = told.get("noise", {}), told["graph"].get("type")
    schedule = LOG_LINEAR
    if noise.get("type") == "geometric":
        limits = {"minimum": noise["sigma_min"], "maximum": noise["sigma_max"]}
        schedule = {"name": "geometric", **limits}
    process = {"name": "masking", "schedule": schedule, "conditioning": "sigma"}
    objective = {"name": "score_entropy"}
    if graph == "uniform":
        process |= {"name": "uniform", "parametrisation": "score"}
    elif graph == "absorb":
        objective["scaled"] = bool(told.get("model", {}).get("scale_by_sigma", True))
    else:
        raise UserError(
            f"{tensors.folder}: config.json says graph.type={graph!r}; only 'uniform' and "
            "'absorb' are supported"
        )
    return _dit(told, tensors, process, objective)


def _radd(told: Told, tensors: Tensors) -> Peer:
    told = told.without("noise")  # of which a bound of masks alone does not depend
    loss = str(told.get("training", {}).get("loss_type", "t_dce")).lower()
    objective = {"name": loss if loss in ("t_dce", "lambda_dce") else "t_dce"}
    return _dit(told, tensors, {"name": "masking", "schedule": LOG_LINEAR}, objective)


def _dit(told: Told, tensors: Tensors, process: dict[str, Any], objective: dict[str, Any]) -> Peer:
    """Reads the sizes of a DiT, as in SEDD and MDLM, from its arrays."""
    prefix = prefix_of(tensors)
    if prefix is None:
        raise UserError(
            f"{tensors.folder} has no array {published.DIT_TABLE!r}, which every model of this "
            "kind has"
        )
    head, table = f"{prefix}output_layer.linear.weight", f"{prefix}{published.DIT_TABLE}"
    parts = parts_of(tensors)
    rows, size = tensors.shape(table if table in tensors and parts == 1 else head)
    timed = f"{prefix}sigma_map.mlp.2.weight" in tensors
    network = {
        **files.shipped("networks").DIT,
        "size": size,
        "depth": tensors.count(rf"{re.escape(prefix)}blocks\.(\d+)\."),
        "hidden": tensors.shape(f"{prefix}blocks.0.mlp.0.weight")[0],
        "condition": tensors.shape(f"{prefix}sigma_map.mlp.2.weight")[0] if timed else 0,
        "time_conditioning": timed,
        "norm_parameters": "affine" if f"{prefix}blocks.0.norm1.bias" in tensors else "scale",
        "tied": not (head in tensors and table in tensors),
        **_of_labels(tensors, f"{prefix}{published.DIT_LABELS}"),
        **({"name": "sub_tokens", "parts": parts} if parts > 1 else {}),
    }
    sizes = told.get("model") or told
    network["heads"] = sizes.get("n_heads") or _rotary_heads(tensors, prefix, size)
    network |= _rotary_base(tensors, prefix)
    agree(sizes, tensors, hidden_dim=size, hidden_size=size, n_blocks=network["depth"])
    if sizes is told:  # SEDD and RADD count no mask
        agree(told, tensors, vocab_size=rows)
    symbols = rows - (process["name"] in ("masking", "hybrid"))
    length = sizes.get("model_length") or sizes.get("length") or 1024
    sections = {"network": network, "process": process, "objective": objective}
    tables = (table, head, head.replace("weight", "bias")) if symbols < rows else ()
    return Peer("", length, symbols, sections, published.from_dit, tables=tables)


def _of_labels(tensors: Tensors, table: str) -> dict[str, Any]:
    """Returns the keys for class labels, if the network has them; the last row is for no label."""
    if table not in tensors:
        return {"classes": 0}
    return {
        "classes": tensors.shape(table)[0] - 1,
        "label_dropout": LABEL_DROPOUT,
        "condition_activation": "each",
    }


def prefix_of(tensors: Tensors) -> str | None:
    """Returns the prefix of the array names of a DiT; None if there is no DiT."""
    for prefix in ("backbone.", ""):
        if f"{prefix}blocks.0.attn_qkv.weight" in tensors:
            return prefix
    return None


def parts_of(tensors: Tensors) -> int:
    """Returns how many vectors of the table make up that of a token; 1 if there is no table."""
    prefix = prefix_of(tensors)
    if prefix is None or f"{prefix}{published.DIT_TABLE}" not in tensors:
        return 1
    size = tensors.shape(f"{prefix}blocks.0.attn_qkv.weight")[1]
    return size // tensors.shape(f"{prefix}{published.DIT_TABLE}")[1]


def _rotary_base(tensors: Tensors, prefix: str) -> dict[str, float]:
    """Returns the base of the stored rotary frequencies, which the authors' code uses.

    UserError for frequencies that are not base^(-i / n) of any base; {} if there are none.
    """
    name = f"{prefix}rotary_emb.inv_freq"
    if name not in tensors or tensors.shape(name)[0] < 2:
        return {}
    stored = np.asarray(tensors.small(name), np.float64)
    part = np.arange(len(stored)) / len(stored)
    base = float(stored[-1] ** (-1 / part[-1]))
    for found in (ROTARY_BASE, float(round(base)), base):
        if np.allclose(stored, found**-part, rtol=ROUNDED, atol=0):
            return {"rotary_base": found}
    raise UserError(
        f"{tensors.folder}: the rotary frequencies {name!r} are not base^(-i / {len(stored)}) of "
        "any base, so this is not a network that can be read"
    )


def _rotary_heads(tensors: Tensors, prefix: str, size: int) -> int:
    """Returns the number of heads; a head has twice as many features as rotary frequencies."""
    name = f"{prefix}rotary_emb.inv_freq"
    if name not in tensors:
        raise lacks(tensors, "n_heads")
    return size // (2 * tensors.shape(name)[0])


KINDS = {
    "mdlm": _mdlm,
    "proseco": _proseco,
    "bd3lm": _bd3lm,
    "esolm": _esolm,
    "duo": _duo,
    "udlm": _udlm,
    "mdm_prime": _prime,
    "gidd": _gidd,
    "sedd": _sedd,
    "radd": _radd,
}
