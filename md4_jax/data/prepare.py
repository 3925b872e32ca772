"""Preparation of large texts: tokenised once, by all cores, into shards that later runs reuse."""

import hashlib
import itertools
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm

from md4_jax.data.contents import check_same
from md4_jax.data.labelled import own_sequences
from md4_jax.data.lock import alone
from md4_jax.data.shards import (
    Cursor,
    Prepared,
    Shard,
    TokenShards,
    read_manifest,
    write,
    write_lengths,
)
from md4_jax.data.sources.records import Document, Part
from md4_jax.data.tokenizers import id_dtype
from md4_jax.data.workers import Pool, cores
from md4_jax.protocols import UserError
from md4_jax.runtime.distributed import is_first
from md4_jax.runtime.paths import Place, cache_root, is_remote, place

FORMAT = 1  # increase it when the same text and tokenizer give other shards
SHARD_TOKENS = 1 << 25
BATCH_DOCUMENTS = 2000
BATCH_CHARACTERS = 1 << 21
# Smallest text for which several processes are started. Each takes 1.35 s of a core to import
# jax, the package and the vocabulary, the time for encoding 1.4 million tokens.
PARALLEL_BYTES = 1 << 24
POLL_SECONDS = 2.0
_known: dict[str, Prepared] = {}  # complete ones, by folder in an object store


def is_sharded(source: Any, store: str) -> bool:
    """Returns whether the tokens of a source are stored in shards, by documents.

    store: data.store. Small texts have shards if it names a directory, else one token file per
    split; see data/packing.py.
    """
    if not hasattr(source, "sections") or own_sequences(source):
        return False
    return source.is_large or (bool(store) and source.has_documents)


def stream(source: Any, tokenizer: Any, split: str, store: str) -> TokenShards:
    """Returns the token stream of a split; the first call prepares the whole text."""
    found = prepared(source, tokenizer, store)
    pieces = found.pieces(source.ranges(split, found.documents()))
    return TokenShards(found.folder, found.dtype, pieces)


def fingerprint(source: Any, tokenizer: Any, split: str, store: str) -> dict[str, int]:
    """Returns {tokens, crc32} of a split, the same as for one file with these tokens."""
    found = prepared(source, tokenizer, store)
    return found.fingerprint(found.pieces(source.ranges(split, found.documents())))


def prepared(source: Any, tokenizer: Any, store: str) -> Prepared:
    """Returns the shards of a source after making those that are missing or damaged.

    Later calls find the folder by a hash of the text and the tokenizer. After an interruption the
    work resumes after the last complete shard. One process works; the others wait, on other
    machines too if they share the folder.

    Raises UserError if a document cannot be read or encoded, if the disk is full, and if a file
    changes meanwhile.
    """
    content = source.content()
    described = [FORMAT, content, tokenizer.to_json()]
    key = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
    root = place(store, "data.store") if store else Place(cache_root() / "prepared")
    folder = root / f"{source.title}-{key}"
    if (found := _whole(folder)) is not None:
        return found
    if is_remote(folder):
        return _made(folder, source, tokenizer, content) if is_first() else _awaited(folder)
    with alone(root / f"{folder.name}.lock", f"tokenising {source.title}"):
        return _made(folder, source, tokenizer, content)


def _awaited(folder: Place) -> Prepared:
    print(f"waiting: the first process tokenises into {folder}", flush=True)
    while (found := _whole(folder)) is None:
        time.sleep(POLL_SECONDS)
    return found


def _whole(folder: Place) -> Prepared | None:
    """Returns the prepared tokens in a folder; None if they are incomplete or a shard is damaged.

    In an object store, checking a shard takes several requests. So this process does not check
    complete ones again as long as the manifest is unchanged.
    """
    found, name = read_manifest(folder), str(folder)
    if found is None or not found.is_complete:
        return None
    if _known.get(name) == found:
        return found
    if any(found.damages()):
        return None
    if is_remote(folder):
        _known[name] = found
    return found


