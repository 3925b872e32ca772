"""Texts of classes: each document a row, cut or padded, whose label the network is told."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import tiny_networks

from md4_jax.config import inputs, load
from md4_jax.data.corpus import Corpus
from md4_jax.data.domains import TextDomain, domain_from_json, domain_of, keep_domain
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.tokenizers import Bytes, Characters
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place

LENGTH = 6
TEXTS = [("good", "pos"), ("bad", "neg"), ("very good", "pos"), ("", "neg"), ("so so", "mid")]


@pytest.fixture
def source(tmp_path):
    """A source of JSON lines; two of the texts are the test split."""

    def source(texts=TEXTS, test=2, key="stars"):
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": t, key: c}) + "\n" for t, c in texts))
        return TextFiles(str(path), label_key="stars", validation=0, test=test)

    return source


def corpus(source, tokenizer=None, length=LENGTH):
    domain = domain_of(source, lambda: tokenizer or Bytes(), length)
    return Corpus(source, domain, DataOptions(length))


def evaluated(data, split="train", size=3):
    (batch,) = data.eval_batches(split, batch_size=size, rows=np.arange(size))
    return batch


def test_a_text_is_a_row(source, capsys):
    """With its end, cut where it is too long, padded where it is short."""
    data = corpus(source([*TEXTS[:3], ("x", "neg")], test=1))
    batch = evaluated(data)
    counted = batch.loss_mask
    said = "1 of 3 texts of the train split are cut: they have more than data.length=6 tokens\n"
    assert capsys.readouterr().out == said
    rows = [row[own] for row, own in zip(batch.tokens, counted, strict=True)]
    assert [Bytes().decode(r) for r in rows] == ["good<|endoftext|>", "bad<|endoftext|>", "very g"]
    assert batch.tokens.shape == (3, LENGTH) and (batch.tokens[~counted] == 0).all()
    assert batch.context["label"].tolist() == [1, 0, 1]
    assert batch.context["label"].dtype == np.int32 and data.domain.labels == ("neg", "pos")
    assert batch.text.tolist() == [[4, 1], [3, 1], [6, 2]]
    assert data.sizes(["train", "test"]) == {"train": (3, 15), "test": (1, 2)}
    assert Bytes().decode(data.stream("train")) == "".join(Bytes().decode(r) for r in rows)


def test_a_tokenizer_without_an_end_has_empty_rows(source):
    data = corpus(source(TEXTS, test=0), Characters("abdegorsvy "))
    batch = evaluated(data, size=5)
    assert batch.loss_mask.sum(axis=1).tolist() == [4, 3, 6, 0, 5]
    assert data.sizes(["train"])["train"] == (5, 18)
    assert evaluated(data, size=5).context["label"].tolist() == [2, 1, 2, 1, 0]


def test_training_takes_rows_and_labels(source):
    data = corpus(source(TEXTS, test=0))
    seen = set()
    batches = data.train_batches(batch_size=5, rows=np.arange(5), seed=0)
    batch = next(batches)
    for row, counted, label in zip(
        batch.tokens, batch.loss_mask, batch.context["label"], strict=True
    ):
        seen.add((Bytes().decode(row[counted]).split("<")[0], data.domain.labels[label]))
    assert seen == {(text[:LENGTH], label) for text, label in TEXTS}


def test_a_row_may_be_longer_than_the_vocabulary(source):
    """How many of its tokens count is kept beside them, as a number of the same type."""
    data = corpus(source([("a" * 69_000, "pos"), ("b", "neg")], test=0), length=70_000)
    assert evaluated(data, size=2).loss_mask.sum(axis=1).tolist() == [69_001, 2]


def test_rows_are_tokenised_once(source, cache):
    data = corpus(source())
    first = data.fingerprint()
    (kept,) = (cache / "tokens").glob("train-*.uint16")
    at = kept.stat().st_mtime_ns
    assert corpus(source()).fingerprint() == first and kept.stat().st_mtime_ns == at
    found = {first["crc32"], corpus(source(), length=LENGTH + 1).fingerprint()["crc32"]}
    for changed in (("Good", "pos"), ("good", "neg")):
        found.add(corpus(source([changed, *TEXTS[1:]])).fingerprint()["crc32"])
    assert len(found) == 4


@pytest.mark.parametrize("key", ["stars", ""])
def test_rows_of_another_length_or_padding_are_others(key, source):
    """With labels and without, all in one cache."""
    files, found = dataclasses.replace(source(), label_key=key), set()
    for padding, length in itertools.product(("hidden", "end_of_text"), (LENGTH, LENGTH + 1)):
        options = DataOptions(length, padding=padding, windows="documents")
        data = Corpus(files, domain_of(files, Bytes, length), options)
        assert len(data.example("train", 0)) == length
        assert data.has_labels("train") == bool(key)
        found.add(json.dumps(data.fingerprint()))
    assert len(found) == 4


def test_numbers_are_classes_as_they_are(source):
    data = corpus(source([("a", 3), ("b", 0), ("c", 1), ("d", 2)], test=1))
    assert data.domain.labels == (0, 1, 2, 3)
    assert evaluated(data).context["label"].tolist() == [3, 0, 1]


def test_the_domain_keeps_the_labels(source, tmp_path):
    config = {
        "data": {"name": "text", "path": source().path, "label_key": "stars", "test": 2,
                 "validation": 0, "length": LENGTH},
        "tokenizer": {"name": "bytes"},
    }  # fmt: skip
    domain, _ = inputs.domain_and_source(config, place(tmp_path))
    assert domain == TextDomain(Bytes(), LENGTH, ("neg", "pos"))
    assert domain_from_json(domain.to_json(), 99) == domain
    numbers = TextDomain(Bytes(), LENGTH, (0, 1, 2))
    assert domain_from_json(numbers.to_json(), 99) == numbers


def test_a_run_that_starts_from_another_takes_its_tokenizer_and_not_its_classes(source, tmp_path):
    first = tmp_path / "first"
    first.mkdir()
    section = {"name": "characters", "alphabet": None}
    load.store(place(first), {"data": {"length": 9}, "tokenizer": section})
    keep_domain(TextDomain(Characters(" <abcdefghijklmnopqrstuvwxyz"), 9, ("x", "y")), place(first))
    config = {
        "data": {"name": "text", "path": source().path, "label_key": "stars", "test": 2,
                 "validation": 0, "length": LENGTH},
        "tokenizer": section,
        "train": {"initial": str(first)},
    }  # fmt: skip
    domain, _ = inputs.domain_and_source(config, place(tmp_path / "second"))
    assert domain == TextDomain(Characters(" <abcdefghijklmnopqrstuvwxyz"), LENGTH, ("neg", "pos"))
    other = {**config, "tokenizer": {"name": "characters"}}
    assert len(inputs.domain_and_source(other, None)[0].tokenizer.alphabet) < 28


@pytest.mark.parametrize(
    "texts, words",
    [
        ([*TEXTS[:4], ("x", "odd")],
         r"texts.jsonl, line 5, of the test split, has the label 'odd', which .* are 'neg', 'pos'"),
        ([("a", 0), ("b", 1), ("c", 2), ("d", 0), ("e", 3)], "line 5, of the test .* label 3"),
        ([("a", 0), ("b", "one"), ("c", 2), *TEXTS[:2]],
         r"line 2 is the name 'one', and in .*line 1 it is the number 0"),
        ([("a", 0), ("b", -1), ("c", 2), *TEXTS[:2]], "line 2 is -1. Numbers are .* 0..65535"),
        ([("a", 70000), *TEXTS], "line 1 is 70000"),
        ([("a", True), *TEXTS], r"line 1: 'stars' must be a class \(a name or .*\), not true"),
        ([("a", 1.5), *TEXTS], "not a number: 1.5"),
        (TEXTS[:1], "nothing is left to train on"),
    ],
)  # fmt: skip
def test_labels_that_are_refused(texts, words, source):
    with pytest.raises(UserError, match=words):
        corpus(source(texts)).sizes(["train", "test"])


def test_a_key_that_is_not_there(source, tmp_path):
    with pytest.raises(UserError, match=r"line 1: no key 'stars' \(data.label_key\); it has other"):
        corpus(source(key="other"))
    (tmp_path / "texts.txt").write_text("no lines")
    here = TextFiles(str(tmp_path / "texts.*"), label_key="stars")
    with pytest.raises(
        UserError, match="label_key=.stars. needs files of records.* includes .*txt"
    ):
        corpus(here)


def test_labels_change_the_fingerprint_only_where_they_are(source, tmp_path):
    """So that text of before keeps its tokens in the cache."""
    with_labels = source()
    without = TextFiles(with_labels.path, validation=0, test=2)
    assert with_labels.fingerprint() != without.fingerprint()
    assert list(with_labels.documents("test")) == ["", "so so"]


@pytest.mark.slow
def test_padding_is_not_seen(source):
    """Features of a text are those of the text alone, whatever stands behind it."""
    data = corpus(source([*TEXTS[:3], ("x", "neg")], test=1))
    batch = evaluated(data)
    assert (batch.context["segments"] == np.where(batch.loss_mask, 0, -1)).all()
    network, params = tiny_networks.built(vocab_size=257, depth=1)
    z, t = np.where(batch.loss_mask, 257, batch.tokens), np.full(3, 0.5, np.float32)
    segments = {"segments": batch.context["segments"]}
    found = network.bind(params, segments, None)(z, t)
    other = network.bind(params, segments, None)(np.where(batch.loss_mask, z, 7), t)
    for row, length in enumerate(batch.loss_mask.sum(axis=1)):
        alone = network.bind(params, {}, None)(z[row : row + 1, :length], t[:1])[0]
        np.testing.assert_allclose(found[row, :length], alone, atol=2e-5)
        np.testing.assert_array_equal(other[row, :length], found[row, :length])
