"""Sources whose examples are rows with something that belongs to each: pixels with a class."""

import dataclasses
import json
import math
import types

import numpy as np
import pytest
from pixels import Pixels

from md4_jax.config import inputs, schema
from md4_jax.data.corpus import Corpus
from md4_jax.data.pixels import PixelDomain
from md4_jax.data.sequences import Rows
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place

SHAPE = (2, 2, 3)
OPTIONS = DataOptions(length=math.prod(SHAPE))


@dataclasses.dataclass(frozen=True)
class Images:
    """Image i of a split has the pixels 12 i, 12 i + 1, ... and the class i % 3."""

    train: int = 10
    test: int = 5
    warnings = ()

    def fingerprint(self):
        return "images"

    def domain(self):
        return Pixels()

    def rows(self, split):
        count = getattr(self, split)
        tokens = np.arange(count * 12, dtype=np.uint8).reshape(count, 12)
        return Rows(tokens, {"label": np.arange(count) % 3})


def numbers(batch) -> np.ndarray:
    """Which image each row is; its class must have come with it."""
    assert batch.tokens.dtype == np.int32 and batch.context["label"].dtype == np.int32
    assert (batch.tokens - batch.tokens[:, :1] == np.arange(12)).all()
    found = batch.tokens[:, 0] // 12
    assert (batch.context["label"] == found % 3).all()
    return found


DATA = Corpus(Images(), Pixels(), OPTIONS)


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("taken", [0, 1, 7])
@pytest.mark.cases(3)
def test_training_rows_come_with_their_context(processes, taken):
    """Once an epoch, alike for any number of processes, and from any place on."""

    def iterators():
        shares = np.arange(4).reshape(processes, -1)
        return [DATA.train_batches(batch_size=4, rows=rows, seed=2) for rows in shares]

    def seen(made, count):
        return [int(n) for _ in range(count) for one in made for n in numbers(next(one))]

    whole = seen(iterators(), 10)
    assert (np.sort(np.reshape(whole, (4, 10))) == np.arange(10)).all()
    assert whole == seen([DATA.train_batches(batch_size=4, rows=np.arange(4), seed=2)], 10)
    interrupted, resumed = iterators(), iterators()
    seen(interrupted, taken)
    for one, other in zip(interrupted, resumed, strict=True):
        other.set_state(json.loads(json.dumps(one.get_state())))
    assert seen(resumed, 3) == whole[4 * taken : 4 * taken + 12]


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_goes_through_all_rows_in_order(processes):
    for rows in np.arange(4).reshape(processes, -1):
        first, last = DATA.eval_batches("test", batch_size=4, rows=rows)
        assert numbers(first).tolist() == rows.tolist() and first.text is None
        real = rows < 1
        assert last.loss_mask.tolist() == [[is_real] * 12 for is_real in real.tolist()]
        assert last.tokens[real, 0].tolist() == [48] * real.sum()
        assert last.context["label"].tolist() == [1 if r else 0 for r in real]


def test_sizes_and_tokens_of_rows():
    assert DATA.sizes(["train", "test"]) == {"train": (10, 120), "test": (5, 60)}
    assert DATA.stream("test").tolist() == list(range(60))
    with pytest.raises(UserError, match="train split has 0 tokens"):
        Corpus(Images(train=0), Pixels(), OPTIONS).sizes(["train"])


def test_a_fingerprint_sees_tokens_context_and_lengths():
    tokens, label = np.arange(12).reshape(3, 4), np.arange(3)
    same = [
        Rows(tokens.copy(), {"label": label}),
        Rows(np.asfortranarray(tokens), {"label": label}),
    ]
    other = [
        Rows(tokens + np.eye(3, 4, dtype=int), {"label": label}),
        Rows(tokens, {"label": label[::-1]}),
        Rows(tokens),
        Rows(tokens, {"label": label}, np.array([4, 4, 3])),
    ]
    first, *others = [rows.fingerprint() for rows in same + other]
    assert others[0] == first and first["tokens"] == 12
    assert len({one["crc32"] for one in others}) == 5
    assert Rows(tokens, lengths=np.array([4, 0, 3])).stream().tolist() == [0, 1, 2, 3, 8, 9, 10]
    assert DATA.fingerprint() == DATA.source.rows("train").fingerprint()


@pytest.mark.parametrize(
    "options, words",
    [
        (DataOptions(length=256), r"data.length=256 must be 12: .* the shape \(2, 2, 3\)"),
        (DataOptions(length=12, windows="every"), "data.windows='every' and"),
        (
            DataOptions(length=12, separate_documents=True),
            "separate_documents=True are only for text",
        ),
    ],
)
def test_what_is_for_text_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        Corpus(Images(), Pixels(), options)
    with pytest.raises(UserError, match="stride=3 is only for text"):
        DATA.eval_batches("test", batch_size=1, rows=[0], stride=3)


def test_other_images_than_those_of_the_run_are_refused():
    words = r"examples of shape \(2, 2, 3\) with 256 symbols, but .* shape \(4, 1, 3\)"
    with pytest.raises(UserError, match=words):
        Corpus(Images(), Pixels((4, 1, 3)), OPTIONS)


@pytest.mark.parametrize(
    "own, run, said",
    [
        (("cat", "dog"), ("cat", "dog", "owl"), ""),
        ((), ("cat", "dog"), ""),
        (("cat", "dog"), (), ""),
        ((0, 1), (0, 1, 2), ""),
        ((0, 1), ("cat", "dog"), ""),
        (("cat", "dog"), (0, 1), ""),
        (("dog", "owl"), ("cat", "dog", "owl"), "class 0 is 'dog' instead of 'cat'"),
        (("cat", "ox", "dog"), ("cat", "dog", "ox"), "class 1 is 'ox' instead of 'dog'"),
        (("cat", "dog", "owl"), ("cat", "dog"), "class 2 is 'owl' instead of no class"),
        (("cat",), (0, 1), "class 0 is 'cat' instead of 0"),
    ],
)
def test_classes_with_other_numbers_than_in_the_run_are_refused(own, run, said):
    """The network would be told the class of another name."""
    source = types.SimpleNamespace(
        domain=lambda: PixelDomain(SHAPE, labels=own), rows=Images().rows, warnings=()
    )
    if not said:
        Corpus(source, PixelDomain(SHAPE, labels=run), OPTIONS)
        return
    with pytest.raises(UserError, match=f"have other classes than the run: {said}"):
        Corpus(source, PixelDomain(SHAPE, labels=run), OPTIONS)


def test_an_example_by_its_number():
    assert DATA.example("test", 4).tolist() == list(range(48, 60))
    with pytest.raises(UserError, match="image_from=test:5: the test split has 5 images"):
        DATA.example("test", 5)


def test_the_domain_of_a_source_that_has_its_own(monkeypatch, tmp_path):
    """No tokenizer is made."""
    monkeypatch.setitem(schema.REGISTRIES["data"], "images", Images)
    asked = {"data": {"name": "images", "length": 12}, "tokenizer": {"name": "bpe"}}
    domain, source = inputs.domain_and_source(asked, place(tmp_path))
    assert domain == Pixels() and source == Images()
    assert domain.decode(next(iter(DATA.stream("train").reshape(-1, 12)))).shape == SHAPE
