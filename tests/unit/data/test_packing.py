"""The token stream: its content, its cache, and documents within a row."""

import errno
import json
import os
import threading
import time
import zlib

import numpy as np
import pytest

from md4_jax.data import contents, packing
from md4_jax.data.cache import new_file
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
    whole = token_stream(source, Bytes(), "train")
    for name, value in (("BATCH_DOCUMENTS", 7), ("BATCH_CHARACTERS", 30)):
        monkeypatch.setattr(packing, name, value)
        monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / name))
        cut = token_stream(source, Bytes(), "train")
        assert cut.tolist() == whole.tolist()


def test_it_is_tokenised_once(cache):
    source = Source()
    first = token_stream(source, Bytes(), "train")
    second = token_stream(source, Bytes(), "train")
    assert source.reads == 1 and isinstance(second, np.memmap)
    assert first.tolist() == second.tolist()
    assert len(list(cache.rglob("*.uint16"))) == 1


@pytest.fixture
def again(cache, capsys):
    """Tokenises DOCUMENTS, damages the file, asks again: (ids, reads, what is said, the file)."""

    def again(damage):
        source = Source()
        token_stream(source, Bytes(), "train")
        (path,) = (cache / "tokens").glob("train-*.uint16")
        damage(path)
        contents.measured.cache_clear()  # as in another process, whatever the clock's resolution
        found = token_stream(source, Bytes(), "train").tolist()
        return found, source.reads, capsys.readouterr().out, path

    return again


IDS = [97, 98, 99, 256, 256, 100, 101, 256, 102, 256]


@pytest.mark.parametrize("bit", range(0, 16 * len(IDS), 7))
def test_a_flipped_bit_is_seen_and_mended(bit, again):
    def flip(path):
        raw = bytearray(path.read_bytes())
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)

    found, reads, said, path = again(flip)
    assert (found, reads) == (IDS, 2)
    assert f"{path} is damaged or was changed: crc32 is" in said and "made again" in said


@pytest.mark.parametrize("size", [0, 1, 2, 7, 10, 19, 24])
def test_another_length_is_seen_and_mended(size, again):
    def resize(path):
        path.write_bytes((path.read_bytes() + bytes(8))[:size])

    found, reads, said, path = again(resize)
    assert (found, reads) == (IDS, 2) and f"tokens is {size / 2:g}, not 10" in said
    assert path.stat().st_size == 20


def test_tokens_of_another_text_are_seen_and_replaced(again):
    other = token_stream(Source(["cba", "", "ed", "g"]), Bytes(), "test")
    found, reads, said, _ = again(lambda path: path.write_bytes(other.tobytes()))
    assert (found, reads) == (IDS, 2) and "crc32 is" in said


def change(**values):
    """Sets values in the record of the tokens."""

    def change(path):
        kept = contents.record(path)
        kept.write_text(json.dumps({**json.loads(kept.read_text()), **values}))

    return change


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda path: contents.record(path).unlink(), "is missing or unreadable"),
        (lambda path: contents.record(path).write_text("{"), "is missing or unreadable"),
        (lambda path: contents.record(path).write_text("3"), "checksum is damaged"),
        (lambda path: contents.record(path).write_text("{}"), "not None as when it was written"),
        (change(crc32=3), "not 3 as when it was written"),
        (change(tokens="ten"), "tokens is 10, not ten"),
        (change(dtype="uint8"), "dtype is uint16, not uint8"),
        (change(vocab_size=256), "vocab_size is 257, not 256"),
        (change(source="y"), "source is x, not y"),
    ],
)
def test_a_record_that_does_not_fit(damage, words, again):
    found, reads, said, _ = again(damage)
    assert (found, reads) == (IDS, 2) and words in said


