"""Batches: each sequence once an epoch, one order for any number of processes, nothing lost."""

import itertools
import json
import threading

import grain
import numpy as np
import pytest

from md4_jax.data.loader import MANY_ROUNDS, eval_batches, train_iterator
from md4_jax.data.sequences import Windows
from md4_jax.protocols import UserError, batch_of

LENGTH = 4


def stream(sequences: int, remainder: int = 0) -> np.ndarray:
    """Token values say where they stand."""
    return np.arange(sequences * LENGTH + remainder, dtype=np.uint16)


def grid(sequences: int, remainder: int = 0) -> Windows:
    """Windows side by side."""
    return Windows(stream(sequences, remainder), LENGTH, LENGTH)


def take(iterator, count: int) -> np.ndarray:
    """The numbers of the sequences in the next batches, [count, rows]."""
    batches = [next(iterator) for _ in range(count)]
    assert all((b.tokens - b.tokens[:, :1] == np.arange(LENGTH)).all() for b in batches)
    return np.array([b.tokens[:, 0] // LENGTH for b in batches])


def test_a_batch():
    batch = next(train_iterator(grid(10), batch_size=3, seed=0))
    assert batch.tokens.shape == (3, LENGTH) and batch.tokens.dtype == np.int32
    assert batch.loss_mask.all() and batch.loss_mask.shape == (3, LENGTH)
    assert batch.loss_mask.dtype == bool
    assert batch.context == {}


@pytest.mark.parametrize("batch_size", [1, 4, 12, 20])
def test_each_sequence_once_an_epoch(batch_size):
    """20 sequences; batches of 12 straddle epochs."""
    iterator = train_iterator(grid(20, remainder=3), batch_size=batch_size, seed=5)
    epochs = take(iterator, 60 // batch_size).reshape(3, 20)
    assert (np.sort(epochs) == np.arange(20)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(tuple(epoch) != tuple(range(20)) for epoch in epochs)


@pytest.mark.parametrize("step", [1, 3, LENGTH])
def test_windows_in_order_are_read_at_once(step):
    """Each read of an object store is a request."""
    reads = []

    class Told(np.ndarray):
        def __getitem__(self, wanted):
            reads.append((wanted.start, wanted.stop))
            return np.asarray(self)[wanted]

    windows = Windows(stream(20).view(Told), LENGTH, step)
    found = windows.take(np.arange(3, 10)).tokens
    assert reads == [(3 * step, 9 * step + LENGTH)]
    assert found.tolist() == [[*range(n * step, n * step + LENGTH)] for n in range(3, 10)]
    windows.take(np.array([3, 5, 4]))
    assert len(reads) == 4


def test_a_process_finds_its_rows_without_all_places_of_the_global_batch():
    """Which would take the same time in each of the processes of a pod."""
    iterator = train_iterator(grid(20), batch_size=2**40, seed=5, rows=np.arange(2, 6))
    first, second = take(iterator, 2)
    assert first.tolist() == take(train_iterator(grid(20), batch_size=6, seed=5), 1)[0, 2:].tolist()
    assert len(set(second)) == 4 and iterator.get_state() == {"sequences": 2**41}


def test_a_batch_tells_the_numbers_of_its_sequences():
    """In every epoch the same ones."""
    iterator = train_iterator(grid(20), batch_size=8, seed=5, rows=np.arange(2, 8))
    for _ in range(10):
        batch = next(iterator)
        assert batch.number.dtype == np.int32
        assert batch.number.tolist() == (batch.tokens[:, 0] // LENGTH).tolist()


def test_the_seed_gives_the_order():
    def first_epochs(seed):
        return take(train_iterator(grid(50), batch_size=50, seed=seed), 3)

    assert (first_epochs(1) == first_epochs(1)).all()
    orders = [tuple(epoch) for seed in (0, 1, 2, 2**40) for epoch in first_epochs(seed)]
    assert len(set(orders)) == 12  # neighbouring seeds share no epoch either


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_order_does_not_depend_on_the_processes(processes):
    whole = take(train_iterator(grid(30), batch_size=8, seed=3), 10)
    shares = [
        take(
            train_iterator(
                grid(30),
                batch_size=8,
                seed=3,
                rows=np.arange(8).reshape(processes, -1)[index],
            ),
            10,
        )
        for index in range(processes)
    ]
    assert all(share.shape == (10, 8 // processes) for share in shares)
    assert (np.concatenate(shares, axis=1) == whole).all()


@pytest.mark.parametrize("seed", [0, 7])
def test_the_order_is_that_of_earlier_versions(seed):
    """A run that is resumed goes on in the epoch that it began: Grain's own shuffle."""
    order_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    order = grain.MapDataset.range(30).shuffle(seed=order_seed).repeat(3)
    found = take(train_iterator(grid(30), batch_size=9, seed=seed), 10)
    assert found.ravel().tolist() == [order[i] for i in range(90)]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("taken", [0, 1, 13])
@pytest.mark.cases(3)
def test_windows_at_every_offset(processes, taken):
    """Each once an epoch, and as exact as the grid on resume and over processes."""
    tokens, batch_size = np.arange(33, dtype=np.uint16), 6
    offsets = len(tokens) - LENGTH + 1  # 30, so that an epoch is 5 batches

    def iterators():
        rows = np.arange(batch_size).reshape(processes, -1)
        windows = Windows(tokens, LENGTH, 1)
        arguments = dict(batch_size=batch_size, seed=3, rounds=MANY_ROUNDS)
        return [train_iterator(windows, rows=mine, **arguments) for mine in rows]

    def starts(made, count):
        batches = [[next(one).tokens for one in made] for _ in range(count)]
        found = np.concatenate([np.concatenate(parts) for parts in batches])
        assert (found - found[:, :1] == np.arange(LENGTH)).all()
        return found[:, 0]

    whole = starts(iterators(), 15)
    epochs = whole.reshape(3, offsets)
    assert (np.sort(epochs) == np.arange(offsets)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 3
    interrupted, resumed = iterators(), iterators()
    if taken:
        starts(interrupted, taken)
    for one, other in zip(interrupted, resumed, strict=True):
        other.set_state(json.loads(json.dumps(one.get_state())))
    assert starts(resumed, 2).tolist() == whole[6 * taken : 6 * taken + 12].tolist()


def test_neighbours_in_a_long_epoch_are_strangers():
    """Of 4e9 windows; with few rounds of the permutation their places correlate by 0.7."""

    class Starts:
        def __len__(self):
            return 4_000_000_000

        def take(self, index):
            return batch_of(index)

    for seed in range(3):
        iterator = train_iterator(Starts(), batch_size=1024, seed=seed, rounds=MANY_ROUNDS)
        places = next(iterator).tokens.astype(float)
        iterator.close()
        correlation = np.corrcoef(places[:-1], places[1:])[0, 1]
        assert abs(correlation) < 5 / 32  # standard errors


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_restored_iterator_continues(taken):
    def fresh(**arguments):
        return train_iterator(grid(30), batch_size=8, seed=3, **arguments)

    iterator = fresh()
    take(iterator, taken)
    state = json.loads(json.dumps(iterator.get_state()))
    assert state == {"sequences": 8 * taken}
    expected = take(iterator, 9)
    used = fresh()
    take(used, 3)
    for other in (fresh(), used):
        other.set_state(state)
        assert other.get_state() == state
        assert (take(other, 9) == expected).all()
    second = fresh(rows=np.array([1, 2, 5]))
    second.set_state(state)
    assert (take(second, 9) == expected[:, [1, 2, 5]]).all()
    assert second.get_state() == {"sequences": 8 * (taken + 9)}


def test_another_batch_size_continues_at_the_same_sequence():
    small = train_iterator(grid(30), batch_size=4, seed=3)
    take(small, 6)
    large = train_iterator(grid(30), batch_size=8, seed=3)
    large.set_state(small.get_state())
    assert (take(large, 5).ravel() == take(small, 10).ravel()).all()


def test_a_corpus_smaller_than_the_batch():
    iterator = train_iterator(grid(3), batch_size=8, seed=0)
    rows = take(iterator, 3).reshape(8, 3)
    assert (np.sort(rows) == np.arange(3)).all()


def test_documents_of_a_row_are_numbered():
    tokens = np.array([7, 0, 7, 7, 0, 7, 7, 0])
    batch = next(train_iterator(Windows(tokens, 8, 8, eot_id=0), batch_size=2, seed=0))
    assert batch.context["segments"].tolist() == [[0, 0, 1, 1, 1, 2, 2, 2]] * 2
    (batch,) = eval_batches(Windows(tokens, 8, 8, eot_id=0), batch_size=1)
    assert batch.context["segments"].tolist() == [[0, 0, 1, 1, 1, 2, 2, 2]]


def test_too_short_to_train_on():
    with pytest.raises(UserError, match="has 3 tokens, fewer than one sequence of 4"):
        train_iterator(grid(0, 3), batch_size=1, seed=0)


def test_closing_ends_the_threads():
    before = set(threading.enumerate())
    iterator = train_iterator(grid(9), batch_size=2, seed=0)
    next(iterator)
    assert set(threading.enumerate()) - before
    iterator.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("sequences", [0, 1, 3, 4, 5, 8])
@pytest.mark.parametrize("remainder", [0, 1, 3])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_evaluation_covers_everything_once(sequences, remainder, processes):
    tokens = stream(sequences, remainder)
    if not len(tokens):
        return
    shares = [
        list(
            eval_batches(
                Windows(tokens, LENGTH, LENGTH),
                batch_size=4,
                rows=np.arange(4).reshape(processes, -1)[index],
            )
        )
        for index in range(processes)
    ]
    seen = []
    for parts in zip(*shares, strict=True):
        rows = np.concatenate([part.tokens for part in parts])
        counted = np.concatenate([part.loss_mask for part in parts])
        assert len(rows) == 4 and rows.dtype == np.int32 and counted.dtype == bool
        assert (counted == counted[:, :1]).all() and (rows[~counted] == 0).all()
        seen.append(rows[counted])
    assert np.concatenate(seen).tolist() == tokens.tolist()
    last = shares[0][-1]
    assert last.tokens.shape == (4 // processes, remainder or LENGTH)
    real = last.loss_mask.any(axis=1).tolist()
    assert not remainder or real == [True] + [False] * (4 // processes - 1)


@pytest.mark.parametrize("sequences, remainder", [(0, 3), (1, 0), (1, 1), (3, 3), (5, 2)])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_windows_that_slide_count_everything_once(sequences, remainder, stride):
    """What counts comes once and in order, after the tokens that precede it in the text."""
    tokens, seen = stream(sequences, remainder), []
    for batch in eval_batches(Windows(tokens, LENGTH, stride, True), batch_size=3):
        assert batch.loss_mask.shape == batch.tokens.shape
        real = batch.loss_mask.any(axis=1)
        assert real[0] and (np.diff(real.astype(int)) <= 0).all()  # padding rows come last
        for row, counted in zip(batch.tokens[real], batch.loss_mask[real], strict=True):
            before = int((~counted).sum())
            assert counted[before:].all() and before in (0, LENGTH - stride)
            start = len(seen) - before
            assert row.tolist() == tokens[start : start + len(row)].tolist()
            assert before == LENGTH - stride or start == 0
            seen += row[before:].tolist()
    assert seen == tokens.tolist()


@pytest.mark.parametrize("step", [0, LENGTH + 1])
def test_windows_leave_out_no_text(step):
    said = f"stride={step} must lie between 1 and {LENGTH}, the number of tokens of a sequence"
    with pytest.raises(UserError, match=said):
        Windows(stream(5), LENGTH, step)


def test_nothing_to_evaluate():
    with pytest.raises(UserError, match="empty"):
        next(eval_batches(grid(0), batch_size=1))


def test_the_size_is_what_evaluation_goes_through():
    tokens = stream(5, 3)
    assert Windows(tokens, LENGTH, LENGTH).size == (5, 23)
    batches = eval_batches(Windows(tokens, LENGTH, LENGTH), batch_size=2)
    counted = [int(b.loss_mask.sum()) for b in batches]
    assert counted == [8, 8, 4, 3] and sum(counted) == 23


def test_batches_own_their_memory():
    """A consumer may keep or change a batch without changing the stream or another batch."""
    tokens = stream(6)
    iterator = train_iterator(Windows(tokens, LENGTH, LENGTH), batch_size=3, seed=0)
    kept = [next(iterator).tokens for _ in range(2)]
    others = (b.tokens for b in eval_batches(Windows(tokens, 4, 4), batch_size=2))
    for batch in itertools.chain(kept, others):
        assert not np.shares_memory(batch, tokens)
