"""Prompts with answers: each pair a row, of which only the answer counts."""

import json

import numpy as np
import pytest

from md4_jax.data.corpus import Corpus
from md4_jax.data.domains import TextDomain, domain_of
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.tokenizers import Bytes, Characters
from md4_jax.evals.generative import text_of
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError

PAIRS = [("1+1=", "2"), ("2+2=", "4"), ("10+10=", "20"), ("a?", "a long answer"), ("5-5=", "")]
END = 256


@pytest.fixture
def corpus(tmp_path):
    """A corpus of JSON lines, whose last pair is the test split."""

    def corpus(pairs=PAIRS, *, length=8, tokenizer=None, padding="hidden", test=1, **options):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in pairs))
        source = TextFiles(
            str(path), text_key="a", prompt_key="q", validation=0, test=test, **options
        )
        domain = domain_of(source, lambda: tokenizer or Bytes(), length)
        return Corpus(source, domain, DataOptions(length, padding=padding))

    return corpus


def evaluated(data, split="train", size=4):
    (batch,) = data.eval_batches(split, batch_size=size, rows=np.arange(size))
    return batch


def shown(row) -> str:
    return "".join("$" if n == END else chr(n) if n else "." for n in row)


def test_only_answers_count(corpus, capsys):
    """Answer and end of text; a long answer is cut; tokens of the prompt stay in the row."""
    data = corpus()
    batch = evaluated(data)
    assert [shown(row) for row in batch.tokens] == ["1+1=2$..", "2+2=4$..", "10+10=20", "a?a long"]
    counted = ["".join("x" if c else "-" for c in row) for row in batch.loss_mask]
    assert counted == ["----xx--", "----xx--", "------xx", "--xxxxxx"]
    seen = ["".join("x" if s == 0 else "-" for s in row) for row in batch.context["segments"]]
    assert seen == ["xxxxxx--", "xxxxxx--", "xxxxxxxx", "xxxxxxxx"]
    assert batch.text.tolist() == [[1, 1], [1, 1], [2, 1], [6, 2]]
    assert data.sizes(["train", "test"]) == {"train": (4, 12), "test": (1, 1)}
    assert shown(data.stream("train")) == "2$4$20a long"
    said = "1 of 4 pairs of the train split are cut: they have more than data.length=8 tokens"
    assert said in capsys.readouterr().out


def test_texts_that_samples_are_compared_with_have_no_padding(corpus):
    """MAUVE's references are the prompt and the answer; the padding is no text."""
    data = corpus()
    batches = data.eval_batches("train", batch_size=1, rows=np.arange(1))
    texts = [text_of(data, batch) for batch in batches]
    ended = [data.domain.decode([*text.encode(), END]) for text in ("1+1=2", "2+2=4")]
    assert texts == [*ended, "10+10=20", "a?a long"]


def test_ends_of_text_that_count(corpus):
    batch = evaluated(corpus(padding="end_of_text"))
    assert [shown(row) for row in batch.tokens[:2]] == ["1+1=2$$$", "2+2=4$$$"]
    assert batch.loss_mask.sum(axis=1).tolist() == [4, 4, 2, 6] and batch.context == {}


def test_training_batches_have_the_same_rows(corpus):
    data = corpus(test=0)
    batch = next(data.train_batches(batch_size=5, rows=np.arange(5), seed=0))
    found = {
        shown(row[: mask.argmax()]): shown(row[mask])
        for row, mask in zip(batch.tokens, batch.loss_mask, strict=True)
    }
    expected = {"1+1=": "2$", "2+2=": "4$", "10+10=": "20", "a?": "a long", "5-5=": "$"}
    assert found == expected


def test_a_tokenizer_learns_from_prompts_too(corpus):
    data = corpus(tokenizer=Characters())
    assert set(data.domain.tokenizer.alphabet) == set("".join(q + a for q, a in PAIRS[:4]))


def test_prompts_that_leave_no_room_are_left_out(corpus, capsys):
    data = corpus([("12345678", "x"), ("1234567", "xy"), ("1", "z")], test=1)
    batch = evaluated(data, size=1)
    assert [shown(row) for row in batch.tokens] == ["1234567x"]
    said = capsys.readouterr().out
    assert "1 of 2 pairs of the train split are left out: their prompts have data.length=8" in said
    with pytest.raises(UserError, match="all 2 prompts of the train .* have data.length=4 tokens"):
        corpus([("12345678", "x"), ("1234567", "xy"), ("1", "z")], length=4).sizes(["train"])


def test_another_prompt_is_other_data(corpus):
    found = {json.dumps(corpus().fingerprint())}
    found.add(json.dumps(corpus([("1+2=", "2"), *PAIRS[1:]]).fingerprint()))
    found.add(json.dumps(corpus([("1+1", "=2"), *PAIRS[1:]]).fingerprint()))
    found.add(json.dumps(corpus(padding="end_of_text").fingerprint()))
    found.add(json.dumps(corpus(length=9).fingerprint()))
    assert len(found) == 5


def test_the_prompts_of_another_key_are_others(tmp_path):
    path, found = tmp_path / "pairs.jsonl", set()
    path.write_text('{"q": "1+1=", "p": "3-1=", "a": "2"}\n')
    for key in ("q", "p", ""):
        source = TextFiles(str(path), text_key="a", prompt_key=key, validation=0, test=0)
        data = Corpus(source, TextDomain(Bytes(), 8), DataOptions(8, windows="documents"))
        (batch,) = data.eval_batches("train", batch_size=1, rows=np.arange(1))
        found.add((source.fingerprint(), shown(batch.tokens[0])))
    assert {row for _, row in found} == {"1+1=2$..", "3-1=2$..", "2$......"}
    assert len({of for of, _ in found}) == 3


def test_what_is_refused(corpus, tmp_path):
    with pytest.raises(UserError, match=r"line 1: no key 'p' \(data.prompt_key\); it has a, q"):
        source = TextFiles(str(tmp_path / "pairs.jsonl"), text_key="a", prompt_key="p")
        corpus()
        list(source.pairs("all"))
    with pytest.raises(UserError, match="data.label_key='c' and data.prompt_key='q' cannot be"):
        TextFiles("x", label_key="c", prompt_key="q")
    with pytest.raises(UserError, match="data.padding='end_of_text' needs a tokenizer with an end"):
        corpus(tokenizer=Characters(), padding="end_of_text").sizes(["train"])
    with pytest.raises(UserError, match="data.padding must be 'hidden' or 'end_of_text', not 'x'"):
        DataOptions(8, padding="x")
    (tmp_path / "texts.txt").write_text("some text")
    with pytest.raises(
        UserError, match="data.prompt_key='q' needs files of records.* includes .*txt"
    ):
        list(TextFiles(str(tmp_path / "texts.*"), prompt_key="q").pairs("all"))


def test_columns_of_a_parquet_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"q": [q for q, _ in PAIRS], "a": [a for _, a in PAIRS]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "pairs.parquet")
    source = TextFiles(str(tmp_path / "pairs.parquet"), text_key="a", prompt_key="q")
    assert list(source.pairs("all")) == PAIRS
