"""A tokenizer: the thirteen characters of sums."""

import dataclasses

import numpy as np

from md4_jax.data.tokenizers import Tokenizer
from md4_jax.protocols import UserError

CHARACTERS = "0123456789+=\n"


@dataclasses.dataclass(frozen=True)
class SumSymbols(Tokenizer):
    """One token for each character; `Tokenizer` brings decoding, JSON and the sign of the mask."""

    vocab_size = len(CHARACTERS)
    eot_id = None
    separator = ""
    is_character = True

    def encode(self, text: str) -> np.ndarray:
        """Returns ids [L]; UserError for a character that no sum has."""
        if wrong := set(text) - set(CHARACTERS):
            raise UserError(f"sums have no character {sorted(wrong)[0]!r}")
        return np.array([CHARACTERS.index(character) for character in text], np.uint8)

    def join(self, ids: np.ndarray) -> str:
        """Returns the text of ids without a mask."""
        return "".join(CHARACTERS[i] for i in ids)
