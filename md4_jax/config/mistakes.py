"""Collects the mistakes of a config, so that one error names all of them."""

import textwrap
from collections.abc import Callable, Sequence
from typing import TypeVar

from md4_jax.protocols import UserError

T = TypeVar("T")
# Advice for data that differ from those of a run.
ELSEWHERE = (
    "To evaluate this run on another text, add an evaluator with data of its own: --mode eval "
    "--evals other --config.evals.other.name=likelihood --config.evals.other.split=all "
    "--config.evals.other.data.name=text --config.evals.other.data.path=FILE"
)


class Mistakes(UserError):
    """Several mistakes; `messages` has one text for each."""

    def __init__(self, messages: tuple[str, ...]) -> None:
        items = [textwrap.indent(text, "    ").replace("    ", "  - ", 1) for text in messages]
        super().__init__(f"there are {len(messages)} mistakes:\n" + "\n".join(items))
        self.messages = messages


def all_of(*calls: Callable[[], T]) -> list[T]:
    """Makes all calls and returns their results; UserError if any call raises one.

    A single error is raised unchanged. Several are raised as Mistakes with the distinct messages.
    No call may rely on the checks of another one.
    """
    results, errors = [], []
    for call in calls:
        try:
            results.append(call())
        except UserError as error:
            errors.append(error)
    found = [text for error in errors for text in texts(error)]
    different = tuple(dict.fromkeys(found))
    if len(different) > 1:
        raise Mistakes(different) from errors[0]
    if errors:
        raise errors[0]
    return results


def messages_of(call: Callable[[], object]) -> tuple[str, ...]:
    """Returns the message of each mistake that a call raises."""
    try:
        call()
    except UserError as error:
        return texts(error)
    return ()


def raise_all(said: Sequence[str], cause: Exception | None = None) -> None:
    """Raises one UserError with all messages; does nothing if there are none."""
    if said:
        raise Mistakes(tuple(said)) if len(said) > 1 else UserError(said[0]) from cause


def texts(error: UserError) -> tuple[str, ...]:
    """Returns the message of each mistake that an error names."""
    return getattr(error, "messages", (str(error),))
