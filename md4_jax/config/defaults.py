"""Default values of the keys of a section."""

import dataclasses
from typing import Any

from md4_jax.config.schema import CLASSES, class_of, has_name


def defaults_of(path: str, name: str) -> dict[str, Any]:
    """Returns {key: default} of a section of this name; defaults that are not JSON are omitted."""
    classes = [*CLASSES.get(path, ()), *([class_of(path, name)] if has_name(path) else [])]
    found = {}
    for one in classes:
        for field in dataclasses.fields(one):
            if field.init and field.default is not dataclasses.MISSING:
                default = field.default
                found[field.name] = list(default) if isinstance(default, tuple) else default
    return found
