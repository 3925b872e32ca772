"""What a run keeps of its text: the tokenizer, written once, whole or not at all."""

import os
import types

import numpy as np
import pytest

from md4_jax import build, corpus, paths
from md4_jax.config import PACKAGE_ROOT, load
from md4_jax.data.tokenizers import Bytes, Characters
from md4_jax.protocols import UserError


@pytest.fixture
def workdir(tmp_path):
    return paths.place(tmp_path)


def test_a_tokenizer_is_written_once(workdir):
    kept = workdir / corpus.TOKENIZER_FILE
    corpus.keep_tokenizer(Characters("ab"), workdir)
    assert corpus.stored_tokenizer(workdir) == Characters("ab")
    before = os.stat(kept)
    corpus.keep_tokenizer(Characters("ab"), workdir)
    corpus.keep_tokenizer(Characters("ba"), workdir)
    after = os.stat(kept)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert corpus.stored_tokenizer(workdir) == Characters("ab")


def test_a_kill_while_a_tokenizer_is_written_leaves_none(workdir, monkeypatch):
    """Whatever is half written has another name."""

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        corpus.keep_tokenizer(Characters("ab"), workdir)
    assert not (workdir / corpus.TOKENIZER_FILE).exists()
    monkeypatch.undo()
    corpus.keep_tokenizer(Characters("ab"), workdir)
    assert corpus.stored_tokenizer(workdir) == Characters("ab")


@pytest.mark.parametrize("size", range(len(Characters("ab").to_json())))
def test_a_tokenizer_cut_short_is_named(size, workdir):
    kept = workdir / corpus.TOKENIZER_FILE
    kept.write_text(Characters("ab").to_json()[:size])
    with pytest.raises(UserError, match="tokenizer.json is damaged") as caught:
        corpus.stored_tokenizer(workdir)
    assert str(kept) in str(caught.value)
    with pytest.raises(UserError, match="tokenizer.json is damaged"):
        corpus.tokenizer_and_source({"data": {"name": "shakespeare"}}, workdir)


@pytest.mark.parametrize(
    "content", ["[]", "3", "{}", '{"name": "no"}', '{"name": "bytes", "x": 1}']
)
def test_what_is_no_tokenizer_is_named(content, workdir):
    (workdir / corpus.TOKENIZER_FILE).write_text(content)
    with pytest.raises(UserError, match="tokenizer.json is damaged"):
        corpus.stored_tokenizer(workdir)


def test_a_run_without_a_tokenizer_is_named(workdir):
    with pytest.raises(UserError, match="tokenizer.json is missing"):
        corpus.stored_tokenizer(workdir)
    source_and = corpus.tokenizer_and_source(
        {"data": {"name": "shakespeare"}, "tokenizer": {"name": "bytes"}}, workdir
    )
    assert source_and[0] == Bytes()


def test_a_run_is_resumed_on_its_own_text_alone(workdir):
    kept = {"tokens": 1234, "crc32": 0xAB}
    corpus.check_same_text(kept, dict(kept), workdir)
    corpus.check_same_text(None, kept, workdir)  # a checkpoint of before there were fingerprints
    for other in ({"tokens": 1235, "crc32": 0xAB}, {"tokens": 1234, "crc32": 0xAC}):
        with pytest.raises(UserError) as caught:
            corpus.check_same_text(kept, other, workdir)
        for text in (kept, other):
            assert f"{text['tokens']:,} tokens, CRC-32 {text['crc32']:08x}" in str(caught.value)
        assert "Put the text (data.path)" in str(caught.value)
        assert f"--config.train.initial={workdir}" in str(caught.value)


def test_processes_with_different_texts_are_refused(monkeypatch):
    """One of two processes, each with a CRC-32 of 32 bits; the other's is given."""
    mine, exp = 0xFFFFFFFE, types.SimpleNamespace(tokenizer=None)
    found = {"tokens": 10, "crc32": mine}
    monkeypatch.setattr(corpus.packing, "fingerprint", lambda *arguments: found)
    for other, is_same in ((mine, True), (mine - 4, False), (3, False)):
        sign = {True: other >> 1, False: -(other >> 1)}
        monkeypatch.setattr(corpus, "largest", lambda n, sign=sign: max(n, sign[n > 0]))
        if is_same:
            assert corpus.fingerprint(exp, None) == found
        else:
            with pytest.raises(UserError, match="the processes have different training texts"):
                corpus.fingerprint(exp, None)


@pytest.mark.parametrize("apart", [False, True])
def test_documents_are_apart_where_that_is_asked_for(apart):
    """The end of a text belongs to it; what follows is a segment of its own."""
    config = load(str(PACKAGE_ROOT / "configs" / "base.py"))
    config["data"] |= {"separate_documents": apart, "length": 4}
    config["mesh"]["data"] = 1
    exp = build.experiment(config, Bytes())
    (batch,) = corpus.batches_of(exp, np.array([[97, 256, 98, 99]]))
    assert batch.context.keys() == ({"segments"} if apart else set())
    if apart:
        np.testing.assert_array_equal(batch.context["segments"][0], [0, 0, 1, 1])
