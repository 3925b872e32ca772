"""Scopes of a program, by which it says to --mode plan what its text does not."""

import contextlib

import jax

# A conditional in this scope nearly always takes its most expensive branch.
LIKELY = "likely"
# A loop in this scope runs about as often as the number after it.
TURNS = "turns_"


def likely() -> contextlib.AbstractContextManager:
    """Says of a conditional in this context that it nearly always takes its most expensive branch.

    It does not say so of conditionals inside its branches.
    """
    return jax.named_scope(LIKELY)


def turns(number: int) -> contextlib.AbstractContextManager:
    """Says of a loop in this context about how often it runs.

    For loops whose number of turns depends on the data.
    """
    return jax.named_scope(f"{TURNS}{number}")
