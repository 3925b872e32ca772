"""Data sets of TFDS: their splits, and what is said when one is not there."""

import builtins
import importlib.util
import sys

import pytest
from records import prepare

from md4_jax.data import TfdsText
from md4_jax.data.sources.splits import SPLITS
from md4_jax.protocols import UserError

tfds = pytest.importorskip("tensorflow_datasets")


def read(source):
    return [list(source.documents(split)) for split in SPLITS]


def test_without_tensorflow(tmp_path):
    loaded = "tensorflow" in sys.modules
    source = TfdsText("tiny", data_dir=prepare(tmp_path, {"train": 3, "validation": 2, "test": 1}))
    assert read(source) == [
        ["train ö 0", "train ö 1", "train ö 2"],
        ["validation ö 0", "validation ö 1"],
        ["test ö 0"],
    ]
    assert ("tensorflow" in sys.modules) == loaded


def test_missing_splits_are_carved_from_train(tmp_path):
    root = prepare(tmp_path, {"train": 1000, "test": 2})
    train, validation, test = read(TfdsText("tiny", data_dir=root))
    assert len(train) == 950
    assert train + validation == [f"train ö {i}" for i in range(1000)]
    assert test == ["test ö 0", "test ö 1"]
    train, validation, test = read(TfdsText("tiny", data_dir=root, validation=10))
    assert (len(train), len(validation), len(test)) == (990, 10, 2)


def test_named_splits(tmp_path):
    root = prepare(tmp_path, {"train": 10, "test": 2, "held": 3})
    train, validation, test = read(TfdsText("tiny", data_dir=root, validation_split="held"))
    assert (len(train), validation[0], len(test)) == (10, "held ö 0", 2)
    with pytest.raises(
        UserError, match=r"data\.test_split: tiny has no split 'final'; it has .*te"
    ):
        read(TfdsText("tiny", data_dir=root, test_split="final"))


def test_all_is_every_split_that_is_used_once(tmp_path):
    root = prepare(tmp_path, {"train": 2, "held": 2, "other": 5})
    text = TfdsText("tiny", data_dir=root, validation_split="held", test_split="held")
    assert list(text.documents("all")) == ["train ö 0", "train ö 1", "held ö 0", "held ö 1"]


def test_fingerprints(tmp_path):
    one = TfdsText("tiny", data_dir=prepare(tmp_path / "a", {"train": 10, "test": 2}))
    other = TfdsText("tiny", data_dir=prepare(tmp_path / "b", {"train": 11, "test": 2}))
    assert one.fingerprint() == TfdsText("tiny", data_dir=one.data_dir).fingerprint()
    assert len({one.fingerprint(), other.fingerprint()}) == 2


def test_what_to_do_about_a_data_set_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"'nosuchset' was not found.*tfds build nosuchset"):
        read(TfdsText("nosuchset", data_dir=str(tmp_path)))
    with pytest.raises(UserError, match="download_and_prepare.*array_record") as caught:
        read(TfdsText("lm1b", data_dir=str(tmp_path)))
    assert "not prepared" in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "Without TensorFlow set data.name=public and data.dataset=lm1b." in str(caught.value)


def test_with_tensorflow_it_is_prepared(tmp_path, monkeypatch):
    """TensorFlow and its download are played; what is prepared is read as ever."""
    asked = []

    def download_and_prepare(builder, file_format):
        asked.append(file_format)
        if len(asked) == 1:
            raise OSError("no route to the files\nand more")
        prepare(tmp_path, {"train": 60, "test": 2}, "lm1b", str(builder.version))
        builder.info.read_from_directory(builder.data_dir)

    find = importlib.util.find_spec
    there = lambda name, *rest: name == "tensorflow" or find(name, *rest)  # noqa: E731
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", download_and_prepare)
    monkeypatch.setattr(importlib.util, "find_spec", there)
    source = TfdsText("lm1b", data_dir=str(tmp_path))
    with pytest.raises(UserError, match="lm1b could not be prepared in .*: no route to the files$"):
        read(source)
    assert source._builder.info.splits["train"].num_examples == 60
    assert asked == ["array_record"] * 2


def test_wrong_features(tmp_path):
    root = prepare(tmp_path, {"train": 10, "test": 2})
    with pytest.raises(
        UserError, match=r"no feature 'body' \(data\.text_key\); it has text, title"
    ):
        read(TfdsText("tiny", text_key="body", data_dir=root))
    with pytest.raises(UserError, match="tiny, train, example 0: 'title'.*is not text"):
        read(TfdsText("tiny", text_key="title", data_dir=root))


def test_a_data_set_without_a_train_split(tmp_path):
    root = prepare(tmp_path, {"all": 10})
    with pytest.raises(UserError, match="no split 'train'; it has all"):
        read(TfdsText("tiny", data_dir=root))


@pytest.mark.parametrize("name", ["tensorflow_datasets", "importlib_resources"])
def test_a_missing_package(monkeypatch, name):
    real = builtins.__import__

    def without(module, *args):
        if module == "tensorflow_datasets":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(module, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=f"pip install {name.replace('_', '-')}$"):
        read(TfdsText("lm1b"))
