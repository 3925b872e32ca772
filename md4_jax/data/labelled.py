"""Texts with labels: each is one sequence, cut or padded, with the class as context."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from md4_jax.data import packing
from md4_jax.data.sequences import Rows
from md4_jax.protocols import UserError

MOST_CLASSES = 1 << 16


class Labelled(NamedTuple):
    """Text with its label (a name or a whole number) and its origin for messages."""

    text: str
    label: str | int
    where: str


class Padding(NamedTuple):
    """Padding of a row after a shorter text.

    end     ids that end a text: the end-of-text token, or none
    counts  whether the padding consists of end-of-text tokens that count, so that a model learns
            the lengths of texts (LLaDA, arXiv:2502.09992); otherwise padding does not count
    """

    end: tuple[int, ...] = ()
    counts: bool = False

    @classmethod
    def of(cls, tokenizer: Any, kind: str) -> "Padding":
        """Makes the padding of data.padding; UserError if it needs an end of text but has none."""
        end = () if tokenizer.eot_id is None else (int(tokenizer.eot_id),)
        if kind == "end_of_text" and not end:
            raise UserError(
                "data.padding='end_of_text' needs a tokenizer with an end-of-text token, and the "
                "one of this run has none: set data.padding='hidden'"
            )
        return cls(end, kind == "end_of_text")

    @property
    def facts(self) -> list[Any]:
        """Returns what the name of stored rows depends on; [] for rows of older versions."""
        return [*self] if self.counts else []

    def row(self, ids: np.ndarray, length: int) -> np.ndarray:
        """Returns `length` tokens, cut or padded, and the number of them that count."""
        own = np.concatenate([ids, np.array(self.end, int)])[:length].astype(int)
        fill = self.end[0] if self.counts else 0
        filled = np.concatenate([own, np.full(length - len(own), fill)])
        return np.append(filled, length if self.counts else len(own))


def print_cut(what: str, split: str, length: int, cut: int, made: int) -> None:
    """Prints how many of the `made` texts of a split were cut."""
    if cut:
        print(
            f"{cut:,} of {made:,} {what} of the {split} split are cut: they have more than "
            f"data.length={length} tokens",
            flush=True,
        )


def own_sequences(source: Any) -> bool:
    """Returns whether each text of a source is one sequence: with a label, a prompt or messages."""
    keys = ("label_key", "prompt_key", "messages_key")
    return any(getattr(source, key, "") for key in keys)


def check_rejected(source: Any, padding: Padding) -> bool:
    """Returns whether a source has rejected answers; UserError if their padding does not count."""
    key = getattr(source, "rejected_key", "")
    if key and not padding.counts:
        raise UserError(
            f"data.rejected_key={key!r} needs data.padding='end_of_text', so that the loss counts "
            "the same number of tokens for both answers to a prompt"
        )
    return bool(key)


def classes(texts: Iterable[Labelled]) -> tuple[str, ...] | tuple[int, ...]:
    """Returns the labels of a training split in the order of their classes.

    Names are sorted. Whole numbers are the classes themselves, from 0 to the largest.
    Raises UserError for labels of both kinds, and for numbers that are not valid classes.
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
                f"{found[numbers[0]]} it is the number {numbers[0]}; use only names or only "
                "numbers"
            )
        if not 0 <= label < MOST_CLASSES:
            raise UserError(
                f"data.label_key: the label in {where} is {label}. Numbers are classes, which "
                f"lie in 0..{MOST_CLASSES - 1}; write other labels as text"
            )
    return tuple(range(max(numbers) + 1))


def rows(source: Any, domain: Any, split: str, length: int, padding: Padding) -> Rows:
    """Returns the texts of a split as rows of `length` tokens with context `label`.

    A text ends with the tokenizer's end of text, if it has one. Longer texts are cut, and their
    number is printed; shorter ones are padded. Texts are tokenised once and stored on disk.

    Raises UserError for a label that the training split does not have.
    """
    tokenizer, numbers = domain.tokenizer, {name: k for k, name in enumerate(domain.labels)}
    size = max(tokenizer.vocab_size, length + 1, len(numbers))
    described = [source.fingerprint(), tokenizer.to_json(), split]
    described += ["rows", length, domain.labels, *padding.facts]
    pieces = lambda: _pieces(source, tokenizer, split, length, padding, numbers)  # noqa: E731
    kept = packing.kept(source, described, size, split, pieces)
    found = packing.opened(*kept).reshape(-1, length + 2)
    return Rows(found[:, :length], {"label": found[:, length + 1]}, found[:, length])


def of_documents(source: Any, domain: Any, split: str, length: int, padding: Padding) -> Rows:
    """Returns the documents of a split, without labels, as rows of `length` tokens; see `rows`."""
    tokenizer = domain.tokenizer
    described = [source.fingerprint(), tokenizer.to_json(), split]
    described += ["documents", length, *padding.facts]

    def pieces() -> Iterator[np.ndarray]:
        made = cut = 0
        for ids in packing.encoded(source, tokenizer, split, source.documents(split)):
            made, cut = made + 1, cut + (len(ids) > length)
            yield padding.row(ids, length)
        print_cut("documents", split, length, cut, made)

    size = max(tokenizer.vocab_size, length + 1)
    kept = packing.kept(source, described, size, split, pieces)
    found = packing.opened(*kept).reshape(-1, length + 1)
    return Rows(found[:, :length], lengths=found[:, length])


def _pieces(
    source: Any,
    tokenizer: Any,
    split: str,
    length: int,
    padding: Padding,
    numbers: dict[str | int, int],
) -> Iterator[np.ndarray]:
    """Yields rows: `length` tokens, the number of them that count, and the class."""
    texts = (text.text for text in source.labelled(split))
    ids_of_each = packing.encoded(source, tokenizer, split, texts)
    made = cut = 0
    for ids, text in zip(ids_of_each, source.labelled(split), strict=True):
        if text.label not in numbers:
            known = ", ".join(map(repr, [*numbers][:20]))
            raise UserError(
                f"{text.where}, of the {split} split, has the label {text.label!r}, which does "
                "not occur in the train split. The labels of the train split are "
                f"{known or 'none'}"
            )
        made, cut = made + 1, cut + (len(ids) > length)
        yield np.append(padding.row(ids, length), numbers[text.label])
    print_cut("texts", split, length, cut, made)
