"""Processes that encode texts: what is left undone when nobody waits for it."""

import io
import time
from types import SimpleNamespace

import numpy as np

from md4_jax.data import workers
from md4_jax.data.workers import Pool


def test_batches_that_have_not_begun_are_left_out_when_the_reader_stops(monkeypatch):
    begun = []

    def ask(self, texts):
        begun.append(texts)
        # Long enough that a slow machine comes to `close` before the third batch is done.
        time.sleep(0 if len(begun) == 1 else 0.5)
        return np.zeros(1, int), np.ones(1, int)

    monkeypatch.setattr(Pool, "_ask", ask)
    pool = Pool(None, np.zeros(0, int), 0)
    pool._processes = [None] * 3  # whose turns are threads of `ask`
    found = pool.map(range(100), lambda number: [str(number)])
    assert next(found)[0] == 0
    found.close()
    after = len(begun)
    # Three batches are in work beside the ones that are done; six more were waiting.
    assert after < 7
    time.sleep(0.7)
    assert len(begun) == after


def test_all_processes_start_before_the_first_one_is_told_its_vocabulary(monkeypatch):
    """The vocabulary does not fit into a pipe, so that telling waits until its process reads."""
    events = []

    class Pipe(io.BytesIO):
        def flush(self):
            events.append("told")

    def started(*arguments, **options):
        events.append("started")
        return SimpleNamespace(stdin=Pipe())

    monkeypatch.setattr(workers.subprocess, "Popen", started)
    Pool(None, np.zeros(0, int), 3)
    assert events == ["started"] * 3 + ["told"] * 3
