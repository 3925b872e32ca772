"""Classes of other packages: package.module:attribute instead of a registered name.

Importing a module runs its code. A name that the user wrote, in a config file or on the command
line, is imported. A name from the files of a run is imported only if the user trusts its package
with --trust PACKAGE. `allow` registers both for the process; nothing else is imported.
"""

import dataclasses
import importlib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from md4_jax.config.load import flatten, unknown
from md4_jax.data.names import NotTrusted
from md4_jax.protocols import UserError

# Full names that the user wrote, and packages that the user trusts.
_allowed: set[str] = set()

# Attributes or fields that a class needs in each kind of section.
CONTRACTS = {
    "data": ("fingerprint", "warnings"),
    "tokenizer": (
        "fit", "encode", "decode", "to_json", "vocab_size", "eot_id", "separator", "is_character",
    ),
    "process": (
        "vocab_size", "timesteps", "shows_clean", "init", "corrupt", "prior", "is_noise",
        "noise_left", "signal", "learned",
    ),
    "process.schedule": ("alpha", "one_minus_alpha", "dalpha", "inverse"),
    "process.schedule.base": ("alpha", "one_minus_alpha", "dalpha", "inverse"),
    "process.insertion": ("alpha", "one_minus_alpha", "dalpha", "inverse"),
    "process.insertion.base": ("alpha", "one_minus_alpha", "dalpha", "inverse"),
    "objective": ("needs", "is_bound", "__call__"),
    "evals.*.objective": ("needs", "is_bound", "__call__"),
    "evals.*.features": ("__call__",),
    "network": ("vocab_size", "build"),
    "optim": ("build",),
    "sample": ("needs", "level", "transform", "__call__"),
    "sample.reward": ("__call__",),
    "evals.*": ("every", "final", "needs_data", "run"),
}  # fmt: skip

# Methods that a class needs if it has the first one: an ability with half of them has no effect.
ABILITIES = {
    "sample": (
        ("schedule", "per_round", "rounds"),
        ("step_further", "left", "rounds", "finish"),
        ("run_cached", "schedule", "is_cached", "positions_read"),
        ("fill_cached", "filled_in", "is_cached", "positions_read"),
    ),
}


def is_foreign(name: Any) -> bool:
    """Returns whether a name has the form package.module:attribute."""
    return isinstance(name, str) and ":" in name


def allow(names: Iterable[str]) -> None:
    """Allows this process to import these names, or all names of these packages."""
    _allowed.update(names)


def names_in(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the foreign names of a config or of assignments to one."""
    for key, value in flatten(config):
        if key.rpartition(".")[2] == "name" and is_foreign(value):
            yield value


def load(name: str) -> type:
    """Imports the class of a name; NotTrusted if it is not allowed, UserError if that fails."""
    module_name, _, attribute = name.partition(":")
    package = module_name.partition(".")[0]
    if not {name, package} & _allowed:
        raise NotTrusted(
            f"{name!r} is named in the config of a run, and importing it runs code of the package "
            f"{package}: add --trust {package} if you trust it"
        )
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
        raise UserError(f"{name!r} is not of the form package.module:attribute")
    found: Any = _module(name, module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [word for word in vars(found) if not word.startswith("_")]
            raise UserError(f"{name}: {unknown(f'attribute of {module_name}', part, public)}")
        found = getattr(found, part)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise UserError(
            f"{name} must be a dataclass that has one field for each key of its section"
        )
    return found


def _module(name: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{name}: {module_name} imports {error.name}, which is not installed"
            ) from error
        raise UserError(
            f"{name}: Python does not find the module {error.name!r}: install it, start in the "
            "directory that contains it, or set PYTHONPATH"
        ) from error
    except Exception as error:
        raise UserError(
            f"{name}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error


def check_contract(kind: str, key: str, cls: type) -> None:
    """Raises UserError, with the missing attributes, if a class does not fit the section."""
    has = {field.name for field in dataclasses.fields(cls)}
    has |= {word for base in cls.__mro__ for word in vars(base)}
    missing = [word for word in CONTRACTS[kind] if word not in has]
    if missing:
        raise UserError(
            f"{key}={cls.__module__}:{cls.__qualname__} lacks the attributes "
            f"{', '.join(missing)}, which every class of this section must have: see "
            "docs/extending.md"
        )
    for first, *others in ABILITIES.get(kind, ()):
        lacks = [word for word in others if word not in has]
        if lacks and callable(getattr(cls, first, None)):
            raise UserError(
                f"{key}={cls.__module__}:{cls.__qualname__} is not complete: it has {first}, and "
                f"no {', '.join(lacks)}, which belong together: see docs/extending.md"
            )
    try:
        typing.get_type_hints(cls)
    except Exception as error:
        raise UserError(f"{key}: the types of its fields cannot be read: {error}") from error
