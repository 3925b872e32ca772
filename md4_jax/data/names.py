"""Classes by the names that a run stores."""

from collections.abc import Callable, Mapping
from typing import Any

from md4_jax.protocols import UserError

# Finds the class of a name like package.module:attribute.
Load = Callable[[str], Any]


class UnknownClass(UserError):
    """Raised if the class of a stored name package.module:attribute is not found."""


class NotTrusted(UnknownClass):
    """Raised if a stored name may not be imported because the user has not allowed it."""


def class_of(name: Any, built_in: Mapping[str, Any], kind: str, load: Load | None) -> Any:
    """Returns the built-in class of that name, or the class that `load` finds.

    kind  kind of the classes, for messages
    load  finds the class of a name like package.module:attribute; UserError if there is none

    Raises UserError for a name that is neither built in nor of that form, and UnknownClass for one
    that `load` does not find.
    """
    if isinstance(name, str) and name in built_in:
        return built_in[name]
    if not isinstance(name, str) or ":" not in name:
        raise UserError(f"no {kind} is called {name!r}; there are {', '.join(built_in)}")
    try:
        if load is None:
            raise UserError("only built-in names can be read here")
        return load(name)
    except NotTrusted:
        raise
    except UserError as error:
        raise UnknownClass(
            f"it was written by the {kind} {name!r}, which cannot be imported: {error}. Make its "
            "module available to Python again, under the same name"
        ) from error


def name_of(cls: type) -> str:
    """Returns package.module:attribute of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"
