"""Mixtures: shares, epochs and order of the parts, held-out splits, and what is refused."""

import json
from collections import Counter

import numpy as np
import pytest

from md4_jax.config import inputs
from md4_jax.config import load as config_lib
from md4_jax.config.schema import load_config, type_of
from md4_jax.data.domains import TextDomain
from md4_jax.data.mixtures import BLOCK, Joined, Mixed, apportioned, corpus_of, woven
from md4_jax.data.sequences import Rows, Windows
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.sources.mixture import Mixture, Part
from md4_jax.data.tokenizers import Bytes
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place

FOUR = 4  # tokens of a sequence
LARGE = 50_000


def windows(first, count):
    """Sequences [first, first, ..], [first + 1, ...], ... of four tokens."""
    return Windows(np.repeat(np.arange(first, first + count), FOUR), FOUR, FOUR)


def counts_of(*weights):
    total = sum(weights)
    return apportioned({str(n): w / total for n, w in enumerate(weights)}, BLOCK)


def test_each_part_has_its_share_of_every_block():
    """3 : 1 of 65,536, and 1 : 1 : 1, which does not divide it."""
    # Grain's permutations of a few sequences take long.
    parts = [windows(0, LARGE), windows(LARGE, 2 * LARGE)]
    order = Mixed(parts, counts_of(3, 1)).order(seed=1, rounds=4)
    for block in (0, 3):
        places = range(block * BLOCK, (block + 1) * BLOCK)
        assert Counter(order(place) >= LARGE for place in places) == {False: 49152, True: 16384}
    assert counts_of(1, 1, 1) == [21846, 21845, 21845]
    assert counts_of(6, 2) == counts_of(0.75, 0.25) == [49152, 16384]


