"""Downloads from a server of this machine that cuts connections, and the lock between processes."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time

import pytest

from md4_jax.data import download
from md4_jax.data.download import fetch
from md4_jax.data.lock import alone
from md4_jax.protocols import UserError

CONTENT = bytes(range(256)) * 4096  # a megabyte
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def url(server):
    server.files["/file"] = CONTENT
    return f"{server.url}/file"


def test_a_file_comes_whole_and_once(url, server, tmp_path):
    path = fetch(url, tmp_path / "file", sha256=SHA, size=len(CONTENT))
    assert path.read_bytes() == CONTENT
    assert fetch(url, path) == path and len(server.asked) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "file.lock"]


def test_a_file_of_somebody_else_is_taken_without_its_lock(url, server, tmp_path):
    """Which only its owner may open; here, nobody may."""
    (tmp_path / "file").write_bytes(CONTENT)
    (tmp_path / "file.lock").mkdir()
    assert fetch(url, tmp_path / "file") == tmp_path / "file" and not server.asked


def test_a_connection_that_is_cut_goes_on_where_it_ended(url, server, tmp_path):
    server.cut = 300_000
    assert fetch(url, tmp_path / "file", sha256=SHA).read_bytes() == CONTENT
    ranges = [asked for _, asked in server.asked]
    assert ranges == ["", "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_another_process_goes_on_where_one_was_killed(url, server, tmp_path):
    server.cut = 300_000
    partial = tmp_path / "file.partial"
    partial.write_bytes(CONTENT[:123_456])
    (tmp_path / "file.partial.etag").write_text(server.tag)
    assert fetch(url, tmp_path / "file", sha256=SHA).read_bytes() == CONTENT
    assert server.asked[0] == ("/file", "bytes=123456-") and not partial.exists()


@pytest.mark.parametrize("tag", ['"older"', None])
def test_a_file_that_changed_meanwhile_comes_from_the_start(tag, url, server, tmp_path):
    (tmp_path / "file.partial").write_bytes(b"of another version")
    if tag:
        (tmp_path / "file.partial.etag").write_text(tag)
    assert fetch(url, tmp_path / "file", sha256=SHA).read_bytes() == CONTENT


def test_a_whole_file_that_was_not_renamed(url, server, tmp_path):
    (tmp_path / "file.partial").write_bytes(CONTENT)
    (tmp_path / "file.partial.etag").write_text(server.tag)
    assert fetch(url, tmp_path / "file", sha256=SHA).read_bytes() == CONTENT


def test_a_wrong_checksum_is_deleted_and_told(url, tmp_path):
    with pytest.raises(UserError, match=f"has the SHA-256 {SHA} instead of {'0' * 64}"):
        fetch(url, tmp_path / "file", sha256="0" * 64)
    assert not (tmp_path / "file").exists() and not (tmp_path / "file.partial").exists()


def test_a_server_that_always_cuts_is_given_up(url, server, tmp_path):
    server.cut, server.tag = 7, ""  # without a tag each attempt begins again
    with pytest.raises(UserError, match=r"ended after 7 of 1,048,576 bytes\). Fetch it elsewhere"):
        fetch(url, tmp_path / "file", instead="Fetch it elsewhere")
    assert len(server.asked) == download.ATTEMPTS + 1 and not (tmp_path / "file").exists()


def test_what_is_not_there_is_told_at_once(server, tmp_path):
    with pytest.raises(UserError, match=f"{server.url}/none could not be downloaded.*404"):
        fetch(f"{server.url}/none", tmp_path / "none")
    assert len(server.asked) == 1
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match="could not be downloaded.*refused"):
        fetch(f"{server.url}/none", tmp_path / "none")


def test_a_full_disk_keeps_what_came(url, server, tmp_path, monkeypatch):
    class Full:
        def __init__(self, *arguments, **settings):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download.tqdm, "tqdm", Full)
    with pytest.raises(UserError, match="No space left"):
        fetch(url, tmp_path / "file")
    monkeypatch.undo()
    assert fetch(url, tmp_path / "file").read_bytes() == CONTENT


def test_a_lock_of_a_killed_process_is_taken_over(tmp_path, capsys):
    words = (
        "import sys, time, pathlib; from md4_jax.data.lock import alone\n"
        "with alone(pathlib.Path(sys.argv[1]), 'work'): print('has it', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", words, str(tmp_path / "lock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "has it\n"
    waits = time.monotonic()
    killer = subprocess.Popen(["bash", "-c", f"sleep 1; kill -9 {holder.pid}"])
    with alone(tmp_path / "lock", "tokenising"):
        assert time.monotonic() - waits > 0.8
        said = (tmp_path / "lock").read_text()
        assert said.startswith(f"process {os.getpid()} on ")
    assert f"waiting: tokenising is under way in process {holder.pid}" in capsys.readouterr().out
    assert holder.wait() == -signal.SIGKILL
    killer.wait()
    holder.stdout.close()
