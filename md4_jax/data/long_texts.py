"""Encoding of a long text in pieces, with the ids of the whole text."""

import re
from collections.abc import Iterator

PIECE_CHARACTERS = 1 << 20


def space_before(tokenizer) -> str | None:
    """Returns the space with which a word must begin in a text of its own to keep its ids.

    '' for a vocabulary that itself puts a space before each text, as SentencePiece does. None if
    the ids of words depend on those before them.
    """

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    whole, first = ids("a b"), ids("a")
    return next((space for space in (" ", "") if first + ids(space + "b") == whole), None)


def pieces(text: str, space: str | None) -> Iterator[str]:
    """Cuts a long text into pieces, at spaces between two word characters.

    A vocabulary starts a new word there. So the pieces have the same ids as the whole text, and
    memory stays bounded. space: that of `space_before`; None: the text is not cut
    """
    start = 0
    while space is not None and len(text) - start > PIECE_CHARACTERS:
        cut = re.compile(r"(?<=\w) (?=\w)").search(text, start + PIECE_CHARACTERS)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start() + 1 - len(space)
    yield text[start:]
