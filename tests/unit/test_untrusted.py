"""Files of others: nothing outside of a run directory is read, asked or written for their sake."""

import gzip
import json
import os
import tarfile
import zipfile

import pytest

from md4_jax.config import load as config
from md4_jax.data import bpe_files
from md4_jax.data.domains import TextDomain, keep_domain, stored_domain
from md4_jax.data.sources import formats, mnist, text8
from md4_jax.data.tokenizers import BytePairs, Characters
from md4_jax.protocols import UserError
from md4_jax.runtime import paths, streams


@pytest.fixture
def workdir(tmp_path):
    return paths.place(tmp_path / "run")


def test_terminals_get_no_commands(capsys):
    hostile = "a\x1b[2Jb\x9bc\r\x07d\u202ee\ud800\tf\ng é ✓"
    shown = "a\\x1b[2Jb\\x9bc\\r\\x07d\\u202ee\\ud800\tf\ng é ✓"
    assert streams.printable(hostile) == shown
    assert streams.print_user_error(UserError("\x1b[31mred")) == 2
    assert capsys.readouterr().err == "error: \\x1b[31mred\n"


@pytest.mark.parametrize("where", [{"hub": "gpt2"}, {"path": "/etc"}, {"hub": "x", "path": None}])
def test_a_planted_tokenizer_asks_nobody(where, workdir, monkeypatch):
    def asked(name):
        raise AssertionError(name)

    monkeypatch.setattr(bpe_files, "from_hub", asked)
    monkeypatch.setattr(bpe_files, "from_path", asked)
    workdir.mkdir()
    fields = {"domain": "text", "length": 4, "tokenizer": {"name": "bpe", **where}}
    for content in (fields, fields["tokenizer"]):
        (workdir / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="refers to other files instead of containing"):
            stored_domain(workdir, 4)


def test_an_alphabet_has_a_checksum(workdir):
    workdir.mkdir()
    keep_domain(TextDomain(Characters("abc"), 4), workdir)
    kept = workdir / "tokenizer.json"
    kept.write_text(kept.read_text().replace("abc", "acb"))
    with pytest.raises(UserError, match="its checksum is wrong"):
        stored_domain(workdir, 4)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples/step_00000030.txt", "samples"])
def test_nothing_is_written_through_a_link(name, workdir, tmp_path):
    (workdir / name).parent.mkdir(parents=True)
    (workdir / "own").write_text("")
    os.symlink(workdir / "own", workdir / "link")
    paths.check_links(workdir)
    os.symlink(tmp_path / "precious", workdir / name)
    with pytest.raises(UserError, match=f"{name} is a symbolic link to {tmp_path}/precious"):
        paths.check_links(workdir)


def test_a_run_directory_may_itself_be_a_link(workdir, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "a").write_text("")
    os.symlink(tmp_path / "disk", workdir)
    paths.check_links(workdir)


def test_a_vocabulary_with_a_huge_id():
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.BPE(vocab={"a": 2**25}, merges=[]))
    with pytest.raises(
        UserError, match="must have 1 to 16,777,216 ids, and this one has 33,554,433"
    ):
        assert BytePairs(definition=made.to_str(), eot=None).vocab_size


@pytest.mark.parametrize("ending", ["txt.gz", "jsonl.gz", "zip", "tar.gz"])
def test_a_text_is_bounded_when_it_is_unpacked(ending, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LARGEST", 10_000)
    text, path = b"a" * 10_001, paths.place(tmp_path / f"bomb.{ending}")
    (tmp_path / "plain").write_bytes(text)
    if ending == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a", text)
    elif ending == "tar.gz":
        with tarfile.open(path, "w:gz") as archive:
            archive.add(tmp_path / "plain", "a")
    else:
        path.write_bytes(gzip.compress(text))
    with pytest.raises(UserError, match="more than 10,000 bytes after decompression"):
        list(formats.read(path, formats.Keys("text")))


def test_text8_and_images_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "text8.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text8", b"a" * 5001)
    monkeypatch.setattr(text8, "TEXT_BYTES", 5000)
    with pytest.raises(UserError, match="5,001 bytes, more than the 5,000 of text8"):
        list(text8.Text8(str(path)).documents("train"))
    monkeypatch.setattr(mnist, "LARGEST", 5000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(5001)))
    with pytest.raises(UserError, match="more than 5,000 bytes"):
        mnist.unpacked(paths.place(tmp_path / "a.gz"))


def test_an_empty_config(workdir, capsys):
    workdir.mkdir()
    (workdir / config.FILE).write_text("\0\0\n")
    with pytest.raises(UserError, match="is empty, perhaps after a power .* --config"):
        config.stored(workdir)
    assert config.stored(workdir, may_be_empty=True) is None
    assert "is written again from --config" in capsys.readouterr().out
