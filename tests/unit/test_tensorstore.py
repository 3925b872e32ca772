"""Memory that TensorStore would keep at every save: Orbax does not ask it for that."""

import gc
import itertools
import json
import statistics
import sys
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest
import tensorstore as ts

from md4_jax.options import CheckpointOptions
from md4_jax.runtime import paths
from md4_jax.training import tensorstore
from md4_jax.training.checkpoint import Checkpoints


class State(NamedTuple):
    """A train state in miniature."""

    ema: Any
    step: Any


def blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.campaign
def test_memory_does_not_grow_with_the_saves(tmp_path):
    """Without the remedy four strings stay for each array, and as much again of the counters.

    A process whose threads and caches are young grows by some 100 for other reasons.
    """
    state = State({f"e{i}": jnp.arange(3.0) for i in range(120)}, jnp.int32(0))
    checkpoints, taken = Checkpoints(paths.place(tmp_path), CheckpointOptions(keep=9)), []
    for step in range(7):
        checkpoints.save(step, state, {})
        checkpoints.wait()
        taken.append(blocks())
    checkpoints.close()
    grown = [after - before for before, after in itertools.pairwise(taken[2:])]
    assert statistics.median(grown) < 250, grown


SPECS = [
    {"driver": "file", "path": "/a/b c/ü'\"/"},
    {"driver": "file", "path": "/a/", "file_io_locking": {"mode": "non_atomic"}},
    {"driver": "file", "path": "/a/"},
    {"driver": "gcs", "bucket": "one", "path": "a/"},
    {"driver": "gcs", "bucket": "two", "path": "a/"},
    {"driver": "memory"},
    {"driver": "ocdbt", "base": "file:///a/", "path": "b"},
    {"driver": "ocdbt", "base": "file:///c/", "path": "b"},
    "gs://one/b/",
]


@pytest.mark.parametrize("defaults", [False, True])
def test_specs_are_what_tensorstore_says(defaults):
    for spec in [ts.KvStore.Spec(spec) for spec in [*SPECS, *SPECS]]:
        found = tensorstore._to_json(spec, defaults)
        assert found == tensorstore._ask(spec, defaults)
        for value in found.values():
            if isinstance(value, dict):
                value.clear()  # the next one is another


def test_a_tensorstore_that_counts_right_is_left_alone(monkeypatch):
    def right(spec):
        return json.loads(json.dumps({"path": spec.path}))

    monkeypatch.setattr(ts.KvStore.Spec, "to_json", right)
    tensorstore.mend()
    assert ts.KvStore.Spec.to_json is right
