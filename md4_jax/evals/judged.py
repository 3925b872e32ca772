"""Texts as token sequences of a judge, and their costs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from md4_jax.data.tokenizers import END_OF_TEXT


class Judged(NamedTuple):
    """Costs of N texts under a judge, in its own tokens.

    nats  float64 [N], sum of -log p of the tokens that count
    size  int64 [N], number of these tokens
    ids   tokens of each text, the first one included
    """

    nats: np.ndarray
    size: np.ndarray
    ids: list[np.ndarray]


def encoded(encode: Callable[[str], np.ndarray], text: str, end: int) -> np.ndarray:
    """Returns the tokens of a text, with the id `end` for each END_OF_TEXT in it."""
    first, *others = [np.asarray(encode(part), np.int32) for part in text.split(END_OF_TEXT)]
    return np.concatenate([first, *(np.append(np.int32(end), part) for part in others)])


def decoded(decode: Callable[[np.ndarray], str], ids: np.ndarray, end: int | None) -> str:
    """Returns the text of tokens, with END_OF_TEXT for the id `end`, whatever its own text."""
    if end is None:
        return decode(ids)
    parts = np.split(ids, np.flatnonzero(ids == end))
    return END_OF_TEXT.join(decode(part[part != end]) for part in parts)


def text_size(text: str) -> tuple[int, int]:
    """Returns the numbers of UTF-8 bytes and of words of a text, without END_OF_TEXT."""
    parts = text.split(END_OF_TEXT)
    return sum(len(x.encode("utf-8")) for x in parts), sum(len(x.split()) for x in parts)


def cut(ids: Sequence[np.ndarray], length: int, end: int | None) -> list[np.ndarray]:
    """Cuts each text to at most `length` tokens, and after its first end-of-text token.

    end: the token of the end of text; None: all tokens stay
    """
    found = []
    for row in ids:
        row = np.asarray(row, np.int32)[:length]
        # An end-of-text token at the start begins the text.
        ended = np.flatnonzero(row[1:] == end) if end is not None else []
        found.append(row[: ended[0] + 2] if len(ended) else row)
    return found


def padded(ids: Sequence[np.ndarray], fill: int, length: int, begin: int = 0) -> np.ndarray:
    """Pads rows to int32 [N, length], with `fill` in the first `begin` columns and after a text."""
    found = np.full((len(ids), length), fill, np.int32)
    for row, own in zip(found, ids, strict=True):
        row[begin : begin + len(own)] = own
    return found
