"""Batches of sequences: endless and shuffled for training, all in order for evaluation.

Batch sizes are global: each process gets the rows that its devices need. The global batch does not
depend on the number of processes.
"""

from collections.abc import Callable, Iterator

import grain
import numpy as np

from md4_jax.data.sequences import Rows, Windows
from md4_jax.protocols import Batch, UserError
from md4_jax.protocols.phrases import amount

READ_THREADS = 4

# Number of batches in endless training data.
ENDLESS = 2**53

# Rounds of Grain's permutation; `grain.MapDataset.shuffle` has 4. With 4 rounds and billions of
# sequences, successive ones are close to one another (correlation up to 0.8), and windows that
# are close have text in common where there is one at every offset.
FEW_ROUNDS, MANY_ROUNDS = 4, 16


class TrainIterator:
    """Endless iterator of batches with a position that can be saved and restored."""

    def __init__(self, batches: grain.IterDataset, batch_size: int):
        self._batches = iter(batches)
        self._batch_size = batch_size

    def __iter__(self) -> "TrainIterator":
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def get_state(self) -> dict[str, int]:
        """Returns the number of sequences taken so far by all processes together."""
        return {"sequences": self._batches.get_state()["next_index"] * self._batch_size}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues after that many sequences, on any number of processes.

        If the batch size does not divide that number, the sequences since the last multiple are
        repeated.
        """
        self._batches.set_state({"next_index": state["sequences"] // self._batch_size})

    def close(self) -> None:
        """Ends the reading threads."""
        self._batches.close()


class Repeated:
    """Iterator that yields each batch of another iterator several times.

    Its position is the one before the current batch, so that a resumed run gets this batch again.
    """

    def __init__(self, batches: TrainIterator, times: int, given: int):
        """given: number of times that the first batch has already been yielded."""
        self._batches, self._times = batches, times
        self._batch: Batch | None = None
        self._position, self._left, self._given = batches.get_state(), 0, given

    def __iter__(self) -> "Repeated":
        return self

    def __next__(self) -> Batch:
        if not self._left:
            self._position = self._batches.get_state()
            self._batch = next(self._batches)
            self._left, self._given = self._times - self._given, 0
        self._left -= 1
        return self._batch

    def get_state(self) -> dict[str, int]:
        """Returns the position before the current batch if it will be repeated, else after it."""
        return self._position if self._left else self._batches.get_state()

    def set_state(self, state: dict[str, int]) -> None:
        """Continues at a position of the batches; call it before the first batch."""
        self._batches.set_state(state)

    def close(self) -> None:
        """Ends the reading threads."""
        self._batches.close()


def train_iterator(
    sequences: Windows | Rows,
    *,
    batch_size: int,
    seed: int,
    rows: np.ndarray | None = None,
    rounds: int = FEW_ROUNDS,
) -> TrainIterator:
    """Makes an endless iterator of this process's rows of the global batches.

    batch_size  sequences of the global batch
    rows        rows of the global batch for this process; None: all
    rounds      rounds of the permutation

    Each epoch is another permutation of all sequences, determined by the seed, unless the sequences
    have their own `order`, like those of a mixture. A batch may span two epochs. Tokens after the
    last whole sequence are dropped. Random augmentation (`Rows.augment`) depends on the seed and
    the position in this endless order.

    Raises UserError if there is no whole sequence.
    """
    mine = np.arange(batch_size) if rows is None else rows
    count = len(sequences)
    if count == 0:
        raise UserError(
            f"the training split has {amount(sequences.size.tokens, 'token')}, fewer than one "
            f"sequence of {sequences.length}: lower data.length or take a larger corpus"
        )
    # Epoch e of seed s would be epoch 0 of seed s + e; hashing separates neighbouring seeds.
    order_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])

    def shuffled(place: int) -> int:
        epoch, index = divmod(int(place), count)
        seed_of_epoch = (order_seed + epoch) % 2**32
        return grain.experimental.index_shuffle(index, count - 1, seed_of_epoch, rounds)

    if hasattr(sequences, "order"):
        shuffled = sequences.order(order_seed, rounds)
    augment = getattr(sequences, "augment", None)

    def gather(number: int) -> Batch:
        own = number * batch_size + mine
        numbers = np.array([shuffled(place) for place in own])
        shown = np.minimum(numbers, np.iinfo(np.int32).max).astype(np.int32)
        batch = sequences.take(numbers)._replace(number=shown)
        if augment is None:
            return batch
        return batch._replace(tokens=augment(batch.tokens, _bits(order_seed, own)))

    batches = grain.MapDataset.range(ENDLESS).map(gather)
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=2 * READ_THREADS)
    return TrainIterator(batches.to_iter_dataset(options), batch_size)


def _bits(seed: int, places: np.ndarray) -> np.ndarray:
    """Returns 64 random bits for each position in the endless order: uint64 [B]."""
    drawn = [np.random.Philox(key=seed, counter=int(place)).random_raw() for place in places]
    return np.array(drawn, np.uint64)


def eval_batches(
    sequences: Windows | Rows,
    *,
    batch_size: int,
    rows: np.ndarray | None = None,
    text_size: Callable[[np.ndarray], tuple[int, int]] | None = None,
) -> Iterator[Batch]:
    """Yields all sequences in order, each in one row.

    Global batches have `batch_size` sequences; the last one is filled up with rows of zeros in
    which no token counts. A rest of r tokens is row 0 of one more global batch, with tokens
    [len(rows), r] in each process. All processes get the same number of batches.

    text_size: counts bytes and words for the batch's `text`. It is called with the counted tokens
    of each row, in the order of the text, for all rows in every process.

    Raises UserError if the split is empty.
    """
    mine = slice(None) if rows is None else rows
    if sequences.size.tokens == 0:
        raise UserError("the split to evaluate on is empty: raise data.validation or data.test")
    for real in _in_order(sequences, batch_size):
        if text_size is not None:
            real = real._replace(text=_text(real, text_size))
        yield _filled(real, batch_size, mine)


def _in_order(sequences: Windows | Rows, batch_size: int) -> Iterator[Batch]:
    for first in range(0, len(sequences), batch_size):
        yield sequences.take(np.arange(first, min(first + batch_size, len(sequences))))
    rest = sequences.rest()
    if rest is not None:
        yield rest


def _text(batch: Batch, text_size: Callable[[np.ndarray], tuple[int, int]]) -> np.ndarray:
    rows = zip(batch.tokens, batch.loss_mask, strict=True)
    sizes = [text_size(tokens[counted]) for tokens, counted in rows]
    return np.asarray(sizes, np.int32)


def _filled(real: Batch, batch_size: int, mine: np.ndarray | slice) -> Batch:
    """Fills up a batch with rows of zeros and returns the rows of this process."""

    def part(x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, batch_size - len(x))] + [(0, 0)] * (x.ndim - 1))[mine]

    context = {name: part(values) for name, values in real.context.items()}
    text = None if real.text is None else part(real.text)
    return Batch(part(real.tokens), part(real.loss_mask), context, text)
