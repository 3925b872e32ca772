"""Files that are written whole or not at all."""

import errno
import os
import stat
from types import SimpleNamespace

import pytest

from md4_jax.protocols import UserError
from md4_jax.runtime import paths


@pytest.fixture
def synced(monkeypatch):
    """What was flushed to the disk, in order: (kind, files of the directory at that time)."""
    found, real = [], os.fsync

    def noting(number):
        what = os.readlink(f"/proc/self/fd/{number}")
        is_directory = stat.S_ISDIR(os.fstat(number).st_mode)
        directory = what if is_directory else os.path.dirname(what)
        found.append((os.path.basename(what), sorted(os.listdir(directory))))
        real(number)

    monkeypatch.setattr(os, "fsync", noting)
    return found


def test_the_content_is_on_the_disk_before_the_name_and_the_name_at_the_end(synced, tmp_path):
    file = paths.place(tmp_path / "run" / "config.json")
    file.parent.mkdir()
    paths.replace(file, "new")
    before = ("config.json.partial", ["config.json.partial"])
    assert synced == [before, ("run", ["config.json"])]
    assert file.read_text() == "new"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = paths.place(tmp_path / "config.json")
    file.write_text("old")

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        paths.replace(file, "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(file.name, "old")]


@pytest.mark.parametrize("number, is_fine", [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_whose_directories_cannot_be_flushed(number, is_fine, tmp_path, monkeypatch):
    file, real = paths.place(tmp_path / "config.json"), os.fsync

    def unable(opened):
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(number, os.strerror(number))
        real(opened)

    monkeypatch.setattr(os, "fsync", unable)
    if is_fine:
        paths.replace(file, "new")
    else:
        with pytest.raises(OSError, match="Input/output"):
            paths.replace(file, "new")
    assert file.read_text() == "new"


def test_a_file_is_no_workdir(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match="--workdir .*a is a file, and not a directory"):
        paths.check_writable(paths.place(tmp_path / "a"))


class Outage:
    """An object in a store that does not answer, with an error of the store's library."""

    def __str__(self):
        return "gs://bucket/run/metrics.jsonl"

    def exists(self):
        raise RuntimeError("503: try later")

    def write_text(self, text):
        raise RuntimeError("503: try later")


@pytest.mark.parametrize("write", [paths.append, paths.replace])
def test_an_outage_of_a_store_is_an_error_as_of_a_disk(write):
    with pytest.raises(OSError, match="503: try later") as found:
        write(Outage(), "line")
    assert found.value.errno == errno.EIO and found.value.filename == str(Outage())


def test_an_outage_while_a_part_of_an_object_is_read(monkeypatch):
    def cat_file(name, start, end):
        raise RuntimeError("503: try later")

    store = SimpleNamespace(cat_file=cat_file)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda address: (store, address))
    with pytest.raises(OSError, match="503: try later"):
        paths.read_range(Outage(), 0, 8)


def test_what_cannot_be_the_name_of_a_file_is_none(tmp_path):
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    for name in ("itself", "n" * 300, "a.txt/b"):
        (tmp_path / "a.txt").write_text("a file")
        assert not paths.exists(paths.place(tmp_path / name))
