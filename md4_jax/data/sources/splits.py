"""Splits of an ordered corpus: train, validation and test, in this order, without overlap."""

import hashlib
import json
from typing import Any

from md4_jax.protocols import UserError

SPLITS = ("train", "validation", "test")
# The whole corpus, for evaluation.
ALL = "all"


class NoText(UserError):
    """Raised if a split has no text or no file."""


class NoFile(NoText):
    """Raised if there is no file at all."""


def check_split(split: str) -> None:
    """Raises UserError if `split` is not one of the three, or `all`."""
    if split not in (*SPLITS, ALL):
        raise UserError(f"unknown split {split!r}; there are {', '.join(SPLITS)} and {ALL}")


def bounds(total: int, split: str, *, validation: float, test: float, unit: str) -> tuple[int, int]:
    """Returns the half-open range [start, stop) of `split` among `total` units.

    An amount below 1 is a fraction of the total; an amount of 1 or more is a number of units. Test
    is the end of the corpus, validation comes before it, and train is the rest; `all` is the whole.

    Raises UserError if an amount is negative or not whole (such as 1.5), or if nothing is left for
    training.
    """
    check_split(split)
    if split == ALL:
        return 0, total
    held_out = [_amount(total, validation, "validation"), _amount(total, test, "test")]
    train = total - sum(held_out)
    if not total:
        raise NoText(f"the data contain no {unit}: check data.path")
    if train < 1:
        raise UserError(
            f"validation takes {held_out[0]} and test {held_out[1]} of {total} {unit}: nothing is "
            "left to train on. Reduce data.validation or data.test."
        )
    edges = (0, train, train + held_out[0], total)
    index = SPLITS.index(split)
    return edges[index], edges[index + 1]


def with_test(
    total: int, split: str, *, validation: float, test: float, unit: str
) -> list[tuple[str, int, int | None]]:
    """Returns the parts (section, start, stop) of a split, for data with a separate test section.

    total  number of units of the section "train"

    With test = 0 the test split is the whole section "test" (stop is None). Otherwise it is cut
    from the end of "train", and the section "test" is not used.
    """
    check_split(split)
    if split == "test" and not test:
        return [("test", 0, None)]
    parts = [("train", *bounds(total, split, validation=validation, test=test, unit=unit))]
    return parts + ([("test", 0, None)] if split == ALL and not test else [])


def _amount(total: int, amount: float, key: str) -> int:
    if amount < 0:
        raise UserError(f"data.{key} is {amount}; it must be 0 or more")
    if amount >= 1 and amount != int(amount):
        raise UserError(
            f"data.{key} is {amount}; below 1 it is a fraction, and from 1 on a whole number"
        )
    if amount >= 1:
        return int(amount)
    # A fraction above 0 gives at least one unit.
    return max(1, round(total * amount)) if amount > 0 else 0


def digest(*facts: Any) -> str:
    """Returns a hash of JSON-serialisable facts, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
