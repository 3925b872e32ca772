"""Phrases of messages: numbers with their nouns, and standard errors."""

import math

# Said in place of a standard error that is not known.
TOO_FEW = "too few for a standard error"


def amount(number: int, noun: str, form: str = "") -> str:
    """Returns a number with its noun, in the plural unless it is 1: '1 sequence', '2 batches'.

    form: format of the number, such as ","
    """
    return f"{number:{form}} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Returns the plural of an English noun that is formed regularly."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def plus_minus(error: float | None, form: str) -> str:
    """Returns ' +- 0.012', or nothing for an unknown error, which is None or NaN."""
    is_known = error is not None and math.isfinite(error)
    return f" +- {error:{form}}" if is_known else ""
