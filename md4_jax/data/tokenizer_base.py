"""Base class of tokenizers: decoding with masks, JSON, and the bytes of tokens."""

import dataclasses
import json
from collections.abc import Iterable

import numpy as np

from md4_jax.data.names import name_of
from md4_jax.protocols import UserError


def id_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest unsigned type that holds the ids 0..vocab_size-1."""
    return np.min_scalar_type(vocab_size - 1)


class UnknownCharacter(UserError):
    """Raised for a text with a character that is not in the vocabulary of a character tokenizer."""


class Tokenizer:
    """Base class of all tokenizers.

    A subclass defines `encode` (text -> ids) and `join` (ids without the mask -> text).
    """

    @property
    def name(self) -> str:
        """The `tokenizer.name` by which `from_json` finds the class."""
        return name_of(type(self))

    def fit(self, documents: Iterable[str]):
        """Returns the tokenizer fitted to the documents; most tokenizers are returned unchanged."""
        del documents
        return self

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encodes each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids, mask: str = "_") -> str:
        """Returns the text of ids [L]; the mask id, vocab_size, is shown as `mask`.

        Raises UserError for an id outside 0..vocab_size.
        """
        ids = np.asarray(ids, np.int64).reshape(-1)
        if ids.size and not 0 <= ids.min() <= ids.max() <= self.vocab_size:
            raise UserError(
                f"cannot decode ids {ids.min()}..{ids.max()}: this tokenizer has the ids "
                f"0..{self.vocab_size - 1} and the mask {self.vocab_size}"
            )
        cuts = np.flatnonzero(ids == self.vocab_size)
        runs = np.split(ids, np.union1d(cuts, cuts + 1))
        return "".join(self._run(run, mask) for run in runs if run.size)

    def _run(self, ids: np.ndarray, mask: str) -> str:
        return mask if ids[0] == self.vocab_size else self.join(ids)

    def spellings(self) -> list[bytes] | None:
        """Returns the UTF-8 bytes of each token; None if tokens have no bytes of their own."""
        return [self.decode([i]).encode("utf-8", "surrogatepass") for i in range(self.vocab_size)]

    def to_json(self) -> str:
        """Returns a JSON object from which `from_json` makes the tokenizer, without other files."""
        return json.dumps({"name": self.name, **dataclasses.asdict(self)})
