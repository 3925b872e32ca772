"""Detokenisers on sentences of their corpora, and sources whose documents they change."""

import json

import numpy as np
import pytest

from md4_jax.data.corpus import Corpus
from md4_jax.data.detokenise import DETOKENISERS, Detokenised
from md4_jax.data.domains import TextDomain
from md4_jax.data.prepare import is_sharded
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.sources.public import PublicText
from md4_jax.data.sources.shakespeare import Shakespeare
from md4_jax.data.tokenizers import Bytes
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError

# What the rules of SEDD's and MDLM's evaluations make of these.
EXAMPLES = {
    "wikitext": {
        " He had a guest @-@ starring role , in 2 @.@ 5 % of 1 @,@ 000 parts . \n":
            " He had a guest-starring role, in 2.5 % of 1,000 parts.\n",
        " = = Early life = = \n": " == Early life ==\n",
        ' as " Craig " in " Teddy \'s Story " ( the dogs \' [ two ] ) ':
            ' as "Craig" in "Teddy\'s Story" (the dogs\' [two]) ',
        " at 45 \N{DEGREE SIGN} or N men ; why ? ": " at 45\N{DEGREE SIGN}or 1 men; why? ",
    },
    "ptb": {
        "the company 's N shares did n't rise the traders ' $ N billion <unk>":
            "the company's 1 shares didn't rise the traders' $1 billion ?",
        "in N N N months and\\/or # N": "in 1 1 1 months and/or # N",
    },
    "lm1b": {
        "He said , \" It 's late . \" at http : / / a.b / c ! ( really ) $ 5 .":
            'He said, "It\'s late." at http://a.b/c! (really) $5.',
        "Is that so ?": "Is that so?",
    },
    "lambada": {
        " \N{LEFT DOUBLE QUOTATION MARK}Go,\N{RIGHT DOUBLE QUOTATION MARK} he said \n":
            '\n"Go," he said',
    },
    "scientific_papers": {
        "we show ( see @xmath0 ) , that a @-@ b ? ": "we show (see @xmath0), that a-b? ",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name):
    for text, expected in EXAMPLES[name].items():
        assert DETOKENISERS[name](text) == expected
    assert set(EXAMPLES) == set(DETOKENISERS)


def test_a_detokenised_source_has_another_hash_and_changed_documents(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"it 's {n}"}) for n in range(40)))
    plain = TextFiles(str(file))
    source = Detokenised(plain, "ptb")
    assert list(source.documents("test")) == ["it's 38", "it's 39"]
    texts = [one.text for part in source.sections()["text"] for one in part.read()]
    assert texts == [f"it's {n}" for n in range(40)]
    assert source.fingerprint() != plain.fingerprint() and source.content() != plain.content()
    assert source.warnings == () and is_sharded(source, "") is False
    assert not is_sharded(Detokenised(Shakespeare(), "ptb"), "somewhere")


def test_unknown_rules_and_data_that_is_not_text():
    with pytest.raises(UserError, match="data.detokenise='wiki' is not known. Known are lambada"):
        Detokenised(Shakespeare(), "wiki")
    with pytest.raises(UserError, match="is only for text"):
        Detokenised(object(), "ptb")


def test_each_document_is_a_sequence(tmp_path, cache, capsys):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": "a" * n}) for n in range(1, 41)))
    options = DataOptions(length=6, windows="documents")
    corpus = Corpus(TextFiles(str(file), test=3), TextDomain(Bytes(), 6), options)
    assert corpus.sizes(["test"])["test"] == (3, 18)
    corpus = Corpus(TextFiles(str(file), validation=0.0, test=39), TextDomain(Bytes(), 6), options)
    (batch,) = corpus.eval_batches("test", batch_size=40, rows=np.arange(40))
    assert batch.loss_mask.sum(axis=1).tolist() == [3, 4, 5] + [6] * 36 + [0]
    said = "34 of 39 documents of the test split are cut: they have more than data.length=6 tokens"
    assert said in capsys.readouterr().out
    assert batch.tokens[0].tolist() == [97, 97, Bytes().eot_id, 0, 0, 0]
    assert batch.text[:4].tolist() == [[2, 1], [3, 1], [4, 1], [5, 1]]
    assert corpus.stream("test")[:7].tolist() == [97, 97, 256, 97, 97, 97, 256]


def test_rows_as_the_field_has_them(tmp_path):
    wiki = tmp_path / "wiki.valid.raw"
    wiki.write_text(" \n = Title = \n \n One line . \n")
    found = PublicText("wikitext2_rows", str(wiki)).documents("validation")
    assert list(found) == ["", " = Title = \n", "", " One line . \n"]
    ptb = tmp_path / "ptb.valid.txt"
    ptb.write_text(" one two \n three \n")
    assert list(PublicText("ptb_sentences", str(ptb)).documents("validation")) == [
        "one two",
        "three",
    ]
    news = tmp_path / "test.csv"
    news.write_text('"3","A title","Text, with ""quotes""."\n"1","B","C"\n')
    assert list(PublicText("ag_news", str(news)).documents("test")) == [
        'A title Text, with "quotes".', "B C"
    ]  # fmt: skip
    passages = tmp_path / "lambada_test.jsonl"
    passages.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(PublicText("lambada", str(passages)).documents("test")) == ["one", "two"]