def test_ids_above_the_vocabulary_are_seen(again):
    """Also where length and checksum are right."""

    def write(path):
        raw = np.array([3, 257], np.uint16).tobytes()
        path.write_bytes(raw)
        change(tokens=2, crc32=zlib.crc32(raw))(path)

    found, reads, said, _ = again(write)
    assert (found, reads) == (IDS, 2)
    assert "it has the id 257, and the vocabulary ends at 256" in said


def test_what_is_whole_is_not_made_again(again):
    found, reads, said, _ = again(lambda path: None)
    assert (found, reads, said) == (IDS, 1, "")


@pytest.mark.parametrize("size", [2, 6, 100])
def test_the_checksum_is_of_the_whole_file(size, monkeypatch):
    """In whatever pieces it is written and read."""
    monkeypatch.setattr(contents, "CHUNK_BYTES", size)
    found = packing.fingerprint(Source(), Bytes(), "train")
    assert found == {"tokens": 10, "crc32": zlib.crc32(np.array(IDS, "<u2").tobytes())}


def test_a_disk_that_gives_back_something_else(monkeypatch):
    monkeypatch.setattr(contents, "measured", lambda version, dtype: (20, 1, 0))
    with pytest.raises(UserError, match="differs from what was just written to it.*MD4_JAX_CACHE"):
        token_stream(Source(), Bytes(), "train")


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


def test_several_writers_at_once(cache):
    results = []

    def work():
        source = Source(["abc"] * 3000)
        results.append(token_stream(source, Bytes(), "train").copy())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6 and all(np.array_equal(r, results[0]) for r in results)
    assert len(results[0]) == 12_000
    assert len(list((cache / "tokens").iterdir())) == 2  # the tokens, and the record of them


def test_a_failure_leaves_nothing_behind(cache):
    def broken():
        yield "fine"
        raise UserError("no more")

    with pytest.raises(UserError, match="no more"):
        token_stream(Source(broken()), Bytes(), "train")
    assert list((cache / "tokens").iterdir()) == []


def test_text_that_changes_while_it_is_tokenised_is_not_kept(cache):
    """It would be taken for the old text, which has the hash in the name of the file."""

    class Late(Source):
        def documents(self, split):
            self.name, self.texts = "new", ["new"]
            return super().documents(split)

    with pytest.raises(UserError, match="the train split changed while it was .* Start again"):
        token_stream(Late(name="old"), Bytes(), "train")
    assert not [path for path in cache.rglob("*") if path.is_file()]
    assert token_stream(Source(name="old"), Bytes(), "train").tolist()[:3] == [97, 98, 99]


def test_a_full_disk(cache, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packing, "_stream", full)
    with pytest.raises(UserError, match="No space left.*MD4_JAX_CACHE") as caught:
        token_stream(Source(), Bytes(), "train")
    tokens = cache / "tokens"
    assert str(tokens) in str(caught.value) and list(tokens.iterdir()) == []


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


def test_a_file_where_the_cache_should_be_is_named(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("not a directory")
    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / "taken" / "below"))
    with pytest.raises(UserError, match=r"cache directory .*taken.*MD4_JAX_CACHE"):
        token_stream(Source(), Bytes(), "train")


def test_what_a_killed_process_left_is_deleted_after_a_day(tmp_path):
    """And what another process may be writing is not, nor what belongs to another file."""
    old, young, other = (tmp_path / f"{name}.part" for name in ("a[1].x", "a[1].y", "b.x"))
    for path in (old, young, other):
        path.write_text("half of the tokens")
    for path in (old, other):
        os.utime(path, (time.time() - 90_000,) * 2)
    with new_file(tmp_path / "a[1]") as temporary:
        temporary.write_text("tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a[1]", "a[1].y.part", "b.x.part"]


def test_a_cached_file_may_be_read_by_whom_the_user_allows(tmp_path):
    before = os.umask(0o027)  # the group
    try:
        with new_file(tmp_path / "tokens") as temporary:
            temporary.write_bytes(b"a")
    finally:
        os.umask(before)
    assert (tmp_path / "tokens").stat().st_mode & 0o777 == 0o640
