"""What a run left in its directory, for comparing one that was disturbed with one that was not."""

import contextlib
import json
import random
import socket
from pathlib import Path

import jax
import numpy as np

from md4_jax.config import build
from md4_jax.config import load as config
from md4_jax.data.domains import stored_domain
from md4_jax.training import loop as train
from md4_jax.training.checkpoint import Checkpoints


def free_port() -> int:
    """A port for processes to meet at, below those that the system gives away by itself."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def arrays(workdir: Path) -> dict[str, np.ndarray]:
    """{path: array} of the newest checkpoint: all of the state but what is frozen."""
    asked = config.stored(workdir) | {"mesh": {"data": 1, "fsdp": 1, "tensor": 1}}
    experiment = build.experiment(asked, stored_domain(workdir, asked["data"]["length"]))
    checkpoints = Checkpoints(workdir / "checkpoints", experiment.checkpoint, read_only=True)
    state, _ = checkpoints.restore(train.abstract_state(experiment)._replace(frozen=()))
    checkpoints.close()
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def rows(workdir: Path) -> list[dict]:
    """The lines of metrics.jsonl, in order, without what depends on the clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in found]


def evaluated(workdir: Path, name: str = "test") -> dict:
    """The last result of an evaluator that a finished training has kept."""
    lines = (workdir / "evaluations.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["eval"] == name][-1]


def different_arrays(workdir: Path, reference: Path) -> list[str]:
    """The arrays of the newest checkpoints that are not equal bit for bit."""
    found, expected = arrays(workdir), arrays(reference)
    unequal = [k for k in found if k in expected and found[k].tobytes() != expected[k].tobytes()]
    return unequal + sorted(found.keys() ^ expected.keys())
