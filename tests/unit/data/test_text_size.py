"""Bytes and words of text counted in pieces of tokens, against Python's own of the whole text."""

import itertools

import numpy as np
import pytest

from md4_jax.data.loader import eval_batches
from md4_jax.data.packing import token_stream
from md4_jax.data.sequences import Windows
from md4_jax.data.text_size import TextSize, of_many_texts, of_one_text
from md4_jax.data.tokenizers import BytePairs, Bytes, Characters, Text8Symbols

# Spaces of two and three bytes, letters of one to four, and a word after each.
TEXT = " hello\u00a0naïve\u3000日本語 hell\u2003🙂🙂  two\n\nheheh\t"
WORDS = 7


def tokenizers(tiny_bpe):
    return [
        (Text8Symbols(), " a few of  these words "),
        (Characters("".join(sorted(set(TEXT)))), TEXT),
        (Bytes(), TEXT),
        (BytePairs(path=str(tiny_bpe)), TEXT),
    ]


def test_any_two_cuts_give_the_sizes_of_the_whole(tiny_bpe):
    """Also in the middle of a character and of a space of several bytes."""
    assert len(TEXT.split()) == WORDS
    for tokenizer, text in tokenizers(tiny_bpe):
        ids = tokenizer.encode(text)
        for cuts in itertools.combinations(range(len(ids) + 1), 2):
            count = of_one_text(tokenizer)
            sizes = [count(piece) for piece in np.split(ids, cuts)]
            assert np.sum(sizes, axis=0).tolist() == [len(text.encode()), len(text.split())]


def test_an_end_of_text_is_no_text_and_ends_a_word():
    tokenizer = Bytes()
    documents, ids = ["one tw", "o three", "", " four"], []
    for text in documents:
        ids += [*tokenizer.encode(text), tokenizer.eot_id]
    assert of_one_text(tokenizer)(np.array(ids)) == (18, 5)
    # One token at a time, and without what a vocabulary calls its end of text.
    count = of_one_text(tokenizer)
    assert np.sum([count(np.array([i])) for i in ids], axis=0).tolist() == [18, 5]
    assert TextSize(tokenizer.spellings(), None)(np.array(ids))[0] == 18 + 4 * len("<|endoftext|>")


def test_texts_of_their_own_do_not_go_on():
    count = of_many_texts(Bytes())
    assert [count(Bytes().encode(text)) for text in ("on", "e two", " ")] == [
        (2, 1),
        (5, 2),
        (1, 0),
    ]


class Documents:
    """A source of two texts."""

    def fingerprint(self):
        return "two"

    def documents(self, split):
        return iter([TEXT, "and " + TEXT])


@pytest.mark.parametrize("length, stride", [(8, 0), (8, 3), (8, 1), (8, 8), (7, 5), (300, 0)])
def test_a_split_has_the_bytes_and_words_of_its_text(tiny_bpe, length, stride):
    """However long the sequences, sliding or not, with a last one that is short, on any mesh."""
    for tokenizer in (BytePairs(path=str(tiny_bpe)), Bytes()):
        tokens = token_stream(Documents(), tokenizer, "test")
        for processes in (1, 2):
            total = np.zeros(2, int)
            for rows in np.split(np.arange(4), processes):
                batches = eval_batches(
                    Windows(tokens, length, stride or length, bool(stride)),
                    batch_size=4,
                    rows=rows,
                    text_size=of_one_text(tokenizer),
                )
                for batch in batches:
                    assert batch.text.shape == (len(rows), 2) and batch.text.dtype == np.int32
                    assert (batch.text[~batch.loss_mask.any(axis=1)] == 0).all()
                    total += batch.text.sum(axis=0)
            assert total.tolist() == [2 * len(TEXT.encode()) + 4, 2 * WORDS + 1]


def test_a_batch_has_no_text_unless_asked(tiny_bpe):
    assert next(eval_batches(Windows(np.zeros(9, np.uint8), 4, 4), batch_size=2)).text is None
