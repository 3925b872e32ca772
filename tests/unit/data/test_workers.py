"""Processes that encode texts: what is left undone when nobody waits for it."""

import time

import numpy as np

from md4_jax.data.workers import Pool


def test_batches_that_have_not_begun_are_left_out_when_the_reader_stops(monkeypatch):
    begun = []

    def ask(self, texts):
        begun.append(texts)
        time.sleep(0.02)
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
    time.sleep(0.1)
    assert len(begun) == after
