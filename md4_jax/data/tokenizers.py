"""Conversion of text to token ids and back.

Every tokenizer has
    vocab_size    ids are 0..vocab_size-1; vocab_size itself is the mask
    eot_id        the id that ends a document, or None
    separator     text between documents if no token ends them
    is_character  whether each token is a character; bits per token are then bits per character
and the methods of `Tokenizer`. A custom tokenizer is a frozen dataclass that inherits from
`Tokenizer` and has these attributes, `encode` and `join`. Its name is package.module:class.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable

import numpy as np

from md4_jax.data.byte_pairs import END_OF_TEXT, BytePairs
from md4_jax.data.names import Load, class_of
from md4_jax.data.proteins import Proteins
from md4_jax.data.tokenizer_base import Tokenizer, UnknownCharacter, id_dtype
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount

_SYMBOLS = " abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Text8Symbols(Tokenizer):
    """The 27 symbols of text8: the space is 0, 'a'..'z' are 1..26."""

    name = "text8"
    vocab_size = len(_SYMBOLS)
    eot_id = None
    separator = " "
    is_character = True

    def encode(self, text: str) -> np.ndarray:
        """Returns uint8 [L]; UserError for the first symbol that is not one of the 27."""
        raw = text.encode("utf-8", "surrogatepass")
        ids = _symbol_ids()[np.frombuffer(raw, np.uint8)]
        wrong = np.flatnonzero(ids == self.vocab_size)
        if wrong.size:
            offset = int(wrong[0])  # all before it are ASCII, so a character starts here
            character = text[offset]
            raise UnknownCharacter(
                f"the text8 tokenizer knows only 'a' to 'z' and the space, but the text has "
                f"{character!r} at byte offset {offset}. For other text use 'characters' or 'bpe'."
            )
        return ids

    def join(self, ids: np.ndarray) -> str:
        return np.frombuffer(_SYMBOLS.encode(), np.uint8)[ids].tobytes().decode("ascii")


@functools.cache
def _symbol_ids() -> np.ndarray:
    """Returns the id of each byte value; 27 for a byte that is not a symbol."""
    table = np.full(256, len(_SYMBOLS), np.uint8)
    table[list(_SYMBOLS.encode())] = np.arange(len(_SYMBOLS))
    return table


@dataclasses.dataclass(frozen=True)
class Characters(Tokenizer):
    """One token per character; ids follow the order of the alphabet.

    alphabet  the characters; None: `fit` learns them from the training split
    spare     number of ids after the alphabet without a character, such as the two of
              process.name='resizing'
    """

    alphabet: str | None = None
    spare: int = 0

    name = "characters"
    eot_id = None
    is_character = True

    def __post_init__(self):
        if self.alphabet is not None and len(set(self.alphabet)) != len(self.alphabet):
            raise UserError("tokenizer.alphabet names a character twice")
        if self.spare < 0:
            raise UserError(f"tokenizer.spare must not be negative, not {self.spare}")

    def fit(self, documents: Iterable[str]) -> "Characters":
        """Returns a tokenizer with the characters of the documents, in code point order.

        If the alphabet was given, it is unchanged.
        """
        if self.alphabet is not None:
            return self
        found = set().union(*documents)
        if not found:
            raise UserError(
                "there are no characters to learn an alphabet from: all texts to train on are "
                "empty. Check data.path"
            )
        return Characters("".join(sorted(found)), self.spare)

    def to_json(self) -> str:
        """Returns a JSON object; `spare` is omitted if it is 0."""
        spare = {"spare": self.spare} if self.spare else {}
        return json.dumps({"name": self.name, "alphabet": self.alphabet, **spare})

    @property
    def vocab_size(self) -> int:
        return len(self._fitted()) + self.spare

    @property
    def separator(self) -> str:
        return "\n" if "\n" in self._fitted() else ""

    def encode(self, text: str) -> np.ndarray:
        """Returns ids [L]; UserError for the first character outside the alphabet."""
        alphabet, order = self._code_points
        points = _code_points(text)
        place = np.minimum(np.searchsorted(alphabet, points), alphabet.size - 1)
        wrong = np.flatnonzero(alphabet[place] != points)
        if wrong.size:
            offset = int(wrong[0])
            raise UnknownCharacter(
                f"the character {text[offset]!r} at offset {offset} is not in the alphabet of "
                f"{amount(len(alphabet), 'character')}, {self._shown()}. A trained model cannot "
                "use others: remove the character. For a new run set tokenizer.alphabet, or it "
                "becomes the characters of the training split; tokenizer.name='bytes' accepts "
                "every text"
            )
        return order[place]

    def _shown(self) -> str:
        """Returns the alphabet for an error message, shortened if it is long."""
        known = self._fitted()
        return repr(known if len(known) <= 100 else f"{known[:100]}...")

    def join(self, ids: np.ndarray) -> str:
        points, ids = _code_points(self._fitted()), np.asarray(ids)
        return points[ids[ids < len(points)]].tobytes().decode("utf-32-le", "surrogatepass")

    def _fitted(self) -> str:
        if not self.alphabet:
            raise UserError(
                "the characters tokenizer has no alphabet yet: set tokenizer.alphabet, or fit it "
                "to the training split"
            )
        return self.alphabet

    @functools.cached_property
    def _code_points(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sorted code points of the alphabet, and the id of each."""
        points = _code_points(self._fitted())
        order = np.argsort(points)
        return points[order], order.astype(id_dtype(self.vocab_size))


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


@dataclasses.dataclass(frozen=True)
class Bytes(Tokenizer):
    """Bytes of UTF-8, 0..255, and 256 for the end of a text."""

    name = "bytes"
    vocab_size = 257
    eot_id = 256
    separator = ""
    is_character = False

    def encode(self, text: str) -> np.ndarray:
        """Returns uint16 [number of bytes]."""
        raw = text.encode("utf-8", "surrogatepass")
        return np.frombuffer(raw, np.uint8).astype(id_dtype(self.vocab_size))

    def spellings(self) -> list[bytes]:
        """Returns the byte of each token, and the name of the end-of-text token."""
        return [*(bytes([i]) for i in range(256)), END_OF_TEXT.encode()]

    def join(self, ids: np.ndarray) -> str:
        cuts = np.flatnonzero(ids == self.eot_id)
        runs = np.split(ids, cuts)
        pieces = [run[run != self.eot_id].astype(np.uint8).tobytes() for run in runs]
        return END_OF_TEXT.join(piece.decode("utf-8", "replace") for piece in pieces)


def from_json(text: str, load: Load | None = None):
    """Makes the tokenizer that `to_json` wrote.

    load  finds the class of a name that is not built in, such as package.module:attribute

    UserError for a definition that refers to other files or the hub, because it may be untrusted.
    """
    fields = json.loads(text)
    if fields["name"] == BytePairs.name and (fields.keys() & {"path", "hub"}):
        raise UserError("it refers to other files instead of containing the vocabulary")
    built_in = {kind.name: kind for kind in (Text8Symbols, Characters, Bytes, BytePairs, Proteins)}
    return class_of(fields.pop("name"), built_in, "tokenizer", load)(**fields)
