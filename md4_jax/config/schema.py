"""Config sections: their keys and types, and the objects built from them."""

import copy
import dataclasses
import inspect
import json
import math
import typing
from collections.abc import Mapping
from functools import partial
from typing import Any

from md4_jax.auditor.options import AuditOptions
from md4_jax.config import files, foreign
from md4_jax.config import load as config_lib
from md4_jax.config.load import merged, unknown
from md4_jax.config.mistakes import all_of, messages_of, raise_all
from md4_jax.config.values import fits, spelled
from md4_jax.data import SOURCES, TOKENIZERS
from md4_jax.evals import EVALUATORS
from md4_jax.evals.features import FEATURES
from md4_jax.evals.rewards import REWARDS
from md4_jax.networks import NETWORKS
from md4_jax.objectives import OBJECTIVES
from md4_jax.options import (
    CheckpointOptions,
    EvalOptions,
    LogOptions,
    MeshOptions,
    PromptOptions,
    SampleOptions,
    TrainOptions,
)
from md4_jax.options.data import DataOptions
from md4_jax.options.guide import ClassifierOptions
from md4_jax.options.parts import BenchOptions, PlanOptions
from md4_jax.processes import PROCESSES
from md4_jax.processes.schedules import SCHEDULES
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place
from md4_jax.samplers import SAMPLERS
from md4_jax.samplers.particles import SteeringOptions
from md4_jax.samplers.transforms import Transform
from md4_jax.training.optim import OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class Tightest:
    """Placeholder for objective.name=auto: the tightest bound that the process allows."""


# The keys of a section are `name` and the arguments of the registered class, or the fields of
# CLASSES, or both. `evals.*` is any number of sections, under names that the user chooses.
REGISTRIES = {
    "data": SOURCES,
    "tokenizer": TOKENIZERS,
    "process": PROCESSES,
    **{f"process.{key}": SCHEDULES for key in ("schedule", "insertion")},
    **{f"process.{key}.base": SCHEDULES for key in ("schedule", "insertion")},
    "objective": OBJECTIVES,
    "network": NETWORKS,
    "optim": OPTIMIZERS,
    "evals.*": EVALUATORS,
    "evals.*.objective": {"auto": Tightest, **OBJECTIVES},
    "evals.*.features": FEATURES,
    "sample": SAMPLERS,
    "sample.reward": REWARDS,
}
CLASSES = {
    "data": (DataOptions,),
    "train": (TrainOptions,),
    "mesh": (MeshOptions,),
    "sample": (SampleOptions, PromptOptions, ClassifierOptions, Transform),
    "sample.reward": (SteeringOptions,),
    "checkpoint": (CheckpointOptions,),
    "eval": (EvalOptions,),
    "log": (LogOptions,),
    "bench": (BenchOptions,),
    "plan": (PlanOptions,),
    "audit": (AuditOptions,),
}
# Sections added later, which a config may omit in whole or in part -> defaults.
LATER = {
    "audit": AuditOptions(),
    "bench": BenchOptions(),
    "checkpoint": CheckpointOptions(),
    "eval": EvalOptions(),
    "plan": PlanOptions(),
}
# Sections that override keys of another section -> that section.
OVERRIDES = {"evals.*.data": "data"}
# Limit of whole numbers: steps and tokens are counted in int32.
TOO_LARGE = 2**31
# Arguments that `build` supplies or a nested section makes; they cannot be keys.
SUPPLIED = ("vocab_size", "shape", "transform", "schedule", "insertion", "base")
SUPPLIED += ("objective", "features")


def kind(path: str) -> str:
    """Replaces the name of an evaluator in a path by `*`: evals.test -> evals.*.

    A part of a mixture, data.parts.NAME, is a section like `data`.
    """
    parts = path.split(".")
    if is_part(path):
        return ".".join(["data", *parts[3:]])
    return ".".join([parts[0], "*", *parts[2:]]) if parts[0] == "evals" and parts[1:] else path


def is_part(path: str) -> bool:
    """Returns whether the path is a part of a mixture, or within one."""
    return path.startswith("data.parts.")


