"""Token stream of a split: one long array of ids, tokenised once and stored on disk."""

import hashlib
import json
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from md4_jax.data import contents
from md4_jax.data.cache import new_file
from md4_jax.data.tokenizers import id_dtype
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import cache_root
from md4_jax.runtime.streams import printable

FORMAT = 3  # increase it when the same text and tokenizer give another stream
BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 1 << 22

Pieces = Callable[[], Iterable[np.ndarray]]


def token_stream(source, tokenizer, split: str) -> np.ndarray:
    """Returns the ids of a split [N], memory-mapped, in the smallest unsigned type.

    Each document is followed by the tokenizer's end of text. A tokenizer without one puts its
    separator between documents. The first call tokenises the split; see `kept`.

    Raises UserError for text that the tokenizer cannot encode.
    """
    return opened(*_kept_stream(source, tokenizer, split))


def fingerprint(source, tokenizer, split: str) -> dict[str, int]:
    """Returns {tokens, crc32} of a split, to detect another text or tokenizer."""
    path, _ = _kept_stream(source, tokenizer, split)
    written = json.loads(contents.record(path).read_text())
    return {name: written[name] for name in ("tokens", "crc32")}


def kept(
    source: Any, described: Sequence[Any], size: int, split: str, pieces: Pieces
) -> tuple[pathlib.Path, str]:
    """Returns (file, dtype) of integers that are computed once and stored on disk.

    source     from which they are computed; has `fingerprint()`
    described  everything that the integers depend on, beginning with the source's fingerprint; its
               hash is part of the file name
    size       an upper bound of the integers (exclusive), which determines the dtype
    pieces     yields the integers in pieces

    The first call writes a file in the cache directory and a record of its contents beside it.
    Later calls only check length and checksum. A damaged file is reported and rewritten. Memory use
    does not grow with the data, and several processes may call this at once.

    Raises UserError if the disk is full, if reading back gives other data than was written, and if
    the source has another fingerprint after it was read.
    """
    key = hashlib.sha256(json.dumps([FORMAT, *described]).encode()).hexdigest()[:20]
    dtype = id_dtype(size).name
    facts = {"dtype": dtype, "vocab_size": size, "source": described[0]}
    path = cache_root() / "tokens" / f"{split}-{key}.{dtype}"
    wrong = contents.damage(path, facts) if path.exists() else "it is not there"
    if not wrong:
        return path, dtype
    if path.exists():
        said = printable(f"{path} is damaged or was changed: {wrong}. It will be made again")
        print(said, flush=True)
    _write(path, facts, _checked(source, facts["source"], split, pieces))
    wrong = contents.damage(path, facts)
    if wrong:
        raise UserError(
            f"{path} differs from what was just written to it: {wrong}. The disk may be faulty: "
            "check it, or set MD4_JAX_CACHE to a directory on another disk"
        )
    return path, dtype


def opened(path: pathlib.Path, dtype: str) -> np.ndarray:
    """Returns the integers of a file, memory-mapped."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


def encoded(source, tokenizer, split: str, documents: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields the ids of each document; UserError, with the place, if one cannot be encoded."""
    count = 0
    for batch in _batches(documents):
        try:
            found = tokenizer.encode_batch(batch)
        except UserError as error:
            raise _named(source, tokenizer, split, count, batch) from error
        for ids in found:
            _check(ids, tokenizer.vocab_size)
            yield ids
        count += len(batch)


def _kept_stream(source, tokenizer, split: str) -> tuple[pathlib.Path, str]:
    described = [source.fingerprint(), tokenizer.to_json(), split]
    pieces = lambda: _stream(source, tokenizer, split)  # noqa: E731
    return kept(source, described, tokenizer.vocab_size, split, pieces)


def _checked(source: Any, fingerprint: str, split: str, pieces: Pieces) -> Pieces:
    """Returns pieces that end with UserError if the source no longer has this fingerprint."""

    def checked() -> Iterator[np.ndarray]:
        yield from pieces()
        contents.check_same(f"the {split} split", source.fingerprint, fingerprint)

    return checked


def _write(path: pathlib.Path, facts: Mapping[str, Any], pieces: Pieces) -> None:
    """Writes the record, then the integers, so that no reader finds integers without a record."""
    with new_file(path) as temporary:
        count, crc = 0, 0
        with temporary.open("wb") as file:
            for ids in pieces():
                raw = ids.astype(facts["dtype"], copy=False).tobytes()
                file.write(raw)
                count, crc = count + len(ids), zlib.crc32(raw, crc)
        with new_file(contents.record(path)) as other:
            other.write_text(json.dumps({**facts, "tokens": count, "crc32": crc}) + "\n")


def _stream(source, tokenizer, split: str) -> Iterator[np.ndarray]:
    """Yields the stream, document by document."""
    between, after = np.zeros(0, np.uint8), np.zeros(0, np.uint8)
    if tokenizer.eot_id is not None:
        after = np.array([tokenizer.eot_id], id_dtype(tokenizer.vocab_size))
    elif tokenizer.separator:
        between = tokenizer.encode(tokenizer.separator)
    for number, ids in enumerate(encoded(source, tokenizer, split, source.documents(split))):
        if number:
            yield between
        yield ids
        yield after


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Groups documents into lists, large enough for one call and small enough for memory."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _named(source, tokenizer, split: str, count: int, batch: list[str]) -> UserError:
    """Makes the error for the first document of a batch that cannot be encoded.

    count: number of documents before the batch.
    """
    for number, document in enumerate(batch, count):
        try:
            tokenizer.encode(document)
        except UserError as error:
            of = f", {source.origin(split, number)}" if hasattr(source, "origin") else ""
            return UserError(f"the {split} split{of}: {error}")
    return UserError(f"the {split} split cannot be encoded in batches")


def _check(ids: np.ndarray, vocab_size: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise UserError(
            f"the tokenizer made ids {ids.min()}..{ids.max()}, outside of its vocabulary "
            f"0..{vocab_size - 1}"
        )


def segments(tokens: np.ndarray, eot_id: int) -> np.ndarray:
    """Numbers the document that each token belongs to, int32 [..., L] for tokens [..., L].

    Documents of a row are numbered from 0; an end-of-text token belongs to the document it ends.
    """
    ends = np.asarray(tokens) == eot_id
    return (np.cumsum(ends, axis=-1) - ends).astype(np.int32)
