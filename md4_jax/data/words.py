"""Fast encoding with vocabularies like GPT-2's, with a cache of words."""

import array
import json
import re
from collections.abc import Callable

import numpy as np

Encode = Callable[[list[str]], list[np.ndarray]]

MOST_CHARACTERS = 1 << 25  # of the cached words
# Python also treats \x1c..\x1f as white space; the library's GPT-2 pattern does not.
_SPACE, _OTHER = r"[^\S\x1c-\x1f]", r"[\S\x1c-\x1f]"
# GPT-2's pattern starts a new piece before white space, and where an ASCII letter is followed by
# an ASCII character that is not a letter. Texts are cut there, so that words repeat. They are not
# cut elsewhere: "'s" is one piece, and classifying non-ASCII characters would need a table.
WORD = re.compile(
    rf"{_SPACE}*+[!-@\[-`{{-~]*+[A-Za-z]++(?![^\x00-\x7f])|{_SPACE}*+{_OTHER}++|{_SPACE}++"
)
_PRE_TOKENIZER = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def encoder(tokenizer, dtype: np.dtype) -> Encode:
    """Returns a function (texts) -> ids of each; it caches words if that does not change any id."""
    if is_exact(tokenizer):
        return Words(tokenizer, dtype).encode

    def encode(texts: list[str]) -> list[np.ndarray]:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(one.ids, dtype) for one in encoded]

    return encode


class Words:
    """Encoder of texts with a cache of the ids of words; the ids are those of the library.

    tokenizer  a `tokenizers.Tokenizer` for which `is_exact` is true
    dtype      unsigned type of the ids
    """

    def __init__(self, tokenizer, dtype: np.dtype):
        self._tokenizer, self._dtype = tokenizer, dtype
        self._ids_of: dict[str, bytes] = {}
        self._characters = 0
        added = json.loads(tokenizer.to_str())["added_tokens"]
        self._added = [entry["content"] for entry in added]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text."""
        words_of = [
            [text] if any(entry in text for entry in self._added) else WORD.findall(text)
            for text in texts
        ]
        self._learn(list(set().union(*words_of) - self._ids_of.keys()))
        found = [b"".join(map(self._ids_of.__getitem__, words)) for words in words_of]
        if self._characters > MOST_CHARACTERS:
            self._ids_of, self._characters = {}, 0
        return [np.frombuffer(ids, self._dtype) for ids in found]

    def _learn(self, words: list[str]) -> None:
        encoded = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        ids = (array.array(self._dtype.char, one.ids).tobytes() for one in encoded)
        self._ids_of.update(zip(words, ids, strict=True))
        self._characters += sum(map(len, words))


def is_exact(tokenizer) -> bool:
    """Returns whether a vocabulary splits texts by GPT-2's pattern: words are independent."""
    parts = json.loads(tokenizer.to_str())
    cut = parts["pre_tokenizer"] or {}
    changes = (parts["normalizer"], parts["truncation"], parts["padding"])
    return (
        parts["model"]["type"] == "BPE"
        and not parts["model"].get("dropout")
        and changes == (None, None, None)
        and _PRE_TOKENIZER.items() <= cut.items()
    )
