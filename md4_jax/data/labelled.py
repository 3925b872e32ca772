"""Texts with labels: each is one sequence, cut or padded, with its class as context."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from md4_jax.data import packing
from md4_jax.data.sequences import Rows
from md4_jax.protocols import UserError

MOST_CLASSES = 1 << 16


class Labelled(NamedTuple):
    """Text with its label, a name or a whole number, and its origin, for messages."""

    text: str
    label: str | int
    where: str


def classes(texts: Iterable[Labelled]) -> tuple[str, ...] | tuple[int, ...]:
    """Returns the labels of a training split in the order of their classes.

    Names are sorted. Whole numbers are the classes themselves, from 0 to the largest.
    Raises UserError for labels of both kinds, and for numbers that are no classes.
    """
    found: dict[str | int, str] = {}
    for text in texts:
        found.setdefault(text.label, text.where)
    if not found:
        raise UserError("data.label_key: the train split has no documents")
    numbers = [label for label in found if isinstance(label, int)]
    if not numbers:
        return tuple(sorted(found))
    for label, where in found.items():
        if not isinstance(label, int):
            raise UserError(
                f"data.label_key: the label in {where} is the name {label!r}, and in "
                f"{found[numbers[0]]} it is the number {numbers[0]}; use one kind"
            )
        if not 0 <= label < MOST_CLASSES:
            raise UserError(
                f"data.label_key: the label in {where} is {label}. Numbers are classes, which "
                f"lie in 0..{MOST_CLASSES - 1}; write other labels as text"
            )
    return tuple(range(max(numbers) + 1))


def rows(source: Any, domain: Any, split: str, length: int) -> Rows:
    """Returns the texts of a split as rows of `length` tokens with context `label`.

    A text ends with the tokenizer's end of text, if it has one. Longer texts are cut; shorter ones
    are padded, and padding does not count. Texts are tokenised once and kept on disk.

    Raises UserError for a label that the training split does not have.
    """
    tokenizer, numbers = domain.tokenizer, {name: k for k, name in enumerate(domain.labels)}
    size = max(tokenizer.vocab_size, length + 1, len(numbers))
    described = [source.fingerprint(), tokenizer.to_json(), split, "rows", length, domain.labels]
    pieces = lambda: _pieces(source, tokenizer, split, length, numbers)  # noqa: E731
    found = packing.opened(*packing.kept(described, size, split, pieces)).reshape(-1, length + 2)
    return Rows(found[:, :length], {"label": found[:, length + 1]}, found[:, length])


def of_documents(source: Any, domain: Any, split: str, length: int) -> Rows:
    """Returns the documents of a split, without labels, as rows of `length` tokens; see `rows`."""
    tokenizer = domain.tokenizer
    end = [] if tokenizer.eot_id is None else [tokenizer.eot_id]
    described = [source.fingerprint(), tokenizer.to_json(), split, "documents", length]

    def pieces() -> Iterator[np.ndarray]:
        for ids in packing.encoded(source, tokenizer, split, source.documents(split)):
            yield _row(ids, end, length)

    size = max(tokenizer.vocab_size, length + 1)
    found = packing.opened(*packing.kept(described, size, split, pieces)).reshape(-1, length + 1)
    return Rows(found[:, :length], lengths=found[:, length])


def _row(ids: np.ndarray, end: list[int], length: int) -> np.ndarray:
    """Returns `length` tokens, cut or padded, and how many of them count."""
    own = np.concatenate([ids, np.array(end, int)])[:length].astype(int)
    return np.concatenate([own, np.zeros(length - len(own), int), [len(own)]])


def _pieces(
    source: Any, tokenizer: Any, split: str, length: int, numbers: dict[str | int, int]
) -> Iterator[np.ndarray]:
    """Yields rows: `length` tokens, how many of them count, and the class."""
    end = [] if tokenizer.eot_id is None else [tokenizer.eot_id]
    texts = (text.text for text in source.labelled(split))
    ids_of_each = packing.encoded(source, tokenizer, split, texts)
    for ids, text in zip(ids_of_each, source.labelled(split), strict=True):
        if text.label not in numbers:
            known = ", ".join(map(repr, [*numbers][:20]))
            raise UserError(
                f"{text.where}, of the {split} split, has the label {text.label!r}, which no text "
                f"of the train split has; it has {known or 'none'}"
            )
        yield np.append(_row(ids, end, length), numbers[text.label])
