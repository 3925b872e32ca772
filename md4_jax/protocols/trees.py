"""Dataclasses as pytrees."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax

Class = TypeVar("Class", bound=type)


def pytree(*leaves: str) -> Callable[[Class], Class]:
    """Makes a frozen dataclass a pytree: `leaves` are its array fields, all others are static."""

    def register(cls: Class) -> Class:
        static = [f.name for f in dataclasses.fields(cls) if f.name not in leaves]
        return jax.tree_util.register_dataclass(cls, data_fields=leaves, meta_fields=static)

    return register
