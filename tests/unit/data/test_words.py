"""Encoding by words: the ids are those of the library, for any text."""

import json
import random

import numpy as np
import pytest

from md4_jax.data import words
from md4_jax.data.tokenizers import BytePairs

# Letters, contractions, digits, punctuation and all kinds of white space, ASCII and not.
SYMBOLS = [
    *("a", "b", "Z", "'", "s", "re", "'ll", "n't", "1", "²", ".", ",", "_", "-", "\x00", "\x7f"),
    *("é", "一", "’", "“", "…", "🙂", "\u0301", "\u200b", "ſ", "ⅷ", "٣", "\ufeff"),
    *(" ", " ", "  ", "\n", "\n\n", "\t", "\r", "\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\xa0"),
    *("\u1680", "\u2003", "\u2028", "\u2029", "\u202f", "\u3000", "\u180e", "<|endoftext|>"),
]


def by_library(tokenizer: BytePairs, text: str) -> list[int]:
    return tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


def test_any_text_has_the_ids_of_the_library(shared):
    tokenizer = BytePairs(path=str(shared("gpt2_bpe")))
    draw = random.Random(0)
    texts = ["".join(draw.choices(SYMBOLS, k=draw.randrange(12))) for _ in range(20_000)]
    found = tokenizer.encode_batch(texts)
    wrong = [
        text
        for text, ids in zip(texts, found, strict=True)
        if ids.tolist() != by_library(tokenizer, text)
    ]
    assert wrong == []


def test_real_text_has_the_ids_of_the_library(shared):
    lines = shared("openwebtext/openwebtext-900.jsonl").read_text().splitlines()[:100]
    tokenizer = BytePairs(path=str(shared("gpt2_bpe")))
    texts = [json.loads(line)["text"] for line in lines]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == by_library(tokenizer, text) and ids.dtype == np.uint16


def test_an_added_entry_inside_a_text(tiny_bpe):
    """The library finds it before it cuts the text into pieces."""
    made = BytePairs(path=str(tiny_bpe))._tokenizer
    made.add_special_tokens(["<|endoftext|>"])
    tokenizer = BytePairs(definition=made.to_str())
    text = "hell<|endoftext|>he ll<|endoftext|>"
    assert tokenizer.encode(text).tolist() == by_library(tokenizer, text)
    assert tokenizer.encode(text).tolist().count(tokenizer.eot_id) == 2


def test_words_are_forgotten_when_there_are_too_many(tiny_bpe, monkeypatch):
    monkeypatch.setattr(words, "MOST_CHARACTERS", 10)
    tokenizer = BytePairs(path=str(tiny_bpe))
    for text in ("hello there", "well then", "hello there"):
        assert tokenizer.encode(text).tolist() == by_library(tokenizer, text)


@pytest.mark.parametrize(
    "key, value",
    [
        ("normalizer", {"type": "Lowercase"}),
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("pre_tokenizer", None),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}),
    ],
)
def test_other_vocabularies_are_left_to_the_library(key, value, tiny_bpe):
    parts = json.loads(BytePairs(path=str(tiny_bpe))._tokenizer.to_str())
    if value and value["type"] == "ByteLevel":
        value = {**value, "trim_offsets": True}
    tokenizer = BytePairs(definition=json.dumps({**parts, key: value}))
    assert not words.is_exact(tokenizer._tokenizer)
    text = "hello Well, he'll tell"
    assert tokenizer.encode(text).tolist() == by_library(tokenizer, text)
