"""Vocabulary of molecules: the entries of its authors' class, and what is refused."""

import json
import sys
import types
from pathlib import Path

import pytest

from md4_jax.data import bpe_files
from md4_jax.data.byte_pairs import BytePairs
from md4_jax.data.tokenizers import from_json
from md4_jax.protocols import UserError

TOLD = json.loads((Path(__file__).parents[2] / "published" / "smiles.json").read_text())


def written(folder: Path, kind: str = "QM9Tokenizer", entries=TOLD["entries"]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(entries))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    return folder


def test_ids_and_texts_are_those_of_their_class(tmp_path):
    """Of molecules, special entries, unknown atoms, and of texts that are no molecules."""
    own = BytePairs(path=str(written(tmp_path)), eot="<eos>")
    again = from_json(own.to_json())
    assert len(TOLD["texts"]) == 60
    for text, ids, decoded in TOLD["texts"]:
        for tokenizer in (own, again):
            assert tokenizer.encode(text).tolist() == ids, text
            assert tokenizer.join(tokenizer.encode(text)) == decoded
    assert (own.vocab_size, own.eot_id, own.id_of("<mask>")) == (35, 1, 2)
    assert own.special == ("<bos>", "<eos>", "<mask>", "<pad>", "<unk>")


@pytest.mark.parametrize(
    "entries, said",
    [
        ({"<bos>": 0, "C": 1}, "vocab.json has the entry '<bos>', but the tokenizer class adds"),
        ({"C": 0, "O": 2}, "the ids of its 2 entries must be 0, 1, 2"),
        ([], "vocab.json is not readable JSON: it holds no object"),
    ],
)
def test_another_vocabulary_is_refused(entries, said, tmp_path):
    with pytest.raises(UserError, match=said):
        BytePairs(path=str(written(tmp_path, entries=entries)), eot="<eos>")


def test_a_vocabulary_of_another_class_needs_its_merges(tmp_path):
    with pytest.raises(UserError, match="no tokenizer at .* It must contain tokenizer.json"):
        BytePairs(path=str(written(tmp_path, "GPT2Tokenizer")), eot="<eos>")


def test_it_is_fetched_from_the_hub_or_found_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / "cache"))
    folder, asked = written(tmp_path / "hub"), []

    class Interface:
        def repo_info(self, name, timeout):
            if asked:
                raise OSError("no route")
            names = ("vocab.json", "tokenizer.py", "tokenizer_config.json")
            return types.SimpleNamespace(
                siblings=[types.SimpleNamespace(rfilename=x) for x in names]
            )

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    def cached(name, file):
        return str(folder / file) if asked and file == "vocab.json" else None

    hub = types.SimpleNamespace(
        HfApi=Interface, snapshot_download=snapshot_download, try_to_load_from_cache=cached
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    for _ in range(2):
        found = bpe_files.from_hub("yairschiff/qm9-tokenizer")
        assert found.encode("CCO", add_special_tokens=False).ids == [15, 15, 18]
    assert asked == [("yairschiff/qm9-tokenizer", ["vocab.json", "tokenizer_config.json"])]