def test_a_part_goes_through_its_sequences_epoch_by_epoch():
    """Also from one block to the next, and each part in an order of its own."""
    mixed = Mixed([windows(0, 5000), windows(5000, 17_777)], counts_of(1, 3))
    order = mixed.order(seed=2, rounds=4)
    numbers = np.array([order(place) for place in range(2 * BLOCK)])
    for first, stop in ((0, 5000), (5000, 22_777)):
        own = numbers[(numbers >= first) & (numbers < stop)] - first
        epochs = own[: len(own) // (stop - first) * (stop - first)].reshape(-1, stop - first)
        assert len(epochs) >= 5
        assert (np.sort(epochs) == np.arange(stop - first)).all()
        assert len({epoch.tobytes() for epoch in epochs}) == len(epochs)


def test_parts_are_mixed_within_a_block():
    """Among any 256 successive ones about half are of either part: 6 standard errors are 48."""
    mixed = Mixed([windows(0, LARGE), windows(0, LARGE)], counts_of(1, 1))
    order, other = (mixed.order(seed=seed, rounds=4) for seed in (3, 4))
    is_second = np.array([order(place) >= LARGE for place in range(BLOCK)]).reshape(-1, 256)
    assert np.abs(is_second.sum(1) - 128).max() < 48
    others = [other(place) >= LARGE for place in range(BLOCK)]
    later = [order(BLOCK + place) >= LARGE for place in range(BLOCK)]
    for found in (others, later):  # another seed, and the next block
        assert abs(np.mean(is_second.ravel() == found) - 0.5) < 6 * 0.5 / BLOCK**0.5


def test_each_part_has_its_share_of_any_places_in_a_row():
    """Of two parts to within two sequences; the places themselves are random."""
    mixed = Mixed([windows(0, LARGE), windows(LARGE, LARGE)], counts_of(3, 1))
    order, other = (mixed.order(seed=seed, rounds=4) for seed in (3, 4))
    is_second = np.array([order(place) >= LARGE for place in range(BLOCK + 5000)])
    early = np.cumsum(is_second) - 0.25 * np.arange(1, len(is_second) + 1)
    assert early.max() - early.min() <= 2
    assert (is_second[:BLOCK] != [other(place) >= LARGE for place in range(BLOCK)]).mean() > 0.2


def test_sequences_of_parts_with_and_without_padding():
    """Their batches are alike: what a part lacks is what its tokens are, all seen and counted."""
    rows = Rows(np.array([[7, 8, 0, 0]]), lengths=np.array([2]), begins=np.array([1]))
    mixed = Mixed([windows(1, 2), rows], [BLOCK // 2] * 2)
    batch = mixed.take(np.array([2, 0, 1, 2]))
    assert batch.tokens.tolist() == [[7, 8, 0, 0], [1] * 4, [2] * 4, [7, 8, 0, 0]]
    assert batch.loss_mask.tolist()[:2] == [[False, True, False, False], [True] * 4]
    assert batch.context["segments"].tolist()[:2] == [[0, 0, -1, -1], [0] * 4]
    alone = mixed.take(np.array([0]))
    assert alone.context.keys() == {"segments"} and len(mixed) == 3
    assert mixed.size == (3, 8 + 1) and mixed.length == 4 and mixed.rest() is None
    assert Mixed([windows(1, 2)], [BLOCK]).take(np.array([1])).context == {}


def test_streams_are_joined():
    joined = Joined([np.arange(3), np.arange(10, 12), np.arange(0)])
    assert len(joined) == 5 and joined[:].tolist() == [0, 1, 2, 10, 11]
    assert joined[2:4].tolist() == [2, 10] and joined[:2].tolist() == [0, 1]
    assert joined[3:100].tolist() == [10, 11] and joined[2:2].tolist() == []


@pytest.fixture
def corpus(tmp_path):
    """A mixture of documents 'a', 2 of 24 held out, and of answers to prompts, 1 of 21."""
    (tmp_path / "a.jsonl").write_text('{"text": "aaa"}\n' * 24)
    (tmp_path / "b.jsonl").write_text('{"q": "?", "a": "b"}\n' * 21)

    def corpus(weights=(3, 1), b=1, **options):
        first = TextFiles(str(tmp_path / "a.jsonl"), validation=2, test=0)
        keys = dict(prompt_key="q", text_key="a")
        second = TextFiles(str(tmp_path / "b.jsonl"), **keys, validation=b, test=0)
        source = Mixture({"a": Part(first, weights[0]), "b": Part(second, weights[1])})
        return corpus_of(source, TextDomain(Bytes(), FOUR), DataOptions(FOUR, **options))

    return corpus


def texts(batches):
    return [
        "".join(chr(t) if c and t < 256 else "$" if c else "-" for t, c in zip(*row, strict=True))
        for batch in batches
        for row in zip(batch.tokens, batch.loss_mask, strict=True)
    ]


def test_parts_are_packed_by_themselves_and_drawn_by_their_weights(corpus):
    """22 documents of 4 tokens, and 20 pairs of which 'b' and its end count."""
    data = corpus()
    assert data.sizes(["train", "validation"]) == {"train": (42, 88 + 40), "validation": (3, 10)}
    batches = data.train_batches(batch_size=512, rows=np.arange(512), seed=0)
    found = Counter(texts([next(batches)]))
    assert found.keys() == {"aaa$", "-b$-"}
    assert abs(found["aaa$"] - 384) < 6 * (512 * 3 / 16) ** 0.5
    assert len(data.stream("train")) == 88 + 40
    assert texts(data.training_in_order(batch_size=42, rows=np.arange(42)))[21:23] == [
        "aaa$", "-b$-"
    ]  # fmt: skip


def test_held_out_splits_are_those_of_all_parts_once(corpus):
    """In order, whatever the weights; a part without any is passed over."""
    asked = dict(batch_size=4, rows=np.arange(4))
    assert texts(corpus((1, 99)).eval_batches("validation", **asked)) == [
        "aaa$", "aaa$", "----", "----", "-b$-", "----", "----", "----"
    ]  # fmt: skip
    found = texts(corpus(b=0).eval_batches("validation", **asked))
    assert found == ["aaa$", "aaa$", "----", "----"]
    assert corpus(b=0).sizes(["validation"]) == {"validation": (2, 8)}
    with pytest.raises(UserError, match="the test split of all parts is empty: raise data.parts"):
        corpus().sizes(["test"])
    with pytest.raises(
        UserError, match="the test split of all parts is empty, so it cannot be evaluated"
    ):
        list(corpus().eval_batches("test", **asked))


def test_the_first_batches_of_a_held_out_split_are_of_all_parts(corpus):
    """Each part's share of the first batches is that of the whole."""
    found = "".join(woven([iter("a" * 9), iter("b" * 3)], [9, 3]))
    assert found == "aabaaabaaaba" and not list(woven([iter(())], [0]))
    assert "".join(woven([iter("aaa"), iter("b")], [1, 2])) == "baaa"  # counts are a guess


def test_a_run_goes_on_at_its_place_on_any_number_of_processes(corpus):
    def read(rows, state=None):
        iterator = corpus().train_batches(batch_size=4, rows=rows, seed=5)
        if state:
            iterator.set_state(state)
        return iterator

    whole = read(np.arange(4))
    batches = [next(whole) for _ in range(8)]
    assert whole.get_state() == {"sequences": 32}
    later = read(np.arange(4), {"sequences": 20})
    for batch in batches[5:]:
        again = next(later)
        assert all(np.array_equal(x, y) for x, y in zip(batch[:2], again[:2], strict=True))
        assert np.array_equal(batch.number, again.number)
    half = read(np.array([2, 3]), {"sequences": 20})
    assert np.array_equal(next(half).tokens, batches[5].tokens[2:])


def test_other_weights_are_another_mixture(corpus):
    assert corpus().fingerprint() == corpus((6, 2)).fingerprint()
    assert corpus().fingerprint()["tokens"] == 128
    assert corpus().fingerprint() != corpus((1, 1)).fingerprint()
    assert corpus().source.fingerprint() != corpus((1, 1)).source.fingerprint()
    assert corpus().source.fingerprint() == corpus((6, 2)).source.fingerprint()


@pytest.mark.parametrize(
    "weights, said",
    [
        ((1, 0), "data.parts.b.weight=0 must be above 0"),
        ((-1, 1), "data.parts.a.weight=-1 must be above 0"),
        ((1e6, 1), "data.parts.b.weight is 1.0e-06 of all weights, .* one sequence in 65,536"),
    ],
)
def test_weights_that_are_none(weights, said, corpus):
    with pytest.raises(UserError, match=said):
        corpus(weights).train_batches(batch_size=4, rows=np.arange(4), seed=0)


def test_a_part_without_a_sequence_is_named(corpus, tmp_path):
    (tmp_path / "c.txt").write_text("ab")
    tiny = Part(TextFiles(str(tmp_path / "c.txt"), validation=0, test=0), 1)
    source = Mixture({"a": corpus().source.parts["a"], "c": tiny})
    data = corpus_of(source, TextDomain(Bytes(), FOUR), DataOptions(FOUR))
    with pytest.raises(UserError, match="data.parts.c: the train split has 3 tokens, fewer than"):
        data.sizes(["train"])
    with pytest.raises(UserError, match="data.parts.b: .*windows='every'"):
        corpus(windows="every")


def config(tmp_path, **changes):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 24)
    (tmp_path / "talk.jsonl").write_text(
        json.dumps({"m": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bc"}]}) + "\n"
    )
    assignments = {
        "data.name": "mixture",
        "data.length": "16",
        "data.parts.texts.name": "text",
        "data.parts.texts.path": str(tmp_path / "a.jsonl"),
        "data.parts.talks.name": "text",
        "data.parts.talks.path": str(tmp_path / "talk.jsonl"),
        "data.parts.talks.messages_key": "m",
        "data.parts.talks.validation": "0",
        "data.parts.talks.test": "0",
        "data.parts.talks.weight": "0.5",
        "tokenizer.name": "bytes",
        **changes,
    }
    return load_config("quickstart", assignments)


def test_the_command_line_makes_a_mixture(tmp_path):
    """Conversations in one part, by a template that the mixture shares; parts by their names."""
    pytest.importorskip("jinja2")
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}:{% endfor %}")
    asked = config(tmp_path, **{"data.chat_template": str(template)})
    domain, source = inputs.domain_and_source(asked, None)
    assert [*source.parts] == ["talks", "texts"] and source.shares["talks"] == pytest.approx(1 / 3)
    assert domain.chat.template == template.read_text()
    data = inputs.corpora(asked, domain)({})
    batch = next(data.train_batches(batch_size=32, rows=np.arange(32), seed=0))
    assert {text.rstrip("-") for text in texts([batch])} == {"--bc:$", "abc$abc$abc$abc$"}
    kept = json.loads(json.dumps(asked))
    moved = json.loads(json.dumps(asked))
    moved["data"]["parts"]["texts"]["path"] = "elsewhere"
    config_lib.check_same(kept, moved, Place(tmp_path))
    assert config_lib.moved(kept, moved) and not config_lib.moved(kept, kept)
    moved["data"]["parts"]["texts"]["weight"] = 2.0
    with pytest.raises(UserError, match="data.parts.texts.weight: only in what is asked for"):
        config_lib.check_same(kept, moved, Place(tmp_path))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"data.parts.texts.bad": "1"}, "unknown key in data.parts.texts 'bad'.*Known: .*weight"),
        ({"data.parts.texts.length": "8"}, "unknown key in data.parts.texts 'length'"),
        ({"data.parts.texts.weight": "much"}, "data.parts.texts.weight must be a number, not 'mu"),
        ({"data.parts.texts.name": "txt"}, "unknown data.parts.texts.name 'txt'; did you mean"),
        (
            {"data.parts.more.path": "x"},
            "data.parts.more needs a source: give --con",
        ),
        ({"data.parts": "7"}, "data.parts must be a section, not 7: set its keys"),
        ({"data.parts.a-b.name": "text"}, "data.parts must be sections by names of letters"),
        ({"data.weight": "7"}, "unknown key in data 'weight'"),
    ],
)
def test_sections_that_are_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        config(tmp_path, **changes)


@pytest.mark.parametrize(
    "part, said",
    [
        ({"name": "digits"}, "data.parts.x is not a source of text"),
        (
            {"name": "mixture", "parts": {"y": {"name": "shakespeare"}}},
            "data.parts.x is not a source",
        ),
        ({"name": "text", "path": "x", "label_key": "l"}, "data.parts.x.label_key='l': texts with"),
        ({"name": "text"}, "data.parts.x: data.path is needed by data.name='text'"),
    ],
)
def test_parts_that_are_refused(part, said):
    section = {"name": "mixture", "length": 16, "parts": {"x": part}}
    with pytest.raises(UserError, match=said):
        inputs.domain_and_source({"data": section, "tokenizer": {"name": "bytes"}}, None)
    section["parts"] = {}
    with pytest.raises(UserError, match="data.parts"):
        inputs.domain_and_source({"data": section, "tokenizer": {"name": "bytes"}}, None)
    assert type_of("data", "mixture", "parts") and not type_of("data", "text", "parts")
