"""Values of config keys: their types and their spelling on the command line."""

import ast
import types
import typing
from typing import Any


def fits(value: Any, wanted: Any) -> bool:
    """Returns whether a value has the annotated type; an int is also accepted as a float."""
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
    """Returns a description of a type in words, for messages."""
    if typing.get_origin(wanted) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(wanted)))}"
    if typing.get_origin(wanted) is tuple:
        whole = "whole " if int in typing.get_args(wanted) else ""
        return f"a list of {whole}numbers, such as 1,2"
    options = [o for o in typing.get_args(wanted) or (wanted,) if o in (bool, int, float, str)]
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return " or ".join(dict.fromkeys(words[o] for o in options)) or str(wanted)


def parse(text: str, current: Any) -> Any:
    """Parses a text from the command line; it remains text if the current value is text.

    If the current value is a whole number, 1e6 is accepted too.
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
