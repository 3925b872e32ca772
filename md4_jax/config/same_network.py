"""Comparison of networks, and of the shapes of their parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from md4_jax.config.schema import build_section
from md4_jax.experiment import Experiment
from md4_jax.networks.quality import built
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import path_name

# Keys of a network that affect how it is trained or computed, but not its outputs.
FREE = (
    "scan_blocks", "remat", "dtype", "products", "attention", "initial", "dropout",
    "dropout_shared", "attention_dropout", "embedding_dropout", "label_dropout", "balance",
    "router_z", "parameters", "lora_dropout", "tables_tokens", "tables_hidden", "shape",
)  # fmt: skip
# Keys of parameters that can be added to a model.
NEW = ("lora_rank", "lora_alpha", "lora_dropout", "quality")


def differing(experiment: Experiment, other: Experiment) -> list[tuple[str, Any, Any]]:
    """Returns (key, value here, value there) for each key that changes what the network computes.

    Adapters and heads of quality that only this network has do not count: they add nothing to its
    outputs before the first step.
    """
    names = [one.config["network"]["name"] for one in (experiment, other)]
    if names[0] != names[1]:
        return [("name", *names)]
    own, its = (computed(_options(one)) for one in (experiment, other))
    # With equal shapes, another head size means another number of heads.
    keys = sorted((own.keys() & its.keys()) - {"lora_rank", "head_dim", "quality"})
    return [(key, own[key], its[key]) for key in keys if own[key] != its[key]]


def check_sizes(
    before: Mapping[str, Any], after: Mapping[str, Any], domain: Any, folder: str
) -> None:
    """Raises UserError if a changed section `network` asks for other arrays than a model has.

    before: section of the model in `folder`

    A network of another name, such as an encoder-decoder from a Qwen3, is left to the conversion of
    the arrays. Adapters and a head of quality may be added. Keys in FREE may change the names of
    parameters: loading allows for that.
    """
    free = {key: after[key] for key in (*FREE, *NEW) if key in after}
    before = {**before, **free}
    if before == after or before["name"] != after["name"]:
        return
    changed = {key for key in after.keys() | before.keys() if after.get(key) != before.get(key)}
    options = [_built(section, domain) for section in (after, before)]
    if _shapes(options[0]) == _shapes(options[1]):
        return
    own, its = map(computed, options)
    keys = [key for key in sorted(own) if key in changed and own[key] != its.get(key)]
    said = "; ".join(
        f"network.{key}={own[key]!r}, but the model has {its.get(key)!r}" for key in keys
    )
    raise UserError(
        f"{said}: its arrays in {folder} have other shapes. Remove "
        f"{'this key' if len(keys) == 1 else 'these keys'}, or train a new model"
    )


def _shapes(options: Any) -> dict[str, tuple[int, ...]]:
    params = jax.eval_shape(built(options, "cpu").init, jax.random.key(0))
    return {path_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(params)}


def computed(options: Any) -> dict[str, Any]:
    """Returns the keys that determine the outputs of a network, with resolved values.

    options: those of the network's class; 0 and auto are replaced by the values they select
    """
    options = options.resolved("cpu") if hasattr(options, "resolved") else options
    fields = (field.name for field in dataclasses.fields(options))
    found = {key: _plain(getattr(options, key)) for key in fields if key not in FREE}
    if not found.get("lora_rank"):
        found.pop("lora_alpha", None)
    if "head_dim" in found:
        found["head_dim"] = options.attention_size
    if not found.get("experts"):
        unused = [key for key in found if key.startswith(("router", "expert")) and key != "experts"]
        found = {key: x for key, x in found.items() if key not in unused}
    if "norm_parameters" not in found:
        return found
    is_timed = found.get("time_conditioning", False)
    is_conditioned = is_timed or found.get("classes", 0) > 0
    found["condition"] = (found.get("condition") or options.size) if is_conditioned else 0
    found["time_embedding"] = is_timed and found.get("time_embedding")
    if not (is_timed and found.get("classes", 0)):  # for a single vector both are the same
        found["condition_activation"] = "sum"
    if found["norm_parameters"] == "auto" and not is_conditioned:
        found["norm_parameters"] = "scale"
    return found


def _options(experiment: Experiment) -> Any:
    return _built(experiment.config["network"], experiment.domain)


def _built(section: Mapping[str, Any], domain: Any) -> Any:
    shape = {"vocab_size": domain.vocab_size, "shape": getattr(domain, "shape", ())}
    return build_section("network", section, **shape)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
