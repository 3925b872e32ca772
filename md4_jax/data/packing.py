"""A split of a corpus as one long array of token ids, tokenised once and kept on disk."""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np

from md4_jax.data.cache import new_file
from md4_jax.data.tokenizers import id_dtype
from md4_jax.paths import cache_root
from md4_jax.protocols import UserError

FORMAT = 1  # raise it when the same text and tokenizer give another stream
BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 1 << 22


def token_stream(source, tokenizer, split: str, cache_dir: str | None = None) -> np.ndarray:
    """The ids of a split [N], memory-mapped, in the smallest unsigned type.

    Each document is followed by the tokenizer's end of text; if it has none, its
    separator stands between documents. The first call tokenises the split into
    a file of the cache directory, whose name is a hash of the source's
    fingerprint, the tokenizer and the split; later calls only open that. Memory
    does not grow with the corpus, and several processes may call at once.

    Raises UserError for text that the tokenizer cannot encode and when the disk
    is full.
    """
    facts = json.dumps([FORMAT, source.fingerprint(), tokenizer.to_json(), split])
    key = hashlib.sha256(facts.encode()).hexdigest()[:20]
    dtype = id_dtype(tokenizer.vocab_size)
    root = pathlib.Path(cache_dir) if cache_dir else cache_root() / "tokens"
    path = root / f"{split}-{key}.{dtype.name}"
    if not path.exists():
        with new_file(path) as temporary, temporary.open("wb") as file:
            for ids in _pieces(source.documents(split), tokenizer):
                file.write(ids.astype(dtype, copy=False).tobytes())
    if path.stat().st_size == 0:  # which cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


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
