"""Writing of a model's adapters in the layout of PEFT, for its published base."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from md4_jax.config.schema import build_section
from md4_jax.model import peers, peft_config
from md4_jax.model.folder import check_empty, filling
from md4_jax.model.layout import Layout, Numbered
from md4_jax.model.origins import WEIGHT, Origin, origins
from md4_jax.model.peer import Peer
from md4_jax.networks.depth import STACKED
from md4_jax.protocols import UserError
from md4_jax.runtime import tensors
from md4_jax.runtime.distributed import is_first
from md4_jax.runtime.paths import Place, replace
from md4_jax.runtime.sharding import path_name, to_host
from md4_jax.training.trainable import trained_beside

LAYERED = re.compile(r"((?:.*?\.)?)(\d+)\.(.+)")  # what is before a layer's number, that, the rest


class Part(NamedTuple):
    """Adapter of a layer: A [in, rank] and B [rank, out], and the layer's rows of a module."""

    place: Origin
    a: np.ndarray
    b: np.ndarray


def write(model: Any, folder: Place, base: str = "") -> Place:
    """Writes adapter_model.safetensors, then adapter_config.json; returns the folder.

    base: folder, or USER/NAME on the hub, of the base parameters; "": the model's origin. UserError
    for a model without adapters, with other trained parameters, or with an unknown base, and for a
    folder that is not empty.
    """
    check_empty(folder)
    layout = model.layout
    named = _named_base(model, base)
    options = build_section("network", model.config["network"], vocab_size=model.domain.vocab_size)
    peer = peers.peer(layout.config, Numbered(layout, model.origin))
    if peer.begins is not None and not options.causal and not base:
        raise UserError(
            f"{model.origin} was made from the causal {named}, which has no mask. First write "
            "that model with a mask by md4_jax.load(BASE, config={...}).export(FOLDER), with "
            "this model's keys of the section network except those of adapters, and then give "
            "base=FOLDER"
        )
    modules = _modules(model, peer, layout, options)
    arrays, ranks = {}, {}
    for module, parts in modules.items():
        a, b = _matrices(parts, layout.arrays[module + WEIGHT][1][0])
        ranks[module] = len(a)
        arrays[f"base_model.model.{module}.lora_A.weight"] = a
        arrays[f"base_model.model.{module}.lora_B.weight"] = b
    told = _config(named, options, ranks, targets(list(modules), list(layout.arrays)))
    told["task_type"] = "CAUSAL_LM" if peer.begins is not None and options.causal else None
    if is_first():
        with filling(folder):
            tensors.write_file(folder / peft_config.ARRAYS, arrays, "pt")
            replace(folder / peft_config.FILE, json.dumps(told, indent=2) + "\n")
    return folder


def targets(modules: Sequence[str], arrays: Sequence[str]) -> list[str] | str:
    """Returns `target_modules` that match these modules and no others.

    arrays: names of all arrays of the base. The result is a list of suffixes of names if possible,
    else a regular expression.
    """
    ends = {name.rpartition(".")[0] for name in arrays}
    every = {".".join(end.split(".")[:n]) for end in ends for n in range(1, end.count(".") + 2)}
    rests = {LAYERED.fullmatch(module).group(3) for module in modules}
    for names in ({rest.split(".")[-1] for rest in rests}, rests):
        asked = sorted(names)
        if {module for module in every if peft_config.matches(asked, module)} == set(modules):
            return asked
    before = {LAYERED.fullmatch(module).group(1) for module in modules}
    either = lambda names: "|".join(re.escape(name) for name in sorted(names))  # noqa: E731
    return rf"({either(before)})\d+\.({either(rests)})"


def _named_base(model: Any, base: str) -> str:
    """Returns base_model_name_or_path; UserError unless the model adapts a published one."""
    layout, network, keys = model.layout, model.experiment.network, model.config["train"]
    if not network.adapters:
        raise UserError(f"adapters=True writes adapters, but {model.origin} has none")
    if layout is None:
        raise UserError(
            f"{model.origin} was not made from a published checkpoint, to which adapters in "
            "PEFT's layout belong: use save"
        )
    trainable = keys.get("trainable", "")
    beside = trained_beside(network, model.params["network"], trainable)
    if beside and model.step:
        raise UserError(
            f"train.trainable={trainable!r} has also trained {beside}, which a folder of adapters "
            "does not contain: write the whole model by export(FOLDER)"
        )
    if not (base or layout.base):
        raise UserError(
            f"the parameters of {model.origin} other than its adapters may differ from those of "
            "every published checkpoint, since they were trained, had adapters merged into them, "
            "or were imported by an older version: give a folder that holds them as base=FOLDER, "
            "or write the whole model by export(FOLDER)"
        )
    return base or layout.base


def _modules(model: Any, peer: Peer, layout: Layout, options: Any) -> dict[str, list[Part]]:
    """Returns the adapters of each module; several layers here may be rows of one module there.

    Kinds of layers without trained adapters, which add nothing, are left out.
    """
    shapes = {name: shape for name, (_, shape) in layout.arrays.items()}
    leaves = jax.tree_util.tree_leaves_with_path(model.params["network"])
    values = {path_name(path): x for path, x in leaves}
    trainable = model.config["train"].get("trainable", "")
    layers, used = origins(peer, shapes, options, model.origin), set()
    pairs = {}
    for layer in layers:
        names = [f"{layer}/lora_{which}/kernel" for which in "ab"]
        a, b = (np.asarray(to_host(values[name]), np.float32) for name in names)
        pairs[layer] = (a, b) if layer.startswith(STACKED) else (a[None], b[None])
        if re.search(trainable, names[0]) or np.any(b):
            used.add(_kind(layer))
    found: dict[str, list[Part]] = {}
    for layer, places in layers.items():
        if _kind(layer) in used:
            for place, a, b in zip(places, *pairs[layer], strict=True):
                found.setdefault(place.module, []).append(Part(place, a, b))
    return found


def _kind(layer: str) -> str:
    """Returns the path of a layer within its block."""
    return "/".join(layer.split("/")[-2:])


def _matrices(parts: Sequence[Part], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [rank, in] and B [rows, rank] of a module from the adapters of its parts.

    The rank is the sum of the parts' ranks: B has a block for each part, and zeros elsewhere.
    """
    a = np.concatenate([part.a.T for part in parts])
    b, begin = np.zeros((rows, len(a)), np.float32), 0
    for part in parts:
        end = begin + len(part.b)
        b[part.place.start : part.place.stop, begin:end] = part.b.T
        begin = end
    return a, b


def _config(
    named: str, options: Any, ranks: Mapping[str, int], asked: list[str] | str
) -> dict[str, Any]:
    """Returns adapter_config.json; ranks: by module. All modules have the same alpha / rank."""
    rank, alpha = options.lora_rank, options.lora_alpha
    name, mark, revision = named.partition("@") if is_hub_name(named) else (named, "", "")
    other = {
        re.escape(LAYERED.fullmatch(module).group(3)): own
        for module, own in ranks.items()
        if own != rank
    }
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": name,
        "revision": revision if mark else None,
        "r": rank,
        "lora_alpha": _short(alpha),
        "lora_dropout": options.lora_dropout,
        "target_modules": asked,
        "rank_pattern": other,
        "alpha_pattern": {key: _short(alpha * own / rank) for key, own in other.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def is_hub_name(named: str) -> bool:
    """Returns whether a base is USER/NAME or USER/NAME@REVISION on the hub, not a folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", named) is not None


def _short(number: float) -> float | int:
    """Returns an integral number as an int, as PEFT writes it."""
    return int(number) if float(number).is_integer() else float(number)
