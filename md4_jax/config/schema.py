"""Config sections: which keys each may have, their types, and the object of a section."""

import copy
import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from md4_jax.config import load as config_lib
from md4_jax.config.load import unknown
from md4_jax.data import SOURCES, TOKENIZERS
from md4_jax.generate.prompts import PromptOptions
from md4_jax.networks import NETWORKS
from md4_jax.objectives import OBJECTIVES
from md4_jax.options import (
    BenchOptions,
    CheckpointOptions,
    DataOptions,
    EvalOptions,
    LogOptions,
    MeshOptions,
    PlanOptions,
    SampleOptions,
    TrainOptions,
)
from md4_jax.processes import PROCESSES
from md4_jax.processes.schedules import SCHEDULES
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place
from md4_jax.samplers import SAMPLERS
from md4_jax.samplers.transforms import Transform
from md4_jax.training.optim import OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class Tightest:
    """eval.objective.name=auto: the tightest bound that the process and the network allow."""


# A section is `name` and arguments of its registry's entry, or fields of one class.
REGISTRIES = {
    "data": SOURCES,
    "tokenizer": TOKENIZERS,
    "process": PROCESSES,
    "process.schedule": SCHEDULES,
    "process.schedule.base": SCHEDULES,
    "objective": OBJECTIVES,
    "network": NETWORKS,
    "optim": OPTIMIZERS,
    "eval.objective": {"auto": Tightest, **OBJECTIVES},
    "sample": SAMPLERS,
}
CLASSES = {
    "data": (DataOptions,),
    "train": (TrainOptions,),
    "mesh": (MeshOptions,),
    "eval": (EvalOptions,),
    "sample": (SampleOptions, PromptOptions, Transform),
    "checkpoint": (CheckpointOptions,),
    "log": (LogOptions,),
    "bench": (BenchOptions,),
    "plan": (PlanOptions,),
}
# Arguments that build supplies itself, or that a nested section makes.
SUPPLIED = ("vocab_size", "transform", "schedule", "base", "objective")


def arguments_of(section: str, name: str | None) -> dict[str, Any]:
    """The keys that a section may have, with their types; UserError for an unknown name."""
    takers = list(CLASSES.get(section, ()))
    if section in REGISTRIES:
        if name not in REGISTRIES[section]:
            raise unknown(f"{section}.name", str(name), list(REGISTRIES[section]))
        takers.append(REGISTRIES[section][name])
    found = {}
    for taker in takers:
        found |= {f.name: f.type for f in dataclasses.fields(taker) if f.init}
        found |= {k: v for k, v in typing.get_type_hints(taker).items() if k in found}
    return {k: v for k, v in found.items() if k not in ("vocab_size", "transform")}


def keeps(section: str, name: str, key: str) -> bool:
    """Whether a section keeps that key when it gets that name."""
    return section not in REGISTRIES or key in arguments_of(section, name)


def check_keys(config: Mapping[str, Any]) -> None:
    """UserError for an unknown, missing or wrongly typed section or key."""
    top = {path for path in [*REGISTRIES, *CLASSES] if "." not in path}
    for section in config:
        if section not in top:
            raise unknown("config section", section, sorted(top))
    for section in sorted(top):
        if section not in config:
            raise UserError(f"the config has no section {section!r}; start from configs/base.py")
        _check_section(section, config[section])


def _check_section(path: str, section: Any) -> None:
    if not isinstance(section, Mapping):
        raise UserError(f"{path} must be a section (a dict), not {section!r}")
    known = arguments_of(path, section.get("name"))
    for key, value in section.items():
        nested = f"{path}.{key}"
        if key == "name" and path in REGISTRIES:
            continue
        if nested in REGISTRIES:
            _check_section(nested, value)
        elif key not in known or key in SUPPLIED:
            takes = [*known, *(["name"] if path in REGISTRIES else [])]
            raise unknown(f"key in {path}", key, takes)
        elif not _fits(value, known[key]):
            raise UserError(f"{nested} must be {_spell(known[key])}, not {value!r}")


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a config value has an annotated type; whole numbers are floats too."""
    if isinstance(wanted, types.UnionType) or typing.get_origin(wanted) is typing.Union:
        return any(_fits(value, option) for option in typing.get_args(wanted))
    if typing.get_origin(wanted) is tuple:
        return isinstance(value, (tuple, list)) and all(
            _fits(item, typing.get_args(wanted)[0]) for item in value
        )
    if wanted in (None, type(None)):
        return value is None
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted) if wanted in (bool, str) else False


def _spell(wanted: Any) -> str:
    options = [o for o in typing.get_args(wanted) or (wanted,) if o in (bool, int, float, str)]
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return " or ".join(dict.fromkeys(words[o] for o in options)) or str(wanted)


def make(path: str, section: Mapping[str, Any], **supplied: Any) -> Any:
    """The object of a section with a name: nested sections are made first."""
    constructor = REGISTRIES[path][section["name"]]
    takes = inspect.signature(constructor).parameters
    arguments = dict(supplied)
    for key, value in section.items():
        if f"{path}.{key}" in REGISTRIES:
            arguments[key] = make(f"{path}.{key}", value)
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


def fields(cls: type, section: Mapping[str, Any]) -> Any:
    """An options class from those keys of a section that it has."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in section.items() if key in names})


def load_config(
    path: str | None, assignments: Mapping[str, str], workdir: Place | None = None
) -> dict[str, Any]:
    """A config file with its overrides applied and its keys checked.

    Without a file the config of the run in workdir, in which only what is free may be changed;
    UserError if there is neither.
    """
    kept = None if path or workdir is None else config_lib.stored(workdir)
    if not path and kept is None:
        where = "no --workdir of a run" if workdir is None else f"no run in --workdir {workdir}"
        raise UserError(
            f"there is no --config and {where}: give --config FILE, one of configs/, to start a "
            "run, or the --workdir of a run, whose own config is taken then"
        )
    config = config_lib.load(path) if path else copy.deepcopy(kept)
    if kept is not None:  # a run of a version that did not have these modes yet
        for name, options in (("bench", BenchOptions()), ("plan", PlanOptions())):
            config[name] = dataclasses.asdict(options) | config.get(name, {})
    config_lib.override(config, assignments, keeps)
    check_keys(config)
    if kept is not None:
        config_lib.check_same(kept, config, workdir)
    return config
