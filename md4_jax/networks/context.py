"""Context of a network: its inputs for each sequence other than symbols and time."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from md4_jax.networks.condition import TIME_EMBEDDINGS
from md4_jax.networks.dropout import LABEL, folded, kept
from md4_jax.protocols import Array, UserError


def checked_context(
    options: Any, context: Mapping[str, Array] | None, keys: Array | None, takes: tuple[str, ...]
) -> dict[str, Array]:
    """Returns the context; in training some labels are hidden: replaced by `classes`.

    options  has classes and label_dropout
    takes    names that the network can use; UserError for others
    """
    found = dict(context or {})
    if foreign := found.keys() - set(takes):
        raise UserError(
            f"the network has the inputs {' and '.join(takes)}, not {sorted(foreign)[0]!r}"
        )
    if "label" not in found:
        return found
    if not options.classes:
        raise UserError(
            "the data have labels, but network.classes=0: set network.classes to the number of "
            "classes to train on the labels"
        )
    if keys is not None and options.label_dropout:
        hidden = ~kept(folded(keys, LABEL), options.label_dropout, ())
        found["label"] = jnp.where(hidden, options.classes, found["label"])
    return found


def label_rows(table: Array, label_B: Array | None, batch: int) -> Array:
    """Returns the vectors of the classes, [B, C]; the last row of the table is for no label.

    None, or any number that is not a class, means no label.
    """
    classes = len(table) - 1
    if label_B is None:
        label_B = jnp.full(batch, classes)
    known_B = (label_B >= 0) & (label_B < classes)
    return table[jnp.where(known_B, label_B, classes)]


def check_options(
    options: Any, choices: Mapping[str, tuple[str, ...]], rates: tuple[str, ...], **least: int
) -> None:
    """Raises UserError for a value outside its range, and for a single ordered symbol.

    choices, rates, least  see `check_choices`, `check_rates` and `check_least`
    """
    check_choices(options, choices)
    check_rates(options, *rates)
    check_least(options, **least)
    if getattr(options, "time_conditioning", False) and hasattr(options, "condition"):
        form = TIME_EMBEDDINGS[options.time_embedding]
        width = form.width or options.condition or options.size
        if width < 4:  # the frequencies of its sinusoids would be 0 / 0
            raise UserError(
                f"the time embedding has {width} features, but needs at least 4: raise "
                "network.condition, or network.size if network.condition=0"
            )
    if options.output == "truncated_logistic" and options.vocab_size < 2:
        raise UserError(
            "network.output=truncated_logistic needs at least two symbols, not a vocabulary of "
            f"{options.vocab_size}"
        )


def check_least(options: Any, **least: int) -> None:
    """Raises UserError for a number below the least that its key allows."""
    for key, smallest in least.items():
        if getattr(options, key) < smallest:
            allowed = f"be at least {smallest}" if smallest else "not be negative"
            raise UserError(f"network.{key} must {allowed}, not {getattr(options, key)}")


def check_fixed(options: Any, name: str, fixed: Mapping[str, Any]) -> None:
    """Raises UserError for a key that differs from the only value that a network supports.

    name   network.name
    fixed  {key: its value}
    """
    for key, fits in fixed.items():
        if getattr(options, key) != fits:
            raise UserError(
                f"network.name={name!r} needs network.{key}={fits!r}, not {getattr(options, key)!r}"
            )


def check_rates(options: Any, *names: str) -> None:
    """Raises UserError for a dropout rate outside [0, 1)."""
    for key in names:
        if not 0 <= getattr(options, key) < 1:
            raise UserError(f"network.{key} must lie in [0, 1), not {getattr(options, key)}")


def check_choices(options: Any, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raises UserError for a value that is not among the choices of its key."""
    for key, known in choices.items():
        if getattr(options, key) not in known:
            names = f"{', '.join(known[:-1])} or {known[-1]}"
            raise UserError(f"network.{key} must be {names}, not {getattr(options, key)!r}")
