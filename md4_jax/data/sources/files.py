"""Files of text, on a disk or in an object store."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from md4_jax.data import contents
from md4_jax.data.labelled import Labelled, own_sequences
from md4_jax.data.sources import formats
from md4_jax.data.sources.patterns import matching
from md4_jax.data.sources.records import Document, Keys, Part
from md4_jax.data.sources.splits import NoText, bounds, check_split, digest
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, version

MIN_DOCUMENTS = 20
LARGE_BYTES = 1 << 26  # from this size on, tokens are stored in shards
MOST_LOOKED_AT = 16  # files
MOST_FACTS = 1000  # files whose hashes the manifest lists


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Documents of all files that match a pattern, in the order of the file names.

    path        a file, a directory (all files below it), a glob pattern, in
                which ** also matches folders, or a tuple of these
    text_key    key of the text in a record (a JSON object or a table row). "": each file is one
                text, whatever its name, for example source code
    label_key   key of the label, a name or a number from 0 on; each document is then one
                sequence. "": no labels, and documents are concatenated
    prompt_key  key of a prompt; the text is its answer. Each pair is then one sequence, and only
                the answer is noised and counted. With messages_key: key of a list of messages
                before those. "": no prompts
    rejected_key  key of a rejected answer to the prompt, or of the same conversation with a
                rejected last answer, for objective.name="preference". "": there is none
    messages_key  key of a conversation, a list of messages, instead of a text; only the messages of
                the assistant are noised and counted. "": no conversations
    validation  fraction of the documents if below 1, otherwise their number
    test        likewise; the last documents are test, those before them validation

    A .jsonl file has one document per line, a .json file one per object of its list, a .parquet,
    .csv or .tsv file one per row, a .fasta, .fa or .faa file one per sequence (its header has the
    key "header"), and an archive (.zip, .tar, .tar.gz, .tar.xz) one per file in it, in its order.
    Any other file is one document. All but archives and .parquet may be compressed (.gz, .xz). The
    customary held-out set of OpenWebText is its last 100,000 documents. Fewer than 20 documents
    without labels are split by characters instead, in the same order; `validation` and `test` then
    count characters.

    Raises UserError if no file matches, or a file cannot be read as UTF-8 text.
    """

    path: str | tuple[str, ...]
    text_key: str = "text"
    label_key: str = ""
    prompt_key: str = ""
    rejected_key: str = ""
    messages_key: str = ""
    validation: float = 0.05
    test: float = 0.05

    title = "text"

    def __post_init__(self):
        if self.label_key and self.prompt_key:
            raise UserError(
                f"data.label_key={self.label_key!r} and data.prompt_key={self.prompt_key!r} "
                "cannot be combined: remove one of the two keys"
            )
        for key in ("label_key", "prompt_key"):
            if getattr(self, key) and not self.text_key:
                raise UserError(
                    f"data.{key}={getattr(self, key)!r} needs data.text_key, the key of the text"
                )
        check_messages(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Names a file with Windows line ends in a warning, if one of the first files has them."""
        found = next(filter(formats.has_windows_ends, self._files[:MOST_LOOKED_AT]), None)
        if found is None:
            return ()
        said = (
            f"{found} has Windows line ends, \\r\\n: the model will learn to write both characters."
        )
        return (f"{said} To train on \\n alone, convert the file first, for example with dos2unix",)

    @functools.cached_property
    def is_large(self) -> bool:
        """Returns whether the text is large enough for tokenising documents in parallel."""
        return self._size >= LARGE_BYTES and self.has_documents

    @functools.cached_property
    def has_documents(self) -> bool:
        """Returns whether there are enough documents to split by whole documents."""
        return len(list(itertools.islice(self._all(), MIN_DOCUMENTS))) == MIN_DOCUMENTS

    def content(self) -> str:
        """Returns a hash of the documents that does not depend on the splits."""
        return digest("text", contents.of_texts(self._files), self.text_key, *self._as_records)

    def facts(self) -> list[list[str | int]]:
        """Returns [name, SHA-256] of each file, as the manifest of shards lists them."""
        return contents.facts_of(self._files) if len(self._files) <= MOST_FACTS else []

    def sections(self) -> dict[str, list[Part]]:
        """Returns the files of each section of the corpus, in order; here there is one."""

        def part(path: Place) -> Part:
            read = functools.partial(_read, path, Keys(self.text_key))
            state = functools.partial(version, path)
            return Part(path.stat().length, read, state=state)

        return {"text": list(map(part, self._files))}

    def ranges(self, split: str, documents: Mapping[str, int]) -> list[tuple[str, int, int]]:
        """Returns the documents of a split, as ranges (section, first, last plus one).

        documents: their number in each section
        """
        return [("text", *self._bounds(documents.get("text", 0), split, "documents"))]

    def fingerprint(self) -> str:
        """Returns a hash of the files' names and contents, and of the arguments."""
        facts = contents.of_texts(self._files)
        more = (self.label_key,) if self.label_key else ()
        more += ("prompt", self.prompt_key) if self.prompt_key else ()
        more += ("rejected", self.rejected_key) if self.rejected_key else ()
        more += ("messages", self.messages_key) if self.messages_key else ()
        more += self._as_records
        return digest("text", facts, self.text_key, self.validation, self.test, *more)

    def documents(self, split: str) -> Iterator[str]:
        """Yields the documents of the split, one at a time, each after its prompt."""
        return (document.prompt + document.text for document in self._split(split))

    def pairs(self, split: str) -> Iterator[tuple[str, str]]:
        """Yields the prompts of the split with their answers."""
        return ((document.prompt, document.text) for document in self._split(split))

    def rejected(self, split: str) -> Iterator[str]:
        """Yields the rejected answers to the prompts of the split."""
        return (document.rejected for document in self._split(split))

    def conversations(self, split: str) -> Iterator[Document]:
        """Yields the conversations of the split."""
        return self._split(split)

    def labelled(self, split: str) -> Iterator[Labelled]:
        """Yields the documents of the split with their labels."""
        return (Labelled(d.text, d.label, d.where) for d in self._split(split))

    def origin(self, split: str, number: int) -> str:
        """Names the file, and the place in it, of one document of the split."""
        return next(itertools.islice(self._split(split), number, None)).where

    def _split(self, split: str) -> Iterator[Document]:
        check_split(split)
        count = sum(formats.count(path, self._keys) for path in self._files)
        if count < MIN_DOCUMENTS:
            # All of so few are read, so that a malformed one is named before their number.
            length = sum(len(document.text) for document in self._all())
        if count >= MIN_DOCUMENTS or self._is_table:
            start, stop = self._bounds(count, split, "documents")
            yield from itertools.islice(self._all(), start, stop)
            return
        start, stop = self._bounds(length, split, "characters")
        yield from _characters(self._all(), start, stop)

    def _bounds(self, total: int, split: str, unit: str) -> tuple[int, int]:
        """Returns the range of a split among `total` units; NoText with the path if total is 0."""
        if not total:
            raise NoText(f"the data contain no {unit}: check data.path={self.path!r}")
        return bounds(total, split, unit=unit, validation=self.validation, test=self.test)

    def _all(self) -> Iterator[Document]:
        for path in self._files:
            yield from _read(path, self._keys)

    @property
    def _keys(self) -> Keys:
        if self.messages_key:
            return Keys("", "", self.prompt_key, self.messages_key, self.rejected_key)
        return Keys(self.text_key, self.label_key, self.prompt_key, rejected=self.rejected_key)

    @property
    def _is_table(self) -> bool:
        """Returns whether each document is a sequence of its own; see `own_sequences`."""
        return own_sequences(self)

    @property
    def _as_records(self) -> tuple[str, ...]:
        """Returns a cache key that differs from versions that read such files as one text."""
        is_read = not self._keys.is_plain and any(map(formats.is_new_table, self._files))
        return ("records",) if is_read else ()

    @property
    def _size(self) -> int:
        return sum(path.stat().length for path in self._files)

    @functools.cached_property
    def _files(self) -> list[Place]:
        found = matching(self.path)
        if self._keys.is_plain:
            tables = (path for path in found if path.suffix == ".parquet")
            if table := next(tables, None):
                raise UserError(
                    f"data.text_key='' reads plain text, but {table} is a table: set "
                    "data.text_key to the name of a column"
                )
        for key in ("label_key", "prompt_key", "rejected_key", "messages_key"):
            wrong = [path for path in found if getattr(self, key) and not formats.is_table(path)]
            if wrong:
                raise UserError(
                    f"data.{key}={getattr(self, key)!r} needs files of records: .jsonl, .json, "
                    f".csv, .tsv (all also .gz) or .parquet. data.path includes {wrong[0]}"
                )
        return found


def _read(path: Place, keys: Keys) -> Iterator[Document]:
    """Yields the documents of a file; UserError for an archive if records are to be read."""
    for document in formats.read(path, keys):
        records = (*formats.LINES, *formats.SEPARATORS, *formats.FASTA, ".parquet")
        if not keys.is_plain and document.member.lower().endswith(records):
            raise UserError(
                f"{path} contains {document.member}, a file of records: unpack it and set "
                "data.path to it, or set data.text_key='' to train on its characters as they are"
            )
        yield document


def check_messages(source: Any) -> None:
    """Raises UserError for keys that conflict with messages_key or require another key."""
    if not source.messages_key:
        if source.rejected_key and not getattr(source, "prompt_key", ""):
            raise UserError(
                f"data.rejected_key={source.rejected_key!r} needs the answer to a prompt or a "
                "conversation to compare with: set data.prompt_key to the key of the prompt, or "
                "data.messages_key to the key of the conversation"
            )
        return
    keys = {"text_key": "text", "label_key": ""}
    for key, default in keys.items():
        if (value := getattr(source, key, default)) != default:
            raise UserError(
                f"data.messages_key={source.messages_key!r} and data.{key}={value!r} cannot be "
                "combined, because a conversation is the whole text of a record: remove one of "
                "the two keys"
            )


def _characters(documents: Iterator[Document], start: int, stop: int) -> Iterator[Document]:
    """Yields the parts of documents within the characters [start, stop) of all documents."""
    offset = 0
    for document in documents:
        first = max(0, start - offset)
        part = document.text[first : max(0, stop - offset)]
        if part:
            yield document._replace(text=part, start=first)
        offset += len(document.text)