def _made(folder: Place, source: Any, tokenizer: Any, content: str) -> Prepared:
    """Makes the shards that are missing in a folder; content: the hash in the folder's name."""
    end, separator = _end(tokenizer)
    dtype, facts = id_dtype(tokenizer.vocab_size).name, {"content": content}
    facts["tokenizer"] = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
    facts["files"] = source.facts()
    found = read_manifest(folder)
    if found is None:
        found = Prepared(folder, dtype, tokenizer.vocab_size, separator, facts)
    wrong = {number: why for number, why in enumerate(found.damages()) if why}
    for number, why in wrong.items():
        path = folder / found.shards[number].name
        print(f"{path} is damaged or was changed: {why}. It will be made again", flush=True)
    if found.is_complete and not wrong:  # another process has made it in the meantime
        return found
    parts = [(name, part) for name, parts in source.sections().items() for part in parts]
    size = sum(part.size for _, part in parts)
    count = cores() if size >= PARALLEL_BYTES else 0
    print(f"tokenising {source.title} into {folder}", flush=True)
    with Pool(tokenizer, end, count) as pool:
        maker = _Maker(found, parts, pool, tokenizer)
        check_same(f"the text of {source.title}", source.content, content)
        for number in wrong:
            maker.again(number)
        if not found.is_complete:
            maker.rest()
        maker.release()
    found = maker.made
    for shard, why in zip(found.shards, found.damages(), strict=True):
        if why:
            raise UserError(
                f"{folder / shard.name} differs from what was just written to it: {why}. The disk "
                "may be faulty: check it, or use a directory on another disk"
            )
    return found


def _end(tokenizer: Any) -> tuple[np.ndarray, int]:
    """Returns (ids after each document, number of these omitted at the end of a split)."""
    dtype = id_dtype(tokenizer.vocab_size)
    if tokenizer.eot_id is not None:
        return np.array([tokenizer.eot_id], dtype), 0
    ids = tokenizer.encode(tokenizer.separator) if tokenizer.separator else []
    return np.array(ids, dtype), len(ids)


class _Batch(NamedTuple):
    section: str
    documents: list[Document]
    end: Cursor
    position: int  # bytes of all files read so far


