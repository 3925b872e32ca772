"""The token stream: its content, its cache, and documents within a row."""

import errno
import threading

import numpy as np
import pytest

from md4_jax.data import packing
from md4_jax.data.packing import segments, token_stream
from md4_jax.data.tokenizers import Bytes, Characters, Text8Symbols
from md4_jax.protocols import UserError

DOCUMENTS = ["abc", "", "de", "f"]


class Source:
    """Documents from memory; counts how often they are read."""

    def __init__(self, documents=DOCUMENTS, name="x"):
        self.texts, self.name, self.reads = documents, name, 0

    def documents(self, split):
        self.reads += 1
        yield from self.texts

    def fingerprint(self):
        return self.name


def test_each_document_has_its_end():
    tokens = token_stream(Source(), Bytes(), "train")
    assert tokens.tolist() == [97, 98, 99, 256, 256, 100, 101, 256, 102, 256]
    assert tokens.dtype == np.uint16


def test_documents_without_an_end_are_joined():
    assert Text8Symbols().decode(token_stream(Source(), Text8Symbols(), "train")) == "abc  de f"
    with_newline = Characters("abcdef\n")
    assert with_newline.decode(token_stream(Source(), with_newline, "train")) == "abc\n\nde\nf"
    without = Characters("abcdef")
    assert without.decode(token_stream(Source(), without, "train")) == "abcdef"


def test_batches_do_not_show(monkeypatch, tmp_path):
    source = Source([f"document {i}" for i in range(57)])
    whole = token_stream(source, Bytes(), "train", str(tmp_path / "a"))
    for name, value in (("BATCH_DOCUMENTS", 7), ("BATCH_CHARACTERS", 30)):
        monkeypatch.setattr(packing, name, value)
        cut = token_stream(source, Bytes(), "train", str(tmp_path / name))
        assert cut.tolist() == whole.tolist()


def test_it_is_tokenised_once(cache):
    source = Source()
    first = token_stream(source, Bytes(), "train")
    second = token_stream(source, Bytes(), "train")
    assert source.reads == 1 and isinstance(second, np.memmap)
    assert first.tolist() == second.tolist()
    assert len(list(cache.rglob("*.uint16"))) == 1


def test_what_the_cache_is_keyed_by():
    def is_read(source, tokenizer, split):
        token_stream(source, tokenizer, split)
        return source.reads == 1

    assert is_read(Source(), Bytes(), "train")
    assert not is_read(Source(), Bytes(), "train")
    assert is_read(Source(name="y"), Bytes(), "train")
    assert is_read(Source(), Bytes(), "test")
    assert is_read(Source(), Characters("abcdef"), "train")
    assert is_read(Source(), Characters("fedcba"), "train")


def test_an_empty_split():
    assert token_stream(Source([]), Bytes(), "train").shape == (0,)


def test_several_writers_at_once(tmp_path):
    results = []

    def work():
        source = Source(["abc"] * 3000)
        results.append(token_stream(source, Bytes(), "train", str(tmp_path)).copy())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6 and all(np.array_equal(r, results[0]) for r in results)
    assert len(results[0]) == 12_000
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failure_leaves_nothing_behind(tmp_path):
    def broken():
        yield "fine"
        raise UserError("no more")

    with pytest.raises(UserError, match="no more"):
        token_stream(Source(broken()), Bytes(), "train", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packing, "_pieces", full)
    with pytest.raises(UserError, match="No space left.*MD4_JAX_CACHE") as caught:
        token_stream(Source(), Bytes(), "train", str(tmp_path))
    assert str(tmp_path) in str(caught.value) and list(tmp_path.iterdir()) == []


def test_ids_outside_of_the_vocabulary():
    class Wrong(Bytes):
        def encode(self, text):
            return np.array([3, 257])

    with pytest.raises(UserError, match=r"3\.\.257, outside of its vocabulary 0\.\.256"):
        token_stream(Source(), Wrong(), "train")


def test_segments():
    tokens = np.array([[5, 9, 5, 5, 9, 9, 5], [9, 5, 5, 5, 5, 5, 9]])
    expected = [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert segments(tokens, 9).tolist() == expected
    assert segments(tokens, 9).dtype == np.int32
    assert segments(tokens[1], 9).tolist() == expected[1]


def test_a_file_where_the_cache_should_be_is_named(tmp_path):
    (tmp_path / "taken").write_text("not a directory")
    with pytest.raises(UserError, match=r"cache directory .*taken.*MD4_JAX_CACHE"):
        token_stream(Source(), Bytes(), "train", str(tmp_path / "taken" / "below"))
