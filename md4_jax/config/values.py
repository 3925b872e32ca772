"""Values of config keys: their types, and how the command line spells them."""

import ast
import types
import typing
from typing import Any


def fits(value: Any, wanted: Any) -> bool:
    """Returns whether a value has the annotated type; whole numbers are floats too."""
    if isinstance(wanted, types.UnionType) or typing.get_origin(wanted) is typing.Union:
        return any(fits(value, option) for option in typing.get_args(wanted))
    if typing.get_origin(wanted) is tuple:
        return isinstance(value, (tuple, list)) and all(
            fits(item, typing.get_args(wanted)[0]) for item in value
        )
    if typing.get_origin(wanted) is typing.Literal:
        return value in typing.get_args(wanted)
    if wanted in (None, type(None)):
        return value is None
    if wanted is Any:
        return True
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted) if wanted in (bool, str) else False


def spelled(wanted: Any) -> str:
    """Returns in words what a type allows, for a message that says so."""
    if typing.get_origin(wanted) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(wanted)))}"
    if typing.get_origin(wanted) is tuple:
        whole = "whole " if int in typing.get_args(wanted) else ""
        return f"a list of {whole}numbers, such as 1,2"
    options = [o for o in typing.get_args(wanted) or (wanted,) if o in (bool, int, float, str)]
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return " or ".join(dict.fromkeys(words[o] for o in options)) or str(wanted)


def parse(text: str, current: Any) -> Any:
    """Parses a text of the command line; it stays text if the current value is text.

    A whole number may be written as 1e6 where the current value is one.
    """
    if isinstance(current, str):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    is_whole = type(current) is int and isinstance(found, float) and found.is_integer()
    return int(found) if is_whole else found