def has_name(path: str) -> bool:
    """Returns whether the section at this path selects a class by its `name`."""
    return kind(path) in REGISTRIES


def class_of(path: str, name: Any) -> type:
    """Returns the class of a name: a registered name or package.module:attribute."""
    registry = REGISTRIES[kind(path)]
    if foreign.is_foreign(name):
        try:
            found = foreign.load(name)
        except UserError as error:
            raise UserError(f"{path}.name: {error}") from error
        foreign.check_contract(kind(path), f"{path}.name", found)
        return found
    if name not in registry:
        raise unknown(f"{path}.name", str(name), list(registry))
    return registry[name]


def arguments_of(path: str, name: str | None) -> dict[str, Any]:
    """Returns {key: type} of the keys that a section may have; UserError for an unknown name."""
    takers = list(CLASSES.get(path, ()))
    if has_name(path):
        takers.append(class_of(path, name))
    found = {}
    for taker in takers:
        found |= {f.name: f.type for f in dataclasses.fields(taker) if f.init}
        found |= {k: v for k, v in typing.get_type_hints(taker).items() if k in found}
    found |= {"weight": float} if is_part(path) else {}
    found |= {"reward": Any} if path == "sample" else {}
    made = ("vocab_size", "shape", "transform", "excluded", "postponed", "stops")
    made += ("trained", "in_windows")
    return {k: v for k, v in found.items() if k not in made}


def type_of(path: str, name: str, key: str) -> Any:
    """Returns the type of a key in a section of that name; None if there is no such key."""
    return arguments_of(path, name).get(key) if has_name(path) else Any


def check_keys(config: Mapping[str, Any]) -> None:
    """Raises UserError for an unknown, missing or wrongly typed section or key."""
    top = {path for path in [*REGISTRIES, *CLASSES] if "." not in path}
    all_of(
        *(
            partial(_check_there, config, section, top)
            for section in sorted({*config, *top, "evals"})
        )
    )
    data, evaluators = config["data"], config["evals"]
    if not isinstance(evaluators, Mapping):
        raise UserError(f"evals must be a section (a dict), not {evaluators!r}")
    all_of(
        *(partial(_check_section, section, config.get(section, {})) for section in sorted(top)),
        partial(_check_length, data),
        *(partial(_check_evaluator, *item, data) for item in evaluators.items()),
    )


def _check_there(config: Mapping[str, Any], section: str, top: set[str]) -> None:
    """Raises UserError for an unknown section, or a required one that is missing."""
    if section not in {*top, "evals"}:
        raise unknown("config section", section, sorted({*top, "evals"}))
    if section not in config and section not in LATER:
        raise UserError(f"the config has no section {section!r}; start from configs/base.py")


def _check_length(data: Any) -> None:
    """Raises UserError if the length of a sequence is missing."""
    if isinstance(data, Mapping) and "length" not in data:
        raise UserError("data.length is needed: the number of tokens of a sequence")


def _check_evaluator(name: str, section: Any, data: Mapping[str, Any]) -> None:
    """Raises UserError for an evaluator with an invalid name or wrong keys."""
    path = f"evals.{name}"
    if not name.isidentifier():
        raise UserError(f"{path}: the name must be of letters, digits and _, with a letter first")
    _check_section(path, section)
    if section.get("data"):
        of_run = messages_of(partial(_check_section, "data", data))  # reported without the path
        found = messages_of(partial(_check_section, "data", merged(data, section["data"])))
        own = [message for message in found if message not in of_run]
        raise_all([f"{path}: {m.replace('data.name=', f'{path}.data.name=')}" for m in own])


def _check_section(path: str, section: Any) -> None:
    """Raises UserError for unknown or wrongly typed keys."""
    if not isinstance(section, Mapping):
        raise UserError(f"{path} must be a section (a dict), not {section!r}")
    known = arguments_of(path, section.get("name"))
    all_of(*(partial(_check_key, path, known, key, value) for key, value in section.items()))


