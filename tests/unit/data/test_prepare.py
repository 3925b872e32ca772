"""Shards of large texts: the same tokens as without them, also after kills and damage."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from md4_jax.data import cache, contents, packing, prepare, shards
from md4_jax.data.corpus import Corpus
from md4_jax.data.domains import TextDomain
from md4_jax.data.mixtures import corpus_of
from md4_jax.data.prepare import fingerprint, prepared, stream
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.sources.mixture import Mixture, Part
from md4_jax.data.sources.public import PublicText
from md4_jax.data.sources.splits import SPLITS
from md4_jax.data.tokenizers import BytePairs, Bytes, Characters
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place

TEXTS = [f"document {n} " + "abc é " * (n % 7) for n in range(200)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Many shards and batches of a small text."""
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 400)
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 7)


@pytest.fixture
def source(tmp_path):
    """Two files of lines, whose documents are the 200."""
    for name, texts in (("a.jsonl", TEXTS[:80]), ("b.jsonl", TEXTS[80:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / name).write_text(lines)
    return TextFiles(str(tmp_path / "*.jsonl"), validation=11, test=0.1)


@pytest.fixture
def made(source):
    return prepared(source, Bytes(), "")


def folder(cache) -> Path:
    (found,) = (path for path in (cache / "prepared").iterdir() if path.is_dir())
    return found


@pytest.mark.parametrize(
    "tokenizer", [Bytes(), Characters(), Characters("".join({*"".join(TEXTS), "\n"}))]
)
def test_splits_are_those_of_files_of_tokens(tokenizer, source):
    """With an end of text, with separators, and without either: tokens and checksums."""
    tokenizer = tokenizer.fit(source.documents("all"))
    for split in (*SPLITS, "all"):
        expected = packing.token_stream(source, tokenizer, split)
        found = stream(source, tokenizer, split, "")
        assert len(found) == len(expected) and found[:].tolist() == expected.tolist()
        assert found.dtype == expected.dtype
        assert fingerprint(source, tokenizer, split, "") == packing.fingerprint(
            source, tokenizer, split
        )


def test_slices_are_those_of_the_whole(source):
    found = stream(source, Bytes(), "train", "")
    whole = found[:]
    for first in range(0, len(found), 97):
        for size in (0, 1, 399, 400, 1300):
            assert found[first : first + size].tolist() == whole[first : first + size].tolist()
    assert found[-5:].tolist() == whole[-5:].tolist()


def test_the_manifest_has_the_hashes_of_text_and_tokens(made, tmp_path):
    kept = json.loads((made.folder / "manifest.json").read_text())
    assert [name for name, _ in kept["facts"]["files"]] == ["a.jsonl", "b.jsonl"]
    assert kept["facts"]["files"] == contents.facts_of(sorted(map(Place, tmp_path.glob("*.jsonl"))))
    assert len(kept["shards"]) > 5 and kept["is_complete"]
    for shard in kept["shards"]:
        raw = (made.folder / shard["name"]).read_bytes()
        assert zlib.crc32(raw) == shard["crc32"] and len(raw) == 2 * shard["tokens"]


def test_what_is_prepared_is_found_again_wherever_the_text_lies(made, source, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    for file in tmp_path.glob("*.jsonl"):
        file.rename(other / file.name)
    capsys.readouterr()
    moved = TextFiles(str(other / "*.jsonl"), validation=3, test=5)
    assert prepared(moved, Bytes(), "") == made
    assert capsys.readouterr().out == ""
    assert prepared(moved, Characters().fit(TEXTS), "").folder != made.folder


@pytest.mark.parametrize("store", ["", "store"])
def test_the_texts_of_another_key_are_others(store, tmp_path):
    """Though both lie in one file, whose tokens are kept in one place, in shards or not."""
    records = [{"text": f"text {n}", "other": f"other {n}"} for n in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    options, folders = DataOptions(8, store=store and str(tmp_path / store)), []
    for key in ("text", "other"):
        source = TextFiles(str(tmp_path / "a.jsonl"), text_key=key, validation=0, test=0)
        data = Corpus(source, TextDomain(Bytes(), 8), options)
        texts = Bytes().decode(data.stream("train")[:]).split("<|endoftext|>")[:-1]
        assert texts == [one[key] for one in records]
        folders.append(data.shards())
    assert len({*folders}) == (2 if store else 1)


def test_processes_give_the_same_shards(made, source, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(prepare, "cores", lambda: 2)
    found = prepared(source, Bytes(), str(tmp_path / "store"))
    assert found.shards == made.shards and found.folder.parent == Place(tmp_path / "store")


@pytest.mark.parametrize("count", [1, 3, 6])
def test_it_goes_on_after_the_last_whole_shard(count, made, source, tmp_path, monkeypatch):
    written = []

    def dying(path, raw):
        if path.suffix == ".uint16":
            if len(written) == count:
                raise KeyboardInterrupt
            written.append(path.name)
        shards.write(path, raw)

    monkeypatch.setattr(prepare, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        prepared(source, Bytes(), str(tmp_path / "store"))
    monkeypatch.setattr(
        prepare, "write", lambda path, raw: (written.append(path.name), shards.write(path, raw))
    )
    found = prepared(source, Bytes(), str(tmp_path / "store"))
    assert found.shards == made.shards and len(written) == len(set(written))


class Going(TextFiles):
    """Files that go when they are done, so that they cannot be read again."""

    @property
    def gone(self) -> list[str]:
        return self.__dict__.setdefault("_gone", [])

    def sections(self):
        (parts,) = super().sections().values()
        pairs = zip(self._files, parts, strict=True)
        return {"text": [self._going(path.name, part) for path, part in pairs]}

    def _going(self, name, part):
        def read():
            assert name not in self.gone, f"{name} would be downloaded again"
            return part.read()

        return part._replace(read=read, done=lambda: self.gone.append(name))


@pytest.mark.parametrize("count", range(1, 47, 5))
def test_after_a_kill_no_file_is_read_that_went(count, made, source, tmp_path, monkeypatch):
    """Whether it comes before the lengths, the tokens or the manifest of a shard are written."""
    going, left, replace = Going(source.path, validation=11, test=0.1), [count], os.replace

    def dying(*arguments):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        replace(*arguments)

    monkeypatch.setattr(cache.os, "replace", dying)
    with pytest.raises(KeyboardInterrupt):
        prepared(going, Bytes(), str(tmp_path / "store"))
    (folder,) = (path for path in (tmp_path / "store").iterdir() if path.is_dir())
    kept = shards.read_manifest(Place(folder))
    ends = kept.shards[-1].end.part if kept else 0
    assert going.gone == ["a.jsonl"] * (ends == 1)  # at once, and no sooner
    found = prepared(going, Bytes(), str(tmp_path / "store"))
    assert found.shards == made.shards and {*going.gone} == {"a.jsonl", "b.jsonl"}


def test_files_go_again_that_came_for_a_damaged_shard(made, source):
    going = Going(source.path, validation=11, test=0.1)
    Path(made.folder / made.shards[0].name).unlink()
    assert prepared(going, Bytes(), "") == made and going.gone == ["a.jsonl", "b.jsonl"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[7] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("number", [0, 2, -1])
@pytest.mark.parametrize(
    "damage, said",
    [(Path.unlink, "it is not there"), (cut, "tokens is"), (flip, "crc32 is")],
)
def test_a_damaged_shard_is_made_again(damage, said, number, made, source, capsys):
    expected = [(made.folder / shard.name).read_bytes() for shard in made.shards]
    path = Path(made.folder / made.shards[number].name)
    damage(path)
    contents.measured.cache_clear()
    assert prepared(source, Bytes(), "") == made
    assert f"{path} is damaged or was changed: {said}" in capsys.readouterr().out
    assert [(made.folder / shard.name).read_bytes() for shard in made.shards] == expected


def test_lengths_that_are_gone_are_made_again(made, source):
    path = Path(made.folder / made.shards[1].name).with_suffix(".lengths")
    raw = path.read_bytes()
    path.unlink()
    assert prepared(source, Bytes(), "") == made and path.read_bytes() == raw


@pytest.fixture
def in_store(made, monkeypatch):
    """Takes the folder of shards for one in an object store."""
    for module in (prepare, shards):
        monkeypatch.setattr(module, "is_remote", lambda path: True)


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_other_processes_wait_for_a_shard_that_is_made_again(
    damage, made, source, in_store, monkeypatch
):
    path, naps = Path(made.folder / made.shards[2].name), []
    raw = path.read_bytes()

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:  # the first process has made it
            path.write_bytes(raw)

    monkeypatch.setattr(prepare, "is_first", lambda: False)
    monkeypatch.setattr(prepare.time, "sleep", sleep)
    damage(path)
    assert prepared(source, Bytes(), "") == made and naps == [prepare.POLL_SECONDS] * 3


def many(folder: Path, count: int) -> shards.Prepared:
    """So many shards, of two tokens each: 0 and 1, 1 and 2, ..."""
    folder.mkdir()
    found = []
    for number in range(count):
        path, ids = Place(folder / f"text-{number}.uint16"), np.array([number, number + 1], "<u2")
        path.write_bytes(ids.tobytes())
        shards.write_lengths(path, np.array([2]))
        sums, end = (zlib.crc32(ids.tobytes()), ""), shards.Cursor(0, number + 1)
        found.append(shards.Shard(path.name, "text", 2, 1, *sums, end))
    return shards.Prepared(Place(folder), "uint16", count + 1, 0, {}, tuple(found), True)


def test_any_number_of_shards_needs_few_open_files(tmp_path):
    count = shards.MAPS + 50
    made = many(tmp_path / "shards", count)
    shards._mapped.cache_clear()
    before = len(os.listdir("/proc/self/fd"))
    text = shards.TokenShards(made.folder, "uint16", made.pieces([("text", 0, count)]))
    parts = [text[2 * number : 2 * number + 2] for number in range(count)]
    assert len(os.listdir("/proc/self/fd")) - before <= shards.MAPS
    assert [part.tolist() for part in parts] == [[n, n + 1] for n in range(count)]


def test_each_of_any_number_of_shards_is_read_once(tmp_path):
    """However often a process looks at them: more than the 137 billion tokens of 4096 shards."""
    file = tmp_path / "text-00000.uint16"
    file.write_bytes(b"1234")
    contents.measured.cache_clear()
    versions = [(str(file), 4, time) for time in range(5000)]
    for version in versions * 2:
        assert contents.measured(version, "uint16")[0] == 4
    assert contents.measured.cache_info().misses == 5000


def test_shards_in_a_store_are_looked_at_once(made, source, in_store, monkeypatch):
    """As long as the manifest is the same; and those on a disk each time."""
    asked, exists = [], shards.exists
    monkeypatch.setattr(shards, "exists", lambda path: asked.append(path.name) or exists(path))
    counts = []
    for change in ("", "", "another manifest", "on a disk", "on a disk"):
        if change == "another manifest":
            made._replace(facts={}).write()
        if change == "on a disk":
            monkeypatch.setattr(prepare, "is_remote", lambda path: False)
            prepare._known.clear()
        asked.clear()
        assert prepared(source, Bytes(), "").shards == made.shards
        counts.append(len(asked))
    every = 1 + 2 * len(made.shards)
    assert counts == [every, 1, every, every, every]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"shards": 3}'])
def test_a_damaged_manifest_is_made_again(text, made, source):
    (made.folder / "manifest.json").write_text(text)
    assert prepared(source, Bytes(), "") == made


def test_a_full_disk_is_told_and_work_goes_on(made, source, tmp_path, monkeypatch):
    replace, left = os.replace, [5]

    def full(*arguments):
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(*arguments)

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.raises(UserError, match="No space left on device. Free some space"):
        prepared(source, Bytes(), str(tmp_path / "store"))
    monkeypatch.undo()
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 400)
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 7)
    assert not list((tmp_path / "store").rglob("*.part"))
    assert prepared(source, Bytes(), str(tmp_path / "store")).shards == made.shards


@pytest.mark.parametrize("count", [0, 2])
def test_a_text_that_cannot_be_encoded_is_named(count, source, monkeypatch):
    monkeypatch.setattr(prepare, "PARALLEL_BYTES", 0 if count else 1 << 30)
    monkeypatch.setattr(prepare, "cores", lambda: count)
    with pytest.raises(UserError, match=r"a.jsonl, line 2: .*character 'é' at offset 15"):
        prepared(source, Characters("".join({*"".join(TEXTS)} - {"é"})), "")


def test_a_text_that_changed_under_the_same_name_is_another(made, source, tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_text(path.read_text().replace("abc", "cba"))
    assert prepared(TextFiles(source.path), Bytes(), "").folder != made.folder


@pytest.mark.slow
def test_a_process_that_is_killed_and_one_that_waits(source, tmp_path, monkeypatch, made):
    """One is killed while it tokenises; of two that then start at once, one makes the rest."""
    store = tmp_path / "store"
    words = (
        "import sys, time\n"
        "from md4_jax.data import prepare, shards\n"
        "from md4_jax.data.sources.files import TextFiles\n"
        "from md4_jax.data.tokenizers import Bytes\n"
        "prepare.SHARD_TOKENS, prepare.BATCH_DOCUMENTS = 400, 7\n"
        "prepare.write = lambda *a: (time.sleep(0.1), shards.write(*a))\n"
        "source = TextFiles(sys.argv[1], validation=11, test=0.1)\n"
        "prepare.prepared(source, Bytes(), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", words, source.path, str(store)]
    killed = subprocess.Popen(command)
    until = time.monotonic() + 30
    while len(list(store.rglob("*.uint16"))) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    left = len(list(store.rglob("*.uint16")))
    assert 3 <= left < len(made.shards)
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("tokenising text into" in out for out in said) == 1
    assert sum("waiting: tokenising text is under way in process" in out for out in said) == 1
    assert prepared(source, Bytes(), str(store)).shards == made.shards


def test_small_texts_keep_one_file_for_each_split(source, tmp_path):
    assert not prepare.is_sharded(source, "") and prepare.is_sharded(source, "somewhere")
    (tmp_path / "few.txt").write_text("one document")
    assert not prepare.is_sharded(TextFiles(str(tmp_path / "few.txt")), "somewhere")


@pytest.mark.parametrize("windows, is_without", [("documents", True), ("grid", False)])
def test_what_needs_shards_is_told_where_there_are_none(windows, is_without, source):
    options = DataOptions(8, windows=windows, store="somewhere")
    found = Corpus(source, TextDomain(Bytes(), 8), options).warnings
    assert [said.split(":")[0] for said in found] == [
        "data.store='somewhere' has no effect"
    ] * is_without
    public = PublicText("some/set", source.path, keep_files=False)
    parts = Mixture({"a": Part(public, 1.0), "b": Part(source, 1.0)})
    found = corpus_of(parts, TextDomain(Bytes(), 8), DataOptions(8, windows=windows)).warnings
    assert [said.split(":")[:2] for said in found] == [
        ["data.parts.a", " data.keep_files=False has no effect"]
    ] * is_without


def test_joined_checksums():
    draw = np.random.default_rng(0)
    for first, second in ((0, 5), (5, 0), (1, 1), (1000, 37), (3, 70_000)):
        a, b = draw.bytes(first), draw.bytes(second)
        assert shards.joined_crc(zlib.crc32(a), zlib.crc32(b), second) == zlib.crc32(a + b)


@pytest.mark.slow
def test_gpt2_tokens_of_real_text(shared):
    path = shared("openwebtext/openwebtext-900.jsonl")
    tokenizer = BytePairs(path=str(shared("gpt2_bpe")))
    source = TextFiles(str(path), validation=50, test=100)
    for split in SPLITS:
        found = stream(source, tokenizer, split, "")
        assert fingerprint(source, tokenizer, split, "") == packing.fingerprint(
            source, tokenizer, split
        )
        assert found[-1:].tolist() == [tokenizer.eot_id]


def test_a_file_that_changes_while_it_is_tokenised_is_in_no_shard(source, tmp_path):
    """The second file changes when the first is read; the first shards are of the old text."""
    late = tmp_path / "b.jsonl"
    before = late.read_bytes()
    after = before.replace(b"document", b"changing")

    class Late(TextFiles):
        def sections(self):
            first, second = super().sections()["text"]

            def read():
                late.write_bytes(after)
                return first.read()

            return {"text": [first._replace(read=read), second]}

    with pytest.raises(UserError, match=r"b\.jsonl changed while it was read.*Start again"):
        prepared(Late(source.path, validation=11, test=0.1), Bytes(), "")
    assert text_of(source).count("changing") > 50
    late.write_bytes(before)
    assert text_of(source).count("changing") == 0 and text_of(source).count("document") > 100


def text_of(source) -> str:
    tokens = stream(source, Bytes(), "train", "")[:]
    return bytes(tokens[tokens < 256].astype(np.uint8)).decode()
