"""Reading of adapter_config.json of a LoRA in the layout of PEFT (huggingface/peft).

A folder of PEFT contains this file and adapter_model.safetensors. Each adapted module has two
matrices, lora_A [rank, in] and lora_B [out, rank], and W is replaced by W + scale B A.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place

FILE = "adapter_config.json"
ARRAYS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# Keys that are read here, and keys without effect once the matrices are trained.
READ = (
    "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "peft_type",
    "init_lora_weights", "base_model_name_or_path", "bias",
)  # fmt: skip
IDLE = (
    "auto_mapping", "eva_config", "inference_mode", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "task_type",
)  # fmt: skip
# Initial values that leave the matrices beside the adapters as they are; others change them.
STARTS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
# Why a key must be left as it is by default.
REFUSED = {
    "use_dora": "DoRA also changes the norms of the matrices (arXiv:2402.09353)",
    "modules_to_save": "whole modules are trained in addition to the adapters",
    "lora_bias": "the matrices of adapters have biases",
    "fan_in_fan_out": "the modules store transposed matrices, as in GPT-2",
    "trainable_token_indices": "embeddings of tokens are trained in addition to the adapters",
    "layer_replication": "layers of the base model are repeated",
}


class Lora(NamedTuple):
    """Content of adapter_config.json, and the options that it implies for each module.

    file  path, for messages
    told  content
    """

    file: Place
    told: Mapping[str, Any]

    def rank(self, module: str) -> int:
        """Returns the rank of a module's adapter: `r`, or that of the first pattern it matches."""
        return _of_pattern(self.told.get("rank_pattern"), module, self.told["r"])

    def scale(self, module: str) -> float:
        """Returns the factor of B A: alpha / rank, or alpha / sqrt(rank) (arXiv:2312.03732)."""
        alpha, rank = self.told["lora_alpha"], self.rank(module)
        alpha = _of_pattern(self.told.get("alpha_pattern"), module, alpha)
        return alpha / (rank**0.5 if self.told.get("use_rslora") else rank)

    def adapts(self, module: str) -> bool:
        """Returns whether a module may be one of `target_modules`; `all-linear` may be any."""
        told, asked = self.told, self.told["target_modules"]
        excluded = told.get("exclude_modules")
        if excluded and matches(excluded, module):
            return False
        if self.is_all_linear:
            return True
        if not matches(asked, module):
            return False
        layers = told.get("layers_to_transform")
        if isinstance(asked, str) or layers is None or layers == []:
            return True
        return _layer(module, told.get("layers_pattern")) in _listed(layers)

    def needs(self, module: str) -> bool:
        """Returns whether a module with a matrix must have an adapter.

        With `all-linear` these are the matrices of numbered layers; embedding and head cannot be
        distinguished.
        """
        in_layer = re.search(r"\.\d+\.", module) is not None
        return self.adapts(module) and (in_layer or not self.is_all_linear)

    @property
    def is_all_linear(self) -> bool:
        """Whether `target_modules` is PEFT's keyword for all linear layers except the head."""
        return str(self.told["target_modules"]).lower() == ALL_LINEAR

    @property
    def base(self) -> str:
        """Name of the base model, for messages."""
        return str(self.told.get("base_model_name_or_path") or "no model")


def read(folder: Place) -> Lora:
    """Reads adapter_config.json; UserError if it is not a LoRA, or has unsupported options."""
    file = folder / FILE
    if not file.exists():
        below = sorted(each.parent.name for each in folder.glob(f"*/{FILE}"))  # PEFT's named ones
        hint = f": give {folder / below[0]}" if below else ""
        said = f"{folder} holds no {FILE}, so it is not an adapter in PEFT's layout"
        raise UserError(said + hint)
    try:
        told = json.loads(file.read_text())
        if not isinstance(told, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable JSON: {error}") from error
    _check_kind(file, told)
    _check_numbers(file, told)
    return Lora(file, told)


def check_no_adapter(folder: Place) -> None:
    """Raises UserError if a folder has only an adapter, without a model's config.json."""
    if (folder / FILE).exists():
        base = read(folder).base
        raise UserError(
            f"{folder} holds only an adapter of {base}: load {base} with adapters={folder} "
            f"(--from BASE --adapters {folder})"
        )


def matches(asked: str | Iterable[str], module: str) -> bool:
    """Returns whether a name is one of PEFT's `target_modules`.

    asked: a regular expression of the whole name, or names and ends of names
    """
    if isinstance(asked, str):
        return re.fullmatch(asked, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in asked)


def _of_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _layer(module: str, patterns: Any) -> int | None:
    """Returns the index of the layer that contains a module."""
    if not patterns:
        found = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return int(found.group(1)) if found else None
    for pattern in _listed(patterns):
        if found := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
            return int(found.group(1))
    return None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_kind(file: Place, told: Mapping[str, Any]) -> None:
    """Raises UserError for adapters other than LoRA, and for those that change other weights."""
    if told.get("peft_type") != "LORA":
        raise UserError(
            f"{file} says peft_type={told.get('peft_type')!r}: only 'LORA' is supported"
        )
    for key, value in told.items():
        if key in READ or key in IDLE or not value or value == "none":
            continue
        why = REFUSED.get(key, "this option is not supported")
        raise UserError(f"{file} says {key}={value!r}: {why}, so the adapter cannot be read")
    if told.get("bias", "none") != "none":
        raise UserError(
            f"{file} says bias={told['bias']!r}: biases of the base model are trained in addition "
            "to the adapters, but only bias='none' is supported"
        )
    begun = told.get("init_lora_weights", True)
    if begun not in STARTS:
        raise UserError(
            f"{file} says init_lora_weights={begun!r}, with which PEFT also changes the base "
            "model: convert the adapter to a LoRA of the unchanged base with PEFT "
            "(path_initial_model_for_weight_conversion of save_pretrained)"
        )


def _check_numbers(file: Place, told: Mapping[str, Any]) -> None:
    """Raises UserError for ranks and scales that are not numbers, and for invalid patterns."""
    ranks, alphas = (told.get(f"{key}_pattern") or {} for key in ("rank", "alpha"))
    asked = told.get("target_modules")
    if not asked or not isinstance(asked, str | list):
        raise UserError(f"{file} must have target_modules, as text or a list, not {asked!r}")
    if not (isinstance(ranks, dict) and isinstance(alphas, dict)):
        raise UserError(f"{file}: rank_pattern and alpha_pattern must be objects")
    for rank in (told.get("r"), *ranks.values()):
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise UserError(f"{file}: a rank must be a whole number above 0, not {rank!r}")
    for alpha in (told.get("lora_alpha"), *alphas.values()):
        if not isinstance(alpha, int | float) or isinstance(alpha, bool):
            raise UserError(f"{file}: lora_alpha must be a number, not {alpha!r}")
    excluded, layers = told.get("exclude_modules"), told.get("layers_pattern")
    whole = [x for x in (asked, excluded) if isinstance(x, str)]
    for pattern in (*whole, *ranks, *alphas, *_listed(layers or [])):
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise UserError(f"{file}: {pattern!r} is not a regular expression: {error}") from error
