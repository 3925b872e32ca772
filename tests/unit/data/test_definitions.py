"""Vocabularies as a tokenizer.json that other programs read."""

import json

import numpy as np
import pytest
import tokenizers

from md4_jax.data.byte_pairs import BytePairs
from md4_jax.data.definitions import definition_of
from md4_jax.data.tokenizers import Bytes, Characters, Text8Symbols

TEXT8 = "a man in the sun "
TEXT = "Ein Öl,\nzwei Öle \N{SNOWMAN}"


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [(Text8Symbols(), TEXT8), (Characters("".join(sorted(set(TEXT)))), TEXT), (Bytes(), TEXT)],
)
def test_other_programs_read_the_same_numbers_and_texts(tokenizer, text):
    definition = definition_of(tokenizer)
    read, ids = tokenizers.Tokenizer.from_str(definition), tokenizer.encode(text)
    assert read.encode(text).ids == ids.tolist()
    assert read.decode(ids.tolist()) == text
    assert read.get_vocab_size() == tokenizer.vocab_size
    ours = BytePairs(definition=definition, eot=None)
    np.testing.assert_array_equal(ours.encode(text), ids)
    assert ours.decode(ids) == text
    assert definition_of(ours) == json.loads(ours.to_json())["definition"]


def test_the_end_of_a_text_is_an_entry_of_bytes():
    read = tokenizers.Tokenizer.from_str(definition_of(Bytes()))
    assert read.encode("a<|endoftext|>b").ids == [97, 256, 98]


def test_a_vocabulary_of_words_has_no_such_file():
    class Words(Characters):
        is_character = False

        def decode(self, ids, mask="_"):
            return "word"

    assert definition_of(Words("ab")) == ""
