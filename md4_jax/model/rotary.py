"""Rotary positions of published models, from their config.json."""

import math
from collections.abc import Mapping
from typing import Any

from md4_jax.model.peer import lacks
from md4_jax.model.told import Told
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

LLAMA_3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Layout in which queries are scaled by position; config.json must have the options.
GROWN = "ministral3"


def keys_of(told: Told, tensors: Tensors, base: str) -> dict[str, Any]:
    """Returns the keys of the network; UserError for unsupported forms.

    base: the kind that defines the layout of the arrays
    """
    rotary = _rotary(told)
    if base == GROWN and not rotary:
        raise lacks(tensors, "rope_parameters")
    found = {"rotary_base": float(rotary.get("rope_theta") or told.get("rope_theta") or 10_000.0)}
    form = rotary.get("rope_type", rotary.get("type", "default"))
    if form not in FORMS:
        raise UserError(
            f"{tensors.folder}: config.json scales rotary positions by {form!r}, which is not "
            "supported: only 'llama3' and 'yarn' are"
        )
    for key, value in (("partial_rotary_factor", 1.0), ("truncate", True)):
        if rotary.get(key, value) not in (value, None):
            raise UserError(
                f"{tensors.folder}: config.json says {key}={rotary[key]!r} for rotary positions; "
                f"only {value!r} is supported"
            )
    found |= FORMS[form](rotary, told, tensors)
    if base == GROWN and rotary.get("llama_4_scaling_beta"):
        length = _number(rotary, "original_max_position_embeddings", tensors)
        found["query_scaling"] = (float(rotary["llama_4_scaling_beta"]), length)
    return found


def _default(
    rotary: Mapping[str, Any], told: Mapping[str, Any], tensors: Tensors
) -> dict[str, Any]:
    return {"rotary_scaling": ()}


def _llama3(rotary: Mapping[str, Any], told: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {"rotary_scaling": tuple(_number(rotary, name, tensors) for name in LLAMA_3)}


def _yarn(rotary: Mapping[str, Any], told: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Returns the keys for YaRN (arXiv:2309.00071), with the defaults of transformers 5."""
    name = "original_max_position_embeddings"
    found = {name: told.get("max_position_embeddings")}
    found |= {key: value for key, value in rotary.items() if value is not None}
    length = _number(found, name, tensors)
    if found.get("factor") is None:
        found["factor"] = _number(told, "max_position_embeddings", tensors) / length
    factor = float(found["factor"])
    low, high = float(found.get("beta_slow") or 1.0), float(found.get("beta_fast") or 32.0)
    gain = found.get("attention_factor")
    if gain is None:
        scales = [found.get(key) for key in ("mscale", "mscale_all_dim")]
        one, other = (_gain(factor, scale) for scale in (scales if all(scales) else (1.0, 0.0)))
        gain = one / other
    return {
        "rotary_scaling": (factor, low, high, length),
        "rotary_ramp": "pairs",
        "rotary_gain": float(gain),
    }


def _gain(factor: float, scale: float) -> float:
    return 1.0 + 0.1 * scale * math.log(max(factor, 1.0))


FORMS = {"default": _default, "llama3": _llama3, "yarn": _yarn}


def _rotary(told: Told) -> Mapping[str, Any]:
    """Returns the options of rotary positions in config.json, under either of their names."""
    named = (name for name in ("rope_scaling", "rope_parameters") if told.get(name))
    found = next(named, None)
    return {} if found is None else told.within(found)


def _number(said: Mapping[str, Any], key: str, tensors: Tensors) -> float:
    if said.get(key) is None:
        raise lacks(tensors, key)
    return float(said[key])
