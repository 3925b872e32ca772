"""The splits of a source as batches, and the fingerprint that a run keeps of its text."""

import pytest

from md4_jax.data import corpus
from md4_jax.data.corpus import Corpus, check_same_text
from md4_jax.data.domains import TextDomain
from md4_jax.data.tokenizers import Bytes
from md4_jax.options import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime import paths


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
        monkeypatch.setattr(corpus, "max_over_processes", lambda n, sign=sign: max(n, sign[n > 0]))
        if is_same:
            assert data.fingerprint() == found
        else:
            with pytest.raises(UserError, match="the processes have different training texts"):
                data.fingerprint()
