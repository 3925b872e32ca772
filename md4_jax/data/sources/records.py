"""Records of a data file: JSON lines, a JSON list, or a table with a header."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from md4_jax.data.messages import check_answers, conversation, spelled
from md4_jax.data.surrogates import without_surrogates
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.paths import Place

# Usual keys of a conversation.
CONVERSATIONS = ("messages", "conversations", "conversation")
LARGEST_CELL = 1 << 30  # bytes; the module csv has 131,072 as its default


class Document(NamedTuple):
    """A text and its origin.

    line      number of the line or row in its file, from 1; 0 for other kinds of files
    start     number of characters of the file before the text
    label     value of data.label_key; '' without labels
    prompt    value of data.prompt_key; '' without prompts
    rejected  value of data.rejected_key, the rejected answer; '' without one
    messages  values of data.prompt_key, if it is set, and of data.messages_key, each
              {"role": ..., "content": ...}; () without conversations
    rejected_messages  value of data.rejected_key for conversations: the same with a rejected last
              answer
    member    name in an archive; '' outside of archives
    position  bytes of the file read so far, for the progress display
    """

    text: str
    path: Place
    line: int = 0
    start: int = 0
    label: str | int = ""
    prompt: str = ""
    rejected: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    rejected_messages: tuple[dict[str, Any], ...] = ()
    member: str = ""
    position: int = 0

    @property
    def where(self) -> str:
        """Describes the place of the document: the file and the position in it."""
        member = f", {self.member}" if self.member else ""
        line = f", line {self.line}" if self.line else ""
        start = f", from character {self.start} on" if self.start else ""
        return f"{self.path}{member}{line}{start}"


class Keys(NamedTuple):
    """Keys of a JSON line, or columns of a Parquet file; see `TextFiles`.

    '' if a key is not read. Without text and messages, each file is one text.
    """

    text: str
    label: str = ""
    prompt: str = ""
    messages: str = ""
    rejected: str = ""

    @property
    def is_plain(self) -> bool:
        """Returns whether each file is one text, whatever its name."""
        return not (self.text or self.messages)

    def document(self, where: str, record: dict[str, Any], path: Place, number: int) -> Document:
        """Returns the document of a record, a line or a row; UserError if it lacks a key."""
        if self.messages:
            prompt = _messages(where, record, "prompt_key", self.prompt) if self.prompt else ()
            better, worse = prompt + _messages(where, record, "messages_key", self.messages), ()
            if self.rejected:
                worse = prompt + _messages(where, record, "rejected_key", self.rejected)
                check_answers(where, (self.messages, better), (self.rejected, worse))
            return Document("", path, number, messages=better, rejected_messages=worse)
        label = _label(where, record, self.label) if self.label else ""
        prompt = _text(where, record, "prompt_key", self.prompt) if self.prompt else ""
        text = _text(where, record, "text_key", self.text)
        worse = _text(where, record, "rejected_key", self.rejected) if self.rejected else ""
        return Document(text, path, number, label=label, prompt=prompt, rejected=worse)


class Part(NamedTuple):
    """File of a corpus: its bytes, and a function that yields its documents.

    done   called when all its tokens are stored in shards; may delete the file
    ahead  starts fetching the file, if it is missing, while another one is read
    state  returns what changes whenever the file is written to, its path first; () if it is a
           download, which nothing else writes to
    """

    size: int
    read: Callable[[], Iterator[Document]]
    done: Callable[[], None] = lambda: None
    ahead: Callable[[], None] = lambda: None
    state: Callable[[], tuple] = tuple

    def documents(self, following: "Part | None") -> Iterator[Document]:
        """Yields the documents; starts fetching the following file with the first one."""
        for number, document in enumerate(self.read()):
            if number == 0 and following is not None:
                following.ahead()
            yield document


def of_json(where: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, record) of a JSON text: a list of objects, one object, or one on each line.

    UserError for anything else.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):  # such as a truncated list
            raise UserError(f"{where}: not JSON ({error})") from error
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                place = f"{where}, line {number}"
                yield place, of_line(place, line)
        return
    for number, record in enumerate(found if isinstance(found, list) else [found], 1):
        place = f"{where}, record {number}"
        yield place, _object(place, record)


def of_table(where: str, lines: Iterable[str], separator: str) -> Iterator[tuple[int, dict]]:
    """Yields (line, {column: cell}) of the rows below a header, skipping blank rows.

    A cell in double quotes may contain separators and line ends, and \"\" is one quote (RFC 4180).
    UserError for a row that does not match the header.
    """
    csv.field_size_limit(LARGEST_CELL)
    reader, header = csv.reader(lines, delimiter=separator, strict=True), None
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = _header(where, cells)
            elif len(cells) != len(header):
                raise UserError(
                    f"{where}, line {reader.line_num}: the row has {amount(len(cells), 'cell')}, "
                    f"but the header has {amount(len(header), 'column')}: {', '.join(header)}"
                )
            else:
                yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise UserError(
            f"{where}, line {reader.line_num}: the row cannot be split into cells ({error})"
        ) from error


def _header(where: str, cells: list[str]) -> list[str]:
    if twice := [name for name in cells if cells.count(name) > 1]:
        raise UserError(f"{where}: the header names the column {twice[0]!r} twice")
    return cells


def of_line(where: str, line: str) -> dict[str, Any]:
    """Returns the record of one line of JSON; UserError if it is not an object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise UserError(f"{where}: not JSON ({error})") from error
    return _object(where, record)


def _object(where: str, record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a JSON object but a {type(record).__name__}")
    return record


def check_key(where: str, keys: Iterable[str], option: str, key: str) -> None:
    """Raises UserError, which lists the existing keys, if a record lacks a key."""
    if key not in keys:
        has = ", ".join(sorted(keys))
        talk = next((name for name in CONVERSATIONS if name in keys), "")
        other = f", or data.messages_key={talk}, if these are conversations"
        raise UserError(
            f"{where}: no key {key!r} (data.{option}); it has {has}: set "
            f"data.{option}{other if talk and option == 'text_key' else ''}"
        )


def _text(where: str, record: dict[str, Any], option: str, key: str) -> str:
    check_key(where, record, option, key)
    text = record[key]
    if not isinstance(text, str):
        raise UserError(f"{where}: {key!r} must be text, not {spelled(text)}")
    return without_surrogates(text)


def _messages(
    where: str, record: dict[str, Any], option: str, key: str
) -> tuple[dict[str, Any], ...]:
    check_key(where, record, option, key)
    return conversation(f"{where}: {key!r}", record[key])


def _label(where: str, record: dict[str, Any], key: str) -> str | int:
    check_key(where, record, "label_key", key)
    label = record[key]
    if not isinstance(label, str | int) or isinstance(label, bool):
        kind = spelled(label)
        raise UserError(f"{where}: {key!r} must be a class (a name or a whole number), not {kind}")
    return label
