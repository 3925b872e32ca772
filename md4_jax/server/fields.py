"""Fields of a request, validated before use; a UserError tells what is allowed."""

import base64
import binascii
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from md4_jax.protocols import UserError

Asked = Mapping[str, Any]


def check_keys(asked: Any, known: Iterable[str]) -> None:
    """Raises UserError unless the request is an object with no other keys."""
    known = list(known)
    if not isinstance(asked, dict):
        raise UserError("a request must be a JSON object")
    for key in asked:
        if key not in known:
            raise UserError(f"unknown field {_shown(key)}; the fields are {', '.join(known)}")


def text(asked: Asked, key: str) -> str:
    """Returns a text, '' if missing; UserError if UTF-8 cannot encode it."""
    value = asked.get(key, "")
    if not isinstance(value, str):
        raise UserError(f"{key} must be text, not {_shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        said = f"{key} contains half of a surrogate pair, which is not a character"
        raise UserError(said) from error
    return value


def choice(asked: Asked, key: str, options: Collection[Any], default: Any) -> Any:
    """Returns one of the options."""
    value = asked.get(key, default)
    # A list is not hashable, and True equals 1.
    if isinstance(value, bool) or not isinstance(value, int | str) or value not in options:
        allowed = ", ".join(map(str, options))
        raise UserError(f"{key} must be one of {allowed}, not {_shown(value)}")
    return value


def whole(asked: Asked, key: str, default: int, least: int, most: int) -> int:
    """Returns a whole number between least and most."""
    value = asked.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{key} must be a whole number from {least} to {most}, not {_shown(value)}")
    return value


def number(asked: Asked, key: str, default: float, least: float, most: float) -> float:
    """Returns a number between least and most."""
    value = asked.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise UserError(f"{key} must be a number from {least:g} to {most:g}, not {_shown(value)}")
    return float(value)


def places(asked: Asked, key: str, count: int) -> np.ndarray:
    """Returns the marked positions, bool [count], from a list of their indices."""
    value = asked.get(key, [])
    fits = isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < count for n in value
    )
    if not fits:
        raise UserError(f"{key} must be a list of positions below {count}, not {_shown(value)}")
    marked = np.zeros(count, bool)
    marked[value] = True
    return marked


def symbols(asked: Asked, key: str, count: int, below: int) -> np.ndarray | None:
    """Returns `count` whole numbers from 0 to below - 1, int32 [count]; None if missing."""
    value = asked.get(key)
    if value is None:
        return None
    fits = (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < below for n in value)
    )
    if not fits:
        raise UserError(f"{key} must be {count} whole numbers below {below}, not {_shown(value)}")
    return np.array(value, np.int32)


def octets(asked: Asked, key: str, count: int) -> np.ndarray | None:
    """Returns `count` bytes from base64, uint8 [count]; None if missing."""
    value = text(asked, key)
    if not value:
        return None
    try:
        found = base64.b64decode(value, validate=True)
    except (ValueError, binascii.Error) as error:
        raise UserError(f"{key} must be base64, not {_shown(value)}") from error
    if len(found) != count:
        raise UserError(f"{key} must have {count} bytes, not {len(found)}")
    return np.frombuffer(found, np.uint8)


def _shown(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:60]}..."