class _Maker:
    """Writes shards from the documents of files; `made` holds the shards so far."""

    def __init__(self, made: Prepared, parts: list[tuple[str, Part]], pool: Pool, tokenizer: Any):
        self.made, self._parts, self._pool, self._tokenizer = made, parts, pool, tokenizer
        self._states = [part.state() for _, part in parts]
        self._released = 0  # parts

    def rest(self) -> None:
        """Makes all shards after the existing ones."""
        shards = self._shards(len(self.made.shards))
        for shard in shards:
            self._check_unchanged(self.made.shards[-1:], shard)
            self.made = self.made._replace(shards=(*self.made.shards, shard))
            self.made.write()
            self.release()
        self.made = self.made._replace(is_complete=True)
        self.made.write()

    def release(self) -> None:
        """Calls `done` of the files that no later shard needs according to the manifest on disk.

        A file that ends together with the last shard may be read again to detect its end.
        """
        last = self.made.shards[-1].end.part if self.made.shards else 0
        last = len(self._parts) if self.made.is_complete else last
        for _, part in self._parts[self._released : last]:
            part.done()
        self._released = last

    def again(self, number: int) -> None:
        """Makes one shard again."""
        before = self.made.shards[number]
        shards = self._shards(number, before.end)
        shard = next(shards, None)
        shards.close()
        self._check_unchanged(self.made.shards[:number][-1:], before)
        if shard != before:
            raise UserError(
                f"{self.made.folder / before.name} cannot be made again: the same text gives "
                f"other tokens. Move {self.made.folder} away and start again"
            )

    def _check_unchanged(self, before: Sequence[Shard], shard: Shard) -> None:
        """Raises UserError if a file of a shard was written to since its hash was taken.

        before: the shard before this one, if there is one
        """
        first = before[0].end.part if before else 0
        for number in range(first, shard.end.part + 1):
            state = self._states[number]
            check_same(str(*state[:1]), self._parts[number][1].state, state)

    def _shards(self, number: int, until: Cursor | None = None) -> Iterator[Shard]:
        """Yields shards as they are written, from this number on, up to a place."""
        start = self.made.shards[number - 1].end if number else Cursor(0, 0)
        ids, lengths, tokens, last = [], [], 0, None
        for batch, found in self._encoded(start, until or Cursor(len(self._parts), 0)):
            if tokens and (tokens >= SHARD_TOKENS or batch.section != last.section):
                yield self._write(number, last, np.concatenate(ids), np.concatenate(lengths))
                number, ids, lengths, tokens = number + 1, [], [], 0
            ids.append(found[0])
            lengths.append(found[1])
            tokens, last = tokens + len(found[0]), batch
        if last is not None and lengths:
            yield self._write(number, last, np.concatenate(ids), np.concatenate(lengths))

    def _write(self, number: int, last: _Batch, ids: np.ndarray, lengths: np.ndarray) -> Shard:
        raw = ids.astype(self.made.dtype, copy=False).tobytes()
        name = f"{last.section}-{number:05}.{self.made.dtype}"
        write_lengths(self.made.folder / name, lengths)
        write(self.made.folder / name, raw)
        sums = zlib.crc32(raw), hashlib.sha256(raw).hexdigest()
        return Shard(name, last.section, len(ids), len(lengths), *sums, last.end)

    def _encoded(self, start: Cursor, until: Cursor) -> Iterator[tuple[_Batch, Any]]:
        """Yields batches with their ids, and displays the progress."""
        total, before = (sum(p.size for _, p in self._parts[:n]) for n in (None, start.part))
        texts = lambda batch: [document.text for document in batch.documents]  # noqa: E731
        bar = tqdm.tqdm(
            desc="tokenising", total=total, initial=before, unit="B", unit_scale=True,
            mininterval=1.0,
        )  # fmt: skip
        tokens, since = 0, time.monotonic()
        with bar:
            for batch, found in self._pool.map(self._batches(start, until), texts):
                if isinstance(found, UserError):
                    raise self._named(batch) or found
                yield batch, found
                tokens += len(found[0])
                rate = tokens / (time.monotonic() - since)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update(batch.position - bar.n)

    def _named(self, batch: _Batch) -> UserError | None:
        """Makes the error for the first document of a batch that cannot be encoded."""
        for document in batch.documents:
            try:
                self._tokenizer.encode(document.text)
            except UserError as error:
                return type(error)(f"{document.where}: {error}")
        return None

    def _batches(self, start: Cursor, until: Cursor) -> Iterator[_Batch]:
        """Yields the documents between two places, batches of one section each.

        No file after the second place is fetched.
        """
        held: list[Document] = []
        size, before = 0, sum(part.size for _, part in self._parts[: start.part])
        parts = self._parts[: until.part + 1]
        for number in range(start.part, len(parts)):
            section, part = parts[number]
            taken = start.taken if number == start.part else 0
            after = parts[number + 1][1] if number + 1 < len(parts) else None
            last = until.taken if number == until.part else None
            for document in itertools.islice(part.documents(after), taken, last):
                held.append(document)
                taken, size = taken + 1, size + len(document.text)
                if len(held) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
                    position = before + document.position
                    yield _Batch(section, held, Cursor(number, taken), position)
                    held, size = [], 0
            before += part.size
            is_last = number + 1 == len(parts) or parts[number + 1][0] != section
            if held and is_last:
                yield _Batch(section, held, Cursor(number, taken), before)
                held, size = [], 0
