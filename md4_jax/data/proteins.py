"""Tokenizer of proteins: the vocabulary of ESM-2 and DPLM, one letter per residue."""

import dataclasses
import functools
import re

import numpy as np

from md4_jax.data.tokenizer_base import Tokenizer, UnknownCharacter
from md4_jax.protocols import UserError

MASK = "<mask>"
# In the order of ESM-2's vocab.txt. B, Z: D or N, E or Q; U, O: selenocysteine, pyrrolysine;
# X: any residue; . and -: gaps of an alignment.
ENTRIES = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", MASK)
SYMBOLS = ENTRIES[:-1]
_NUMBERS = {entry: number for number, entry in enumerate(SYMBOLS)}
_TOKENS = re.compile("|".join(map(re.escape, SYMBOLS)))


@dataclasses.dataclass(frozen=True)
class Proteins(Tokenizer):
    """Residues as capital letters, with the ids of ESM-2's vocabulary; its last id is the mask.

    unknown  entry for letters outside the vocabulary, such as J, * or a lower-case letter: "X", or
             "<unk>" as in ESM. "": such a letter is an error

    Entries of several characters, such as <unk>, are written literally. There is no end-of-text
    token: network.name="esm" adds the tokens at both ends of a protein.
    """

    unknown: str = ""

    name = "proteins"
    vocab_size = len(SYMBOLS)
    eot_id = None
    separator = ""
    is_character = True

    def __post_init__(self):
        if self.unknown and self.unknown not in _NUMBERS:
            raise UserError(
                f"tokenizer.unknown={self.unknown!r} must be '' or one of {' '.join(SYMBOLS)}"
            )

    def encode(self, text: str) -> np.ndarray:
        """Returns uint8 [residues]; UnknownCharacter for a letter without an entry."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = _letters()[np.minimum(points, 255)]
        if np.all(ids < self.vocab_size):  # only letters
            return ids
        return np.array([*self._pieces(text)], np.uint8)

    def _pieces(self, text: str):
        place = 0
        while place < len(text):
            found = _TOKENS.match(text, place)
            if found is None and not self.unknown:
                raise UnknownCharacter(
                    f"{text[place]!r} at offset {place} is not an amino acid: proteins are "
                    "written in the capital letters "
                    f"{''.join(x for x in SYMBOLS if len(x) == 1)}. Remove it, or set "
                    "tokenizer.unknown='X', which reads such letters as X"
                )
            yield _NUMBERS[found[0] if found else self.unknown]
            place = found.end() if found else place + 1

    def id_of(self, entry: str) -> int | None:
        """Returns the id of an entry, `vocab_size` for the mask; None if there is no such entry."""
        return ENTRIES.index(entry) if entry in ENTRIES else None

    def join(self, ids: np.ndarray) -> str:
        return "".join(SYMBOLS[i] for i in ids)


@functools.cache
def _letters() -> np.ndarray:
    """Returns the id of each code point up to 255; a number above all ids for other characters."""
    table = np.full(256, len(SYMBOLS), np.uint8)
    for entry, number in _NUMBERS.items():
        if len(entry) == 1:
            table[ord(entry)] = number
    return table
