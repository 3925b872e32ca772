"""The splits of a source as batches, and the fingerprint that a run keeps of its text."""

import numpy as np
import pytest

from md4_jax.data import corpus
from md4_jax.data.corpus import Corpus, check_same_text
from md4_jax.data.domains import TextDomain
from md4_jax.data.loader import MANY_ROUNDS, train_iterator
from md4_jax.data.pixels import PixelDomain
from md4_jax.data.sequences import Windows
from md4_jax.data.tokenizers import Bytes, Characters
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime import paths, sharding


@pytest.fixture
def workdir(tmp_path):
    return paths.place(tmp_path)


def test_a_run_is_resumed_on_its_own_text_alone(workdir):
    kept = {"tokens": 1234, "crc32": 0xAB}
    check_same_text(kept, dict(kept), workdir)
    check_same_text(None, kept, workdir)  # a checkpoint of before there were fingerprints
    for other in ({"tokens": 1235, "crc32": 0xAB}, {"tokens": 1234, "crc32": 0xAC}):
        with pytest.raises(UserError) as caught:
            check_same_text(kept, other, workdir)
        for text in (kept, other):
            assert f"{text['tokens']:,} tokens, CRC-32 {text['crc32']:08x}" in str(caught.value)
        assert "Put the text (data.path)" in str(caught.value)
        assert f"--config.train.initial={workdir}" in str(caught.value)


def test_processes_with_different_texts_are_refused(monkeypatch):
    """One of two processes, each with a CRC-32 of 32 bits; the other's is given."""
    mine, data = 0xFFFFFFFE, Corpus(None, TextDomain(Bytes(), 4), DataOptions(4))
    found = {"tokens": 10, "crc32": mine}
    monkeypatch.setattr(corpus.packing, "fingerprint", lambda *arguments: found)
    for other, is_same in ((mine, True), (mine - 4, False), (3, False)):
        sign = {True: other >> 1, False: -(other >> 1)}
        together = lambda numbers, sign=sign: [max(n, sign[n > 0]) for n in numbers]  # noqa: E731
        monkeypatch.setattr(sharding, "max_of_each", together)
        if is_same:
            assert data.fingerprint() == found
        else:
            with pytest.raises(UserError, match="the processes have different training data"):
                data.fingerprint()


class Letters:
    """A source of a few documents."""

    def __init__(self, *texts):
        self.texts = texts

    def fingerprint(self):
        return str(self.texts)

    def documents(self, split):
        return iter(self.texts)


def letters(text="abcdefghij", length=4, **options):
    domain = TextDomain(Characters("abcdefghij"), length)
    return Corpus(Letters(text), domain, DataOptions(length, **options))


def test_windows_of_training_are_a_grid_or_every_offset():
    """Those of an evaluation are a grid in any case."""
    for windows, expected in (("grid", {0, 4}), ("every", set(range(7)))):
        data = letters(windows=windows)
        batches = data.train_batches(batch_size=len(expected), rows=None, seed=0)
        tokens = next(batches).tokens
        assert set(tokens[:, 0].tolist()) == expected
        assert (np.diff(tokens) == 1).all()
        sizes = data.sizes(["train", "test"])
        assert sizes["train"].sequences == len(expected) and sizes["test"] == (2, 10)
        shown = [b.tokens.tolist() for b in data.eval_batches("test", batch_size=2, rows=[0, 1])]
        assert shown == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9], [0, 0]]]
    with pytest.raises(UserError, match="'grid', 'every' or 'documents', not 'all'"):
        DataOptions(windows="all")


def test_the_order_at_every_offset_has_many_rounds():
    text = "abcdefghij" * 9
    mine = letters(text, windows="every").train_batches(batch_size=50, rows=None, seed=3)
    windows = Windows(Characters("abcdefghij").encode(text), 4, 1)
    expected = train_iterator(windows, batch_size=50, seed=3, rounds=MANY_ROUNDS)
    for _ in range(3):
        assert next(mine).tokens.tolist() == next(expected).tokens.tolist()


def test_a_window_that_slides_counts_its_new_tokens():
    data = letters()
    counted = [
        row[own].tolist()
        for batch in data.eval_batches("test", batch_size=2, rows=[0, 1], stride=3)
        for row, own in zip(batch.tokens, batch.loss_mask, strict=True)
    ]
    assert counted == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], []]


def test_a_word_that_two_windows_share_counts_once():
    data = Corpus(Letters("abc de fgh"), TextDomain(Bytes(), 4), DataOptions(4))
    batches = data.eval_batches("test", batch_size=3, rows=[0, 1, 2])
    assert sum(batch.text for batch in batches).sum(axis=0).tolist() == [10, 3]


def test_documents_are_apart_only_where_asked():
    domain = TextDomain(Bytes(), 4)
    for apart, expected in ((True, {"segments": [[0, 0, 0, 1]]}), (False, {})):
        data = Corpus(Letters("ab", "cd"), domain, DataOptions(4, separate_documents=apart))
        for found in (
            next(data.train_batches(batch_size=1, rows=None, seed=0)),
            next(data.eval_batches("test", batch_size=1, rows=[0])),
            next(data.batches_of(np.array([[97, 98, 256, 99]]), batch_size=1, rows=[0])),
        ):
            assert found.tokens.tolist() == [[97, 98, 256, 99]]
            assert {name: values.tolist() for name, values in found.context.items()} == expected


def test_text_is_refused_for_a_run_of_images():
    with pytest.raises(UserError, match=r"are text, but the run was made for .* \(8, 8, 1\)"):
        Corpus(Letters("ab"), PixelDomain((8, 8, 1), 17), DataOptions(64))


def test_a_split_too_short_is_refused():
    with pytest.raises(UserError, match="train split has 3 tokens, fewer than one sequence of"):
        letters("abc").sizes(["test", "train"])
    assert letters("abc").sizes(["test"])["test"] == (0, 3)
    with pytest.raises(UserError, match="the test split has 0 tokens"):
        letters("").sizes(["test"])
