"""Counting of the training text into the tables beside a network, before the first step."""

import time

import jax

from md4_jax.data.corpus import Corpus
from md4_jax.experiment import Experiment, rows_of
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import max_over_processes, to_global
from md4_jax.training.step import TrainState

# Tokens that are counted at once: few enough that their rows in all tables take little memory.
AT_ONCE = 2**15


def filled(experiment: Experiment, corpus: Corpus, state: TrainState) -> tuple[TrainState, float]:
    """Returns (state with full tables, seconds that it took); 0 seconds if there are none.

    UserError if that took all of train.seconds.
    """
    tables, train = experiment.network.companion, experiment.train
    if tables is None:
        return state, 0.0
    began, length = time.monotonic(), experiment.data.length
    sequences = min(corpus.sizes(["train"])["train"].sequences, -(-tables.tokens // length))
    _say(f"tables      counting {sequences * length:,} tokens of the training text ...")
    learn = jax.jit(tables.learned, donate_argnums=0)
    found = state.ema["companion"]
    rows = rows_of(experiment, train.batch_size * max(1, AT_ONCE // (train.batch_size * length)))
    firsts = range(0, sequences, rows["batch_size"])
    with jax.set_mesh(experiment.mesh):
        for first, batch in zip(firsts, corpus.training_in_order(**rows), strict=False):
            is_asked = first + rows["rows"] < sequences
            batch = batch._replace(loss_mask=batch.loss_mask & is_asked[:, None])
            found = learn(found, to_global(batch, experiment.mesh))
    found = jax.block_until_ready({**found, "sequences": found["sequences"] + sequences})
    # The same on all processes, since the learning rate may follow it.
    seconds = max_over_processes(int(1000 * (time.monotonic() - began))) / 1000
    _say(f"tables      counted in {seconds:.1f} s")
    if 0 < train.seconds <= seconds:
        raise UserError(
            f"counting the training text took {seconds:.1f} seconds, which is all of "
            f"train.seconds={train.seconds:g}: raise that, or lower "
            f"network.tables_tokens={tables.tokens} in another --workdir"
        )
    return state._replace(ema={**state.ema, "companion": found}), seconds


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)
