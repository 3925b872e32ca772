"""Batches from a token stream: endless and shuffled for training, whole and in order otherwise.

A stream of N tokens is cut into N // length sequences. Batch sizes are global:
each process receives the rows that its devices need, and what is in the global batch
does not depend on how many processes there are.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
import numpy as np

from md4_jax.data.packing import segments
from md4_jax.protocols import Batch, UserError, batch_of

READ_THREADS = 4

# Sequences before the end of training data. Not infinite: Grain computes the number of batches
# in float64, which for its own "forever" overflows at a batch of one sequence.
ENDLESS = 2**53


class SplitSize(NamedTuple):
    """How much a split holds: `sequences` of full length, `remainder` tokens, `tokens` in all."""

    sequences: int
    remainder: int
    tokens: int


def split_size(tokens: np.ndarray, length: int) -> SplitSize:
    """What `eval_batches` goes through; training leaves out the remainder."""
    return SplitSize(len(tokens) // length, len(tokens) % length, len(tokens))


class TrainIterator:
    """An endless iterator of batches that can say where it stands and return there."""

    def __init__(self, batches: grain.IterDataset, batch_size: int):
        self._batches = iter(batches)
        self._batch_size = batch_size

    def __iter__(self) -> "TrainIterator":
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def get_state(self) -> dict[str, int]:
        """The number of sequences that all processes together have taken."""
        return {"sequences": self._batches.get_state()["next_index"] * self._batch_size}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues after that many sequences, on any number of processes.

        With another batch size that does not divide the number, the sequences
        since the last multiple come again.
        """
        self._batches.set_state({"next_index": state["sequences"] // self._batch_size})

    def close(self) -> None:
        """Ends the reading threads."""
        self._batches.close()


def train_iterator(
    tokens: np.ndarray,
    length: int,
    *,
    batch_size: int,
    seed: int,
    rows: np.ndarray | None = None,
    segments_eot: int | None = None,
) -> TrainIterator:
    """Endless batches of this process's rows of a global batch.

    tokens        ids [N]; sequence i is tokens[i * length : (i + 1) * length]
    batch_size    sequences of the global batch
    rows          those of them that this process gets; None: all
    segments_eot  the end of text; if given, context['segments'] numbers the
                  documents of each row

    Batches have tokens int32 [len(rows), length], all of which count.
    Each epoch is another permutation, given by the seed alone, and each sequence
    comes once in it; a batch may straddle two epochs. The last N % length tokens
    are left out.

    Raises UserError when the stream is shorter than one sequence.
    """
    mine = slice(None) if rows is None else rows
    count = len(tokens) // length
    if count == 0:
        raise UserError(
            f"the training split has {len(tokens)} tokens, fewer than one sequence of {length}: "
            "lower data.length or take a larger corpus"
        )

    def gather(chunks: np.ndarray) -> Batch:
        starts = chunks[mine] * length
        return _batch([tokens[start : start + length] for start in starts], segments_eot)

    # Grain's epoch e of seed s is epoch 0 of seed s + e; hashing keeps neighbouring seeds apart.
    order_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    order = grain.MapDataset.range(count).shuffle(seed=order_seed)
    chunks = order.repeat(ENDLESS // count).batch(batch_size)
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=2 * READ_THREADS)
    return TrainIterator(chunks.map(gather).to_iter_dataset(options), batch_size)


def eval_batches(
    tokens: np.ndarray,
    length: int,
    *,
    batch_size: int,
    stride: int = 0,
    rows: np.ndarray | None = None,
    segments_eot: int | None = None,
    text_size: Callable[[np.ndarray], tuple[int, int]] | None = None,
) -> Iterator[Batch]:
    """The whole split in order, each token counted in exactly one row.

    Sequences come in global batches of `batch_size`, the last one filled up with
    rows of zeros that do not count. If N % length = r tokens are left, one more batch
    of tokens [len(rows), r] has them in row 0 of the global batch. Every process
    gets the same number of batches.

    stride > 0: each sequence begins so many tokens after the one before it, and all but the first
    have the length - stride tokens of both before what counts; each token counts in one row.
    text_size: what a batch has as `text`, called for the tokens of each row that count,
    in the order of the text and in every process for all rows.

    Raises UserError when the split is empty.
    """
    mine = slice(None) if rows is None else rows
    if len(tokens) == 0:
        raise UserError("the split to evaluate on is empty: raise data.validation or data.test")
    step = stride or length
    before = length - step
    count = max(0, (len(tokens) - length) // step + 1)

    def batch(real: np.ndarray, first: int) -> Batch:
        has_before = first + np.arange(batch_size) > 0
        seen_before = has_before[:, None] & (np.arange(real.shape[1]) < before)
        made = _padded(real, ~seen_before, mine, segments_eot)
        if text_size is None:
            return made
        sizes = np.zeros((batch_size, 2), np.int32)
        for index, row in enumerate(real):
            sizes[index] = text_size(row[before if has_before[index] else 0 :])
        return made._replace(text=sizes[mine])

    if count:
        full = np.lib.stride_tricks.sliding_window_view(tokens, length)[::step]
        for first in range(0, count, batch_size):
            yield batch(full[first : first + batch_size], first)
    rest = len(tokens) - (before + count * step if count else 0)
    if rest:
        yield batch(tokens[None, -(rest + before if count else rest) :], count)


def _batch(sequences, segments_eot: int | None) -> Batch:
    tokens = np.stack(sequences).astype(np.int32)
    context = {} if segments_eot is None else {"segments": segments(tokens, segments_eot)}
    return batch_of(tokens, context=context)


def _padded(real: np.ndarray, counted: np.ndarray, mine: Any, segments_eot: int | None) -> Batch:
    """The rows of this process of a batch that is filled up with zeros, which do not count."""
    tokens = np.zeros(counted.shape, np.int32)
    tokens[: len(real)] = real
    loss_mask = counted & (np.arange(len(counted)) < len(real))[:, None]
    return _batch(tokens[mine], segments_eot)._replace(loss_mask=loss_mask[mine])
