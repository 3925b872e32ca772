"""Numbers of bytes and words in the text of tokens: docs/training.md, Units."""

import codecs
from collections.abc import Callable
from typing import Any

import numpy as np


class TextSize:
    """Counts the bytes and words of a text, given its tokens in pieces.

    Bytes are those of UTF-8, and words are those of `str.split`. The counts of the pieces add up to
    those of the whole text, wherever it is cut: a word counts in the piece with the last byte of
    its first character. The end-of-text token has no bytes, is not a word, and ends a word.
    """

    def __init__(self, spellings: list[bytes], eot_id: int | None):
        self._spellings, self._eot_id = spellings, eot_id
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside = False  # whether the text so far ends inside a word

    def __call__(self, ids: np.ndarray) -> tuple[int, int]:
        """Returns (bytes, words) of the next tokens [L]."""
        ends = [] if self._eot_id is None else np.flatnonzero(np.asarray(ids) == self._eot_id)
        total_bytes, total_words = 0, 0
        for number, run in enumerate(np.split(ids, ends)):
            if number:
                run = run[1:]
                self._decoder.reset()
                self._inside = False
            raw = b"".join([self._spellings[i] for i in run.tolist()])
            total_bytes += len(raw)
            total_words += self._words(self._decoder.decode(raw))
        return total_bytes, total_words

    def _words(self, text: str) -> int:
        """Counts the words that begin in the text."""
        if not text:
            return 0
        continued = self._inside and not text[0].isspace()
        self._inside = not text[-1].isspace()
        return len(text.split()) - continued


def of_one_text(tokenizer: Any) -> Callable[[np.ndarray], tuple[int, int]] | None:
    """Makes a counter for pieces of one text; None if the bytes of tokens are unknown."""
    spellings = tokenizer.spellings()
    return None if spellings is None else TextSize(spellings, tokenizer.eot_id)


def of_many_texts(tokenizer: Any) -> Callable[[np.ndarray], tuple[int, int]] | None:
    """Makes a counter for separate texts; None if the bytes of tokens are unknown."""
    spellings = tokenizer.spellings()
    if spellings is None:
        return None
    return lambda ids: TextSize(spellings, tokenizer.eot_id)(ids)
