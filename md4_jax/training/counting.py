"""Filling of a network's count tables from the training text, before the first step."""

import itertools
import time

import jax
import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.experiment import Experiment, rows_of
from md4_jax.protocols import Batch, UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.sharding import max_over_processes, to_global
from md4_jax.training.step import TrainState

# Number of tokens of a counted batch.
AT_ONCE = 2**18


def filled(experiment: Experiment, corpus: Corpus, state: TrainState) -> tuple[TrainState, float]:
    """Returns (state with filled tables, seconds taken); 0 seconds if there are no tables.

    UserError if this took all of train.seconds.
    """
    tables, train = experiment.network.companion, experiment.train
    if tables is None:
        return state, 0.0
    began, length = time.monotonic(), experiment.data.length
    sequences = min(corpus.sizes(["train"])["train"].sequences, -(-tables.tokens // length))
    count = amount(sequences * length, "token", ",")
    _say(f"tables      counting {count} of the training text ...")
    text = (_all if tables.reads_all else _text)(experiment, corpus, sequences)
    count = tables.counter()
    found = state.ema["companion"]
    with jax.set_mesh(experiment.mesh):
        for table in range(len(tables.sizes)):
            # One at a time: Ctrl-C is handled in between, and devices that are threads of one
            # process cannot deadlock in the sums of different tables.
            found = jax.block_until_ready(count(found, text, table))
    found = {**found, "sequences": found["sequences"] + sequences}
    # Equal on all processes, since the learning rate may depend on it.
    seconds = max_over_processes(int(1000 * (time.monotonic() - began))) / 1000
    _say(f"tables      counted in {seconds:.1f} s")
    if 0 < train.seconds <= seconds:
        raise UserError(
            f"counting the training text took {seconds:.1f} seconds, which is all of "
            f"train.seconds={train.seconds:g}: raise train.seconds, or reduce "
            f"network.tables_tokens={tables.tokens} in another --workdir"
        )
    return state._replace(ema={**state.ema, "companion": found}), seconds


def _text(experiment: Experiment, corpus: Corpus, sequences: int) -> Batch:
    """Returns the first sequences of the training data in batches: global arrays [B, N, L]."""
    length, batch_size = experiment.data.length, experiment.train.batch_size
    at_once = min(AT_ONCE, sequences * length)
    rows = rows_of(experiment, batch_size * -(-at_once // (batch_size * length)))
    firsts = range(0, sequences, rows["batch_size"])
    batches = []
    for first, batch in zip(firsts, corpus.training_in_order(**rows), strict=False):
        asked = batch.loss_mask & (first + rows["rows"] < sequences)[:, None]
        batches.append(_readable(batch)._replace(loss_mask=asked))
    text = jax.tree.map(lambda *x: np.stack(x, axis=1), *batches)
    return to_global(text, experiment.mesh)


def _readable(batch: Batch) -> Batch:
    """Returns the parts of a batch that the tables read."""
    context = {name: x for name, x in batch.context.items() if name == "segments"}
    tokens = batch.tokens.astype(np.uint16 if batch.tokens.max() < 2**16 else np.int32)
    return Batch(tokens, batch.loss_mask, context)


def _all(experiment: Experiment, corpus: Corpus, sequences: int) -> Batch:
    """Returns the first sequences of the training data, [N, L], all of them in each process."""
    at_once = np.arange(max(1, AT_ONCE // experiment.data.length))
    batches = corpus.training_in_order(batch_size=len(at_once), rows=at_once)
    batches = list(itertools.islice(batches, -(-sequences // len(at_once))))
    return jax.tree.map(lambda *x: np.concatenate(x)[:sequences], *(_readable(b) for b in batches))


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)
