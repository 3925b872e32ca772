"""The text8 source: small files of its kind, what it refuses, its download without a network."""

import io
import zipfile
import zlib

import numpy as np
import pytest

from md4_jax.data.sources import text8
from md4_jax.data.sources.splits import SPLITS
from md4_jax.data.sources.text8 import Text8
from md4_jax.protocols import UserError

SYMBOLS = np.frombuffer(b" abcdefghijklmnopqrstuvwxyz", np.uint8)
CONTENT = np.random.default_rng(0).choice(SYMBOLS, 1000).tobytes()


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text8", content)
    return buffer.getvalue()


def with_password(archive: bytes) -> bytes:
    """Sets the bit of encryption in both headers of an archive's only member."""
    changed = bytearray(archive)
    changed[6] |= 1
    changed[archive.index(b"PK\x01\x02") + 8] |= 1
    return bytes(changed)


@pytest.fixture(params=["text8", "text8.zip"])
def small(request, tmp_path):
    path = tmp_path / request.param
    path.write_bytes(zipped(CONTENT) if path.suffix else CONTENT)
    return path


def read(source: Text8) -> list[str]:
    return ["".join(source.documents(split)) for split in SPLITS]


def test_the_splits_are_the_corpus(small):
    parts = read(Text8(str(small)))
    assert [len(part) for part in parts] == [900, 50, 50]
    assert "".join(parts).encode() == CONTENT
    assert list(Text8(str(small)).documents("all")) == [CONTENT.decode()]


def test_a_shorter_file_is_warned_of(small, monkeypatch):
    (warning,) = Text8(str(small)).warnings
    assert "1,000 characters" in warning and "not comparable with published text8" in warning
    monkeypatch.setattr(text8, "TEXT_BYTES", 1000)
    assert Text8(str(small)).warnings == ()


def test_a_full_file_must_have_the_right_crc(small, monkeypatch):
    monkeypatch.setattr(text8, "TEXT_BYTES", 1000)
    crc = zlib.crc32(CONTENT)
    with pytest.raises(UserError, match=f"CRC-32 is {crc:08x} instead of 7d6be66f"):
        read(Text8(str(small)))
    monkeypatch.setattr(text8, "TEXT_CRC", crc)
    assert len(read(Text8(str(small)))) == 3


def test_the_first_foreign_byte_is_named(tmp_path):
    path = tmp_path / "text8"
    path.write_bytes(CONTENT[:777] + b"B" + CONTENT[778:] + b"\n")
    with pytest.raises(UserError, match=r"b'B' at offset 777"):
        read(Text8(str(path)))


@pytest.mark.parametrize("size", [0, 99])
def test_too_short(tmp_path, size):
    path = tmp_path / "text8"
    path.write_bytes(CONTENT[:size])
    with pytest.raises(UserError, match=rf"holds {size} bytes.*100,000,000.*100 are needed"):
        read(Text8(str(path)))


def test_a_missing_or_damaged_file(tmp_path):
    with pytest.raises(UserError, match=r"data\.path: there is no file .*nowhere"):
        read(Text8(str(tmp_path / "nowhere")))
    path = tmp_path / "text8.zip"
    path.write_bytes(zipped(CONTENT)[:300])
    for use in (read, lambda source: source.warnings):
        with pytest.raises(UserError, match="not a whole zip file"):
            use(Text8(str(path)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "a")
        archive.writestr("b", "b")
    with pytest.raises(UserError, match="should hold one file, text8, but holds 2"):
        read(Text8(str(path)))
    path.write_bytes(with_password(zipped(CONTENT)))
    with pytest.raises(UserError, match="is encrypted, password required"):
        read(Text8(str(path)))


def test_the_fingerprint_follows_the_file(small):
    before = Text8(str(small)).fingerprint()
    assert Text8(str(small)).fingerprint() == before
    small.write_bytes(small.read_bytes() + b" ")
    assert Text8(str(small)).fingerprint() != before


def test_a_failing_download_says_what_to_put_where(cache, server, monkeypatch):
    monkeypatch.setattr(text8, "URL", f"{server.url}/text8.zip")
    with pytest.raises(UserError, match=rf"404.*put it at {cache}/text8\.zip.*data\.path"):
        read(Text8())
    assert not list(cache.glob("*.zip"))


def test_a_short_download_is_not_kept(cache, server, monkeypatch):
    server.files["/text8.zip"] = zipped(CONTENT)[:300]
    monkeypatch.setattr(text8, "URL", f"{server.url}/text8.zip")
    with pytest.raises(UserError, match=r"received 300 bytes instead of 31,344,016.*data\.path"):
        read(Text8())
    assert not list(cache.glob("*.zip")) and not list(cache.glob("*.partial"))


def test_a_download_happens_once(cache, server, monkeypatch):
    server.files["/text8.zip"] = zipped(CONTENT)
    monkeypatch.setattr(text8, "URL", f"{server.url}/text8.zip")
    monkeypatch.setattr(text8, "ZIP_BYTES", len(zipped(CONTENT)))
    assert "".join(read(Text8())).encode() == CONTENT
    assert read(Text8()) and len(server.asked) == 1
    assert (cache / "text8.zip").exists()


def test_a_file_in_the_cache_is_found(cache):
    cache.mkdir()
    (cache / "text8").write_bytes(CONTENT)
    assert "".join(read(Text8())).encode() == CONTENT


def test_real_text8(shared):
    source = Text8(str(shared("text8/text8.first10M")))
    (test,) = source.documents("test")
    assert len(test) == 500_000
    assert next(source.documents("train")).startswith(" anarchism originated as a term")
