"""A split of a corpus as one long array of token ids, tokenised once and kept on disk."""

import hashlib
import json
import pathlib
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from md4_jax.data import contents
from md4_jax.data.cache import new_file
from md4_jax.data.tokenizers import id_dtype
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import cache_root

FORMAT = 2  # raise it when the same text and tokenizer give another stream
BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 1 << 22


def token_stream(source, tokenizer, split: str, cache_dir: str | None = None) -> np.ndarray:
    """The ids of a split [N], memory-mapped, in the smallest unsigned type.

    Each document is followed by the tokenizer's end of text; if it has none, its
    separator stands between documents. The first call tokenises the split into
    a file of the cache directory, whose name is a hash of the source's
    fingerprint, the tokenizer and the split, and writes beside it what it holds;
    later calls only open that, once its length and checksum are what was written.
    One that is damaged is said and made again. Memory does not grow with the
    corpus, and several processes may call at once.

    Raises UserError for text that the tokenizer cannot encode, when the disk is
    full, and when it gives back something else than was written to it.
    """
    path, facts = _kept(source, tokenizer, split, cache_dir)
    if path.stat().st_size == 0:  # which cannot be mapped
        return np.zeros(0, facts["dtype"])
    return np.memmap(path, facts["dtype"], mode="r")


def fingerprint(source, tokenizer, split: str, cache_dir: str | None = None) -> dict[str, int]:
    """{tokens, crc32} of a split, which tell one text, or tokenizer, from another."""
    path, _ = _kept(source, tokenizer, split, cache_dir)
    written = json.loads(contents.record(path).read_text())
    return {name: written[name] for name in ("tokens", "crc32")}


def _kept(source, tokenizer, split: str, cache_dir: str | None) -> tuple[pathlib.Path, dict]:
    """The file of a split's tokens, which are there and whole, and what its record must hold."""
    described = [FORMAT, source.fingerprint(), tokenizer.to_json(), split]
    key = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:20]
    dtype = id_dtype(tokenizer.vocab_size).name
    facts = {"dtype": dtype, "vocab_size": tokenizer.vocab_size, "source": described[1]}
    root = pathlib.Path(cache_dir) if cache_dir else cache_root() / "tokens"
    path = root / f"{split}-{key}.{dtype}"
    wrong = contents.damage(path, facts) if path.exists() else "it is not there"
    if not wrong:
        return path, facts
    if path.exists():
        print(f"{path} is not what was kept of the text: {wrong}. It is made again", flush=True)
    _write(path, facts, source.documents(split), tokenizer)
    wrong = contents.damage(path, facts)
    if wrong:
        raise UserError(
            f"{path} was just written, and something else is read: {wrong}. Look at that disk, or "
            "set MD4_JAX_CACHE to a directory of another one"
        )
    return path, facts


def _write(path: pathlib.Path, facts: dict, documents: Iterable[str], tokenizer) -> None:
    """Writes tokens and the record of them, which is there first: who sees tokens, sees both."""
    with new_file(path) as temporary:
        count, crc = 0, 0
        with temporary.open("wb") as file:
            for ids in _pieces(documents, tokenizer):
                raw = ids.astype(facts["dtype"], copy=False).tobytes()
                file.write(raw)
                count, crc = count + len(ids), zlib.crc32(raw, crc)
        with new_file(contents.record(path)) as other:
            other.write_text(json.dumps({**facts, "tokens": count, "crc32": crc}) + "\n")


def _pieces(documents: Iterable[str], tokenizer) -> Iterator[np.ndarray]:
    """The stream, document by document."""
    between, after = np.zeros(0, np.uint8), np.zeros(0, np.uint8)
    if tokenizer.eot_id is not None:
        after = np.array([tokenizer.eot_id], id_dtype(tokenizer.vocab_size))
    elif tokenizer.separator:
        between = tokenizer.encode(tokenizer.separator)
    is_first = True
    for batch in _batches(documents):
        for ids in tokenizer.encode_batch(batch):
            _check(ids, tokenizer.vocab_size)
            if not is_first:
                yield between
            yield ids
            yield after
            is_first = False


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in lists that are worth a call and small enough for memory."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check(ids: np.ndarray, vocab_size: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise UserError(
            f"the tokenizer made ids {ids.min()}..{ids.max()}, outside of its vocabulary "
            f"0..{vocab_size - 1}"
        )


def segments(tokens: np.ndarray, eot_id: int) -> np.ndarray:
    """Which document of its row each token belongs to, int32 [..., L] for tokens [..., L].

    Documents of a row count from 0; an end of text belongs to the document it ends.
    """
    ends = np.asarray(tokens) == eot_id
    return (np.cumsum(ends, axis=-1) - ends).astype(np.int32)
