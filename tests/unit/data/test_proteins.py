"""The tokenizer of proteins and files of FASTA."""

import gzip

import numpy as np
import pytest

from md4_jax.data import SOURCES
from md4_jax.data.corpus import Corpus
from md4_jax.data.definitions import files_of
from md4_jax.data.domains import TextDomain, domain_from_json
from md4_jax.data.proteins import ENTRIES, Proteins
from md4_jax.data.sources import formats
from md4_jax.data.sources.records import Keys
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place


def test_the_ids_are_those_of_esm():
    """By hand from ESM-2's vocab.txt, as transformers' EsmTokenizer numbers it without marks."""
    proteins = Proteins()
    assert proteins.encode("MKTLCX").tolist() == [20, 15, 11, 4, 23, 24]
    assert proteins.encode("A<unk>C<null_1>.-").tolist() == [5, 3, 23, 31, 29, 30]
    assert (len(ENTRIES), proteins.vocab_size, ENTRIES[32]) == (33, 32, "<mask>")
    assert proteins.encode("").tolist() == []


def test_texts_come_back_and_the_mask_shows():
    proteins = Proteins("X")
    assert all(
        proteins.join(proteins.encode(x)) == x for x in ("MKTAYIAKQR", "<cls>AC<unk>BUZO<eos>")
    )
    assert proteins.decode([20, 32, 32, 4]) == "M__L"
    domain = TextDomain(proteins, 10)
    assert domain_from_json(domain.to_json(), 10) == domain and domain.unit == "character"
    assert files_of(proteins)["vocab.txt"].split("\n") == list(ENTRIES)


@pytest.mark.parametrize("letter", ["J", "*", "m", "_", " ", "é", "\U00020000", "<mask>"])
def test_letters_without_an_entry(letter):
    with pytest.raises(
        UserError, match=r"at offset 2 is not an amino acid: .* or set tokenizer.unknown="
    ):
        Proteins().encode(f"MK{letter}T")
    if len(letter) == 1:
        assert Proteins("X").encode(f"MK{letter}T").tolist() == [20, 15, 24, 11]
        assert Proteins("<unk>").encode(f"MK{letter}T").tolist() == [20, 15, 3, 11]


def test_an_unknown_entry_for_unknown_letters():
    with pytest.raises(UserError, match="tokenizer.unknown='J' must be '' or one of <cls> <pad>"):
        Proteins("J")


FASTA = ">first protein\nMKTAY\r\nIAKQR\n\n>second\n  GAV LI \n>third|x>y\nC"


@pytest.mark.parametrize("name", ["a.fasta", "a.fa", "a.faa", "a.FASTA", "a.fa.gz"])
def test_each_record_is_a_document(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(gzip.compress(FASTA.encode()) if name.endswith(".gz") else FASTA.encode())
    found = [*formats.read(place(path, "data.path"), Keys("text"))]
    assert [(x.text, x.line) for x in found] == [("MKTAYIAKQR", 1), ("GAVLI", 5), ("C", 7)]
    assert formats.count(place(path, "data.path"), Keys("text")) == 3
    headers = [x.text for x in formats.read(place(path, "data.path"), Keys("header"))]
    assert headers == ["first protein", "second", "third|x>y"]
    if name == "a.fa":
        whole = [x.text for x in formats.read(place(path, "data.path"), Keys(""))]
        assert whole == [FASTA]


@pytest.mark.parametrize(
    "text, said",
    [
        ("MKTAY\n>a\nAC\n", "line 1: a FASTA file begins with a line '>NAME', not with 'MKTAY'"),
        (">a\nAC\n>b\n\n>c\nAC\n", "line 3: no sequence follows the header 'b'"),
        (">a\nAC\n>b", "line 3: no sequence follows the header 'b'"),
        ("\n\n", "is empty: a FASTA file begins with a line '>NAME'"),
    ],
)
def test_what_is_no_fasta(text, said, tmp_path):
    path = tmp_path / "a.fasta"
    path.write_text(text)
    with pytest.raises(UserError, match=f"{said}.*A .fasta file is read as records"):
        [*formats.read(place(path, "data.path"), Keys("text"))]


def corpus(tmp_path, text: str, tokenizer=None) -> Corpus:
    path = tmp_path / "a.fasta"
    path.write_text(text)
    source = SOURCES["text"](str(path), validation=0, test=0)
    options = DataOptions(length=6, windows="documents")
    return Corpus(source, TextDomain(tokenizer or Proteins(), 6), options)


def test_a_protein_is_a_sequence_with_padding_that_is_hidden(tmp_path):
    records = [f">{n}\n{'MKT' * 3 if n == 1 else 'GAV'}\n" for n in range(20)]
    made = corpus(tmp_path, "".join(records))
    batch = next(made.eval_batches("train", batch_size=2, rows=np.arange(2)))
    assert batch.tokens.tolist() == [[6, 5, 7, 0, 0, 0], [20, 15, 11, 20, 15, 11]]
    assert batch.loss_mask.tolist() == [[True] * 3 + [False] * 3, [True] * 6]
    assert batch.context["segments"].tolist() == [[0, 0, 0, -1, -1, -1], [0] * 6]


def test_the_error_names_the_record(tmp_path):
    records = [f">{n}\nGAV\n{'J' if n == 7 else 'C'}\n" for n in range(20)]
    with pytest.raises(UserError, match=r"a.fasta, line 22: 'J' at offset 3 is not an amino acid"):
        corpus(tmp_path, "".join(records)).sizes(["train"])
