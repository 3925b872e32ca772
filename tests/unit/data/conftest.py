"""What the tests of the data room share."""

import json
import pathlib

import pytest

SHARED = pathlib.Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own, so that nothing is downloaded or found by chance."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("MD4_JAX_CACHE", str(directory))
    return directory


@pytest.fixture
def shared():
    """Path of a file of the real data; the test is skipped where it is not."""

    def find(name: str) -> pathlib.Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"needs the real data ../shared/data/{name}")
        return path

    return find


@pytest.fixture
def tiny_bpe(tmp_path):
    """A directory with a byte-level BPE of three merges in Hugging Face's file names."""
    from tokenizers import pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*symbols, "he", "ll", "hell", "<|endoftext|>"]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\n")
    return tmp_path
