"""Tokenizer of byte-level byte-pair encoding."""

import dataclasses
import functools
import json

import numpy as np

from md4_jax.data import bpe_files, long_texts, words
from md4_jax.data.tokenizer_base import Tokenizer, id_dtype
from md4_jax.protocols import UserError

END_OF_TEXT = "<|endoftext|>"
MOST_ENTRIES = 1 << 24


@dataclasses.dataclass(frozen=True)
class BytePairs(Tokenizer):
    """Byte-level byte-pair encoding, such as GPT-2's with its 50,257 entries.

    path        a directory with encoder.json and vocab.bpe, or vocab.json and merges.txt, or
                tokenizer.json, or the vocab.json of molecules (`smiles`) and a
                tokenizer_config.json; or a tokenizer.json itself
    hub         if there is no path: a name on the Hugging Face hub, such as 'gpt2'
    definition  instead of both: the contents of a tokenizer.json, as stored in a run
    eot         the entry that ends a text; None for a vocabulary without one
    size        number of ids, if the model has more or fewer than the vocabulary has entries; 0:
                the number of entries. Ids without an entry have no text; entries beyond the size
                cannot be encoded
    mask        id of the mask if it is an entry of the vocabulary; None: the mask comes after the
                vocabulary. The tokenizer has no id for this entry: ids above it are lower by one,
                and no text can contain it

    Raises UserError if none of the three is given, if the vocabulary cannot be read, if it has no
    entry `eot`, and if `mask` is not one of its ids.
    """

    path: str | None = None
    hub: str | None = None
    definition: str | None = dataclasses.field(default=None, repr=False)
    eot: str | None = END_OF_TEXT
    size: int = 0
    mask: int | None = None

    name = "bpe"
    separator = "\n"
    is_character = False

    def __post_init__(self):
        if self.path is None and self.hub is None and self.definition is None:
            raise UserError("the tokenizer 'bpe' needs either tokenizer.path or tokenizer.hub")
        if self.eot is not None and self.eot_id is None:
            raise UserError(
                f"the vocabulary has no entry {self.eot!r}: set tokenizer.eot to the one that "
                "ends a text, or to None"
            )
        if self.mask is not None and not 0 <= self.mask <= self.vocab_size:
            raise UserError(
                f"tokenizer.mask={self.mask} is not in the vocabulary, which has the "
                f"{self.vocab_size + 1} ids 0 to {self.vocab_size}: set it to the id of the mask, "
                "or to None if the mask comes after the vocabulary"
            )
        if self.mask is not None and self.eot_id == self.vocab_size:
            raise UserError(
                f"tokenizer.eot={self.eot!r} has the id {self.mask}, which is also "
                "tokenizer.mask: the end-of-text token and the mask must have different ids"
            )

    @functools.cached_property
    def vocab_size(self) -> int:
        return self.size or self.entries - (self.mask is not None)

    @functools.cached_property
    def entries(self) -> int:
        """The largest id of the vocabulary, plus one."""
        found = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if not 0 < found <= MOST_ENTRIES:
            raise UserError(
                f"the vocabulary must have 1 to {MOST_ENTRIES:,} ids, and this one has {found:,}"
            )
        return found

    @functools.cached_property
    def eot_id(self) -> int | None:
        return None if self.eot is None else self.id_of(self.eot)

    def id_of(self, entry: str) -> int | None:
        """Returns the id of an entry, `vocab_size` for the mask; None if there is no such entry."""
        found = self._tokenizer.token_to_id(entry)
        return found if found is None or self.mask is None else self._inward(found)

    @functools.cached_property
    def special(self) -> tuple[str, ...]:
        """Special tokens of the vocabulary, such as those of a chat template."""
        return bpe_files.special(self._tokenizer)

    def encode(self, text: str) -> np.ndarray:
        """Returns ids [number of tokens]."""
        if len(text) <= long_texts.PIECE_CHARACTERS:
            return self._encode([text])[0]
        pieces = long_texts.pieces(text, long_texts.space_before(self._tokenizer))
        return np.concatenate([self._encode([piece])[0] for piece in pieces])

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encodes each text."""
        if max(map(len, texts), default=0) > long_texts.PIECE_CHARACTERS:
            return [self.encode(text) for text in texts]
        return self._encode(texts)

    def spellings(self) -> list[bytes] | None:
        """Returns the bytes of each entry; None for a vocabulary that is not byte-level."""
        return bpe_files.spellings(self._tokenizer, self._outward(np.arange(self.vocab_size)))

    def join(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(self._outward(ids).tolist(), skip_special_tokens=False)

    def _outward(self, ids: np.ndarray) -> np.ndarray:
        """Converts ids to those of the vocabulary with the mask."""
        return ids if self.mask is None else ids + (ids >= self.mask)

    def _inward(self, entry: int) -> int:
        """Converts an id of the vocabulary with the mask to the id here."""
        return self.vocab_size if entry == self.mask else entry - (entry > self.mask)

    def to_json(self) -> str:
        """Returns a JSON object with the vocabulary; about 1.5 MB for GPT-2."""
        definition = self._tokenizer.to_str()
        fields = {"name": self.name, "definition": definition, "eot": self.eot}
        # Defaults are omitted, so that files and caches of older versions remain valid.
        fields |= {"size": self.size} if self.size else {}
        fields |= {"mask": self.mask} if self.mask is not None else {}
        return json.dumps(fields)

    def added_from(self, index: int) -> bool:
        """Returns whether all entries from `index` on are added tokens, such as <|mask|>."""
        return bpe_files.added_from(self._tokenizer, index, self.entries)

    @functools.cached_property
    def _encode(self) -> words.Encode:
        encode = words.encoder(self._tokenizer, id_dtype(self.entries))
        if self.mask is not None:
            return bpe_files.without_mask(encode, self._tokenizer, self.vocab_size, self.mask)
        if self.vocab_size >= self.entries:
            return encode
        return bpe_files.limited(encode, self._tokenizer, self.size)

    @functools.cached_property
    def _tokenizer(self):
        if self.definition is not None:
            return bpe_files.from_definition(self.definition)
        return bpe_files.from_path(self.path) if self.path else bpe_files.from_hub(self.hub)