def _check_key(path: str, known: Mapping[str, Any], key: str, value: Any) -> None:
    """Raises UserError for an unknown key of a section, or a value of another type."""
    nested = f"{path}.{key}"
    if key == "name" and has_name(path):
        return
    if nested == "data.parts" and key in known:
        if not isinstance(value, Mapping) or not all(map(str.isidentifier, value)):
            raise UserError(f"{nested} must be sections by names of letters, digits and _")
        all_of(*(partial(_check_section, f"{nested}.{name}", part) for name, part in value.items()))
    elif has_name(nested) and key in known:
        _check_section(nested, value)
    elif kind(nested) in OVERRIDES and key in known:
        if not isinstance(value, Mapping):
            raise UserError(f"{nested} must be a section (a dict), not {value!r}")
    elif key not in known or key in SUPPLIED:
        takes = [*known, *(["name"] if has_name(path) else [])]
        owners = [n for n in REGISTRIES.get(kind(path), ()) if key in arguments_of(path, n)]
        error = unknown(f"key in {path}", key, takes, f"{path}.name", owners)
        own = "; for files of your own add --config.data.name=text" * (nested == "data.path")
        raise UserError(f"{error}{own}")
    elif isinstance(value, int) and key != "seed" and abs(value) >= TOO_LARGE:
        raise UserError(f"{nested} must be below {TOO_LARGE}, not {value}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{nested} must be a finite number, not {value}")
    elif not fits(value, known[key]):
        raise UserError(f"{nested} must be {spelled(known[key])}, not {value!r}")


def build_section(path: str, section: Mapping[str, Any], **supplied: Any) -> Any:
    """Builds the object of a section with a `name`, after those of its nested sections."""
    constructor = class_of(path, section["name"])
    takes = inspect.signature(constructor).parameters
    arguments = dict(supplied)
    for key, value in section.items():
        if has_name(f"{path}.{key}"):
            arguments.setdefault(key, build_section(f"{path}.{key}", value))
        elif key in takes and key != "name":
            arguments[key] = tuple(value) if isinstance(value, list) else value
    missing = [
        key
        for key, parameter in takes.items()
        if parameter.default is parameter.empty and key not in arguments
    ]
    if missing:
        raise UserError(f"{path}.{missing[0]} is needed by {path}.name={section['name']!r}")
    return constructor(**{key: value for key, value in arguments.items() if key in takes})


def options_from(cls: type, section: Mapping[str, Any]) -> Any:
    """Makes an options object from those keys of a section that are fields of its class."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in section.items() if key in names})


def _named_by_kind(config: Mapping[str, Any], assignments: Mapping[str, str]) -> dict[str, str]:
    """Returns {evals.KIND.name: KIND} for new evaluators with keys assigned under their kind."""
    there = config.get("evals")
    if not isinstance(there, Mapping):
        return {}  # check_keys raises the error
    given = {key.split(".")[1] for key in assignments if key.startswith("evals.")}
    new = {kind for kind in given if kind in EVALUATORS and kind not in there}
    return {f"evals.{kind}.name": kind for kind in new}


def load_config(
    path: str | None,
    assignments: Mapping[str, str],
    workdir: Place | None = None,
    *,
    may_differ: bool = False,
) -> dict[str, Any]:
    """Loads a config, applies the assignments and checks all keys.

    Without a path, loads the config of the run in workdir. Only its FREE keys may then be changed,
    unless it may differ. UserError if there is neither a path nor a run.
    """
    kept = None if path or workdir is None else config_lib.stored(workdir)
    if not path and kept is None:
        raise config_lib.missing(workdir)
    config = files.load(path) if path else copy.deepcopy(kept)
    foreign.allow(foreign.names_in(assignments))
    foreign.allow(foreign.names_in(config) if path else ())
    for name, options in LATER.items():
        config[name] = dataclasses.asdict(options) | config.get(name, {})
    asked = {**_named_by_kind(config, assignments), **assignments}
    with files.named(path, partial(check_keys, copy.deepcopy(config))):
        all_of(partial(config_lib.override, config, asked, type_of), partial(check_keys, config))
    config = json.loads(json.dumps(config))  # as a run will read it: lists instead of tuples
    if kept is not None and not may_differ:
        config_lib.check_same(kept, config, workdir, config_lib.OF_USE)
    return config
