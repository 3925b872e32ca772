"""Conversations as sequences; only the assistant's turns count in the loss."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from md4_jax.data import messages, packing
from md4_jax.data.chat import ABSENT, Chat
from md4_jax.data.labelled import Padding, check_rejected, print_cut
from md4_jax.data.sequences import Rows
from md4_jax.data.sources.splits import digest
from md4_jax.protocols import UserError


class Spoken(NamedTuple):
    """Turns of a sequence, and the place of its conversation. No turns: nothing counts.

    rejected  its turns with a rejected answer as the last one; empty without a rejected answer
    """

    turns: Sequence[messages.Turn]
    where: str
    rejected: Sequence[messages.Turn] = ()

    @property
    def texts(self) -> list[str]:
        """Returns the texts that are encoded separately, those of the rejected answer last."""
        return [text for turn in (*self.turns, *self.rejected) for text in turn]


class Conversations:
    """Source of conversations rendered by a chat template; wraps another source.

    source  has `conversations(split)`, which yields documents with `messages` and `where`
    chat    the template
    turns   data.turns: the assistant's turns that count

    Other attributes are those of the source. UserError for rejected answers unless only the last
    turn counts.
    """

    def __init__(self, source: Any, chat: Chat, turns: str):
        if (key := getattr(source, "rejected_key", "")) and turns != "last":
            raise UserError(
                f"data.rejected_key={key!r} compares only the last answers of conversations, but "
                f"data.turns={turns!r} also trains on earlier answers: set data.turns=last"
            )
        self._source, self.chat, self._turns = source, chat, turns

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # for copy and pickle
            raise AttributeError(name)
        return getattr(self._source, name)

    def fingerprint(self) -> str:
        """Returns a hash of the conversations, the template and the turns that count."""
        facts = [self.chat.template, sorted(self.chat.tokens.items()), self._turns]
        facts += [self.chat.day] if "strftime_now" in self.chat.template else []
        # Older versions left these variables undefined.
        facts += ["none"] if any(name in self.chat.template for name in ABSENT) else []
        return digest("conversations", self._source.fingerprint(), *facts)

    def documents(self, split: str) -> Iterator[str]:
        """Yields the text of each sequence, for fitting a tokenizer."""
        for one in self.sequences(split, ()):
            yield "".join(turn.context + turn.answer for turn in one.turns)

    def sequences(self, split: str, ends: Sequence[str]) -> Iterator[Spoken]:
        """Yields the sequences of a split. A conversation without answers gives one without turns.

        ends  special tokens that end an answer
        Raises UserError, with the place, for a conversation that the template cannot render.
        """
        for document in self._source.conversations(split):
            try:
                made = messages.sequences(self.chat, document.messages, self._turns, ends)
                found = [*made] or [[]]
                others = messages.sequences(
                    self.chat, document.rejected_messages, self._turns, ends
                )
                worse = next(others, ())
            except UserError as error:
                raise UserError(f"{document.where}: {error}") from error
            yield from (Spoken(turns, document.where, worse) for turns in found)

    def origin(self, split: str, number: int) -> str:
        """Names the place of the conversation with the text of this number."""
        places = (one.where for one in self.sequences(split, ()) for _ in one.texts)
        return next(itertools.islice(places, number, None))


def rows(source: Conversations, domain: Any, split: str, length: int, padding: Padding) -> Rows:
    """Returns the conversations of a split as rows of `length` tokens.

    The text before an answer and the answer are encoded separately, as in sampling. Answers count,
    including the token that ends the turn. If the template ends turns without a special token, the
    tokenizer's end of text, if it has one, is appended to the last turn. Longer conversations are
    cut, shorter ones are padded. A conversation is dropped if no counted token remains. Both
    numbers are printed. Conversations are tokenised once and stored on disk. If the source has
    rejected answers, the rows with these are `rejected`.

    Raises UserError if no conversation remains, and for rejected answers if padding does not count.
    """
    has_worse = check_rejected(source, padding)
    tokenizer = domain.tokenizer
    described = [source.fingerprint(), tokenizer.to_json(), split, "chat", length, *padding]
    size = max(tokenizer.vocab_size, length + 1, 256)
    pieces = lambda: _pieces(source, tokenizer, split, length, padding)  # noqa: E731
    found = packing.opened(*packing.kept(source, described, size, split, pieces))
    stop = length + 1 + (length + 7) // 8
    found = found.reshape(-1, stop + length * has_worse)
    return Rows(
        found[:, :length],
        lengths=found[:, length],
        counted=found[:, length + 1 : stop],
        rejected=found[:, stop:] if has_worse else None,
    )


def _pieces(
    source: Conversations, tokenizer: Any, split: str, length: int, padding: Padding
) -> Iterator[np.ndarray]:
    """Yields rows: `length` tokens, the number before the padding, and the bits of the loss mask.

    With a rejected answer, the `length` tokens of its sequence follow.
    """
    ends = sorted(source.chat.ends(getattr(tokenizer, "special", ())))
    first, second = itertools.tee(source.sequences(split, ends))
    texts = (text for one in first for text in one.texts)
    encoded = packing.encoded(source, tokenizer, split, texts)
    made = cut = left_out = 0
    for one in second:
        row, counts = _row(one.turns, encoded, ends, length, padding)
        if one.rejected:
            other, _ = _row(one.rejected, encoded, ends, length, padding)
            row = np.concatenate([row, other[:length]])
        made, cut = made + 1, cut + (len(counts) > length)
        if counts[:length].any():
            yield row
        else:
            left_out += 1
    _report(split, length, made, cut, left_out)


def _row(
    turns: Sequence[messages.Turn],
    encoded: Iterator[np.ndarray],
    ends: Sequence[str],
    length: int,
    padding: Padding,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a row of `_pieces`, and a mask of all tokens of the turns that count.

    encoded: iterator of the tokens of each text; one item is taken for each text of the turns
    """
    parts = [next(encoded) for turn in turns for _ in turn]
    ids = np.concatenate([np.zeros(0, int), *parts])
    spoken = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
    is_open = not turns or not turns[-1].answer.endswith(tuple(ends))
    end = padding.end if is_open or padding.counts else ()
    ids = np.concatenate([ids, np.array(end, int)])[:length].astype(int)
    counts = np.concatenate([spoken, np.ones(len(end), bool)])[:length]
    rest = length - len(ids)
    used = length if padding.counts else len(ids)
    ids = np.pad(ids, (0, rest), constant_values=padding.end[0] if padding.counts else 0)
    counts = np.pad(counts, (0, rest), constant_values=padding.counts)
    return np.concatenate([ids, [used], np.packbits(counts)]), spoken


def _report(split: str, length: int, made: int, cut: int, left_out: int) -> None:
    """Prints the numbers of cut and dropped conversations; UserError if all were dropped."""
    if left_out and left_out == made:
        raise UserError(
            f"none of the {made:,} conversations of the {split} split has an answer of the "
            f"assistant within data.length={length} tokens: raise data.length, or look at "
            "data.messages_key"
        )
    print_cut("conversations", split, length, cut, made)
    if left_out:
        print(
            f"{left_out:,} of {made:,} conversations of the {split} split are left out: they have "
            f"no answer of the assistant within data.length={length} tokens",
            flush=True,
        )
