"""Runs the program in this process, several times or until it is killed in a chosen place.

driver.py runs ARGUMENTS [-- ARGUMENTS ...]
    each run in turn; every save also notes in WORKDIR/shards.json how arrays are split
driver.py kill-in-evaluation STEP ARGUMENTS
driver.py kill-in-save STEP ARGUMENTS
    SIGKILL in the middle of the evaluation or of the save of that step
driver.py signal-in-evaluation STEP ARGUMENTS
    SIGTERM in the evaluation of that step, which then takes a minute
driver.py signal-in-batch BATCH ARGUMENTS
    SIGTERM to process 1 in this batch of an evaluation, which must be the last one
driver.py wait-in-evaluation STEP ARGUMENTS
    the final evaluation, of that step, takes a minute
"""

import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax

from md4_jax import main
from md4_jax.evals.likelihood import Estimator
from md4_jax.evals.suite import Suite
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.log import TrainLog


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note_shards() -> None:
    save = Checkpoints.save

    def noting(self, step, state, host):
        found = {
            jax.tree_util.keystr(path, simple=True, separator="/"): {
                "shape": leaf.shape,
                "shard": leaf.addressable_shards[0].data.shape,
                "devices": len(leaf.addressable_shards),
            }
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        }
        (self.directory.parent / "shards.json").write_text(json.dumps(found))
        save(self, step, state, host)

    Checkpoints.save = noting


def kill_in_evaluation(fatal: int) -> None:
    """The result is computed and nothing of it is written; what was being saved is on disk."""
    save, evaluation, used = Checkpoints.save, TrainLog.evaluation, []

    def noting(self, step, state, host):
        used.append(self)
        save(self, step, state, host)

    def dying(self, step, name, result, **settings):
        if step == fatal:
            used[-1].wait()
            die()
        evaluation(self, step, name, result, **settings)

    Checkpoints.save, TrainLog.evaluation = noting, dying


def kill_in_save(fatal: int) -> None:
    """The temporary directory of the checkpoint is there and its final name is not."""
    save = Checkpoints.save

    def watch(directory: Path) -> None:
        while not any(directory.glob(f"{fatal}.*")):
            time.sleep(0.0005)
        die()

    def watched(self, step, state, host):
        if step == fatal:
            threading.Thread(target=watch, args=(self.directory,), daemon=True).start()
        save(self, step, state, host)

    Checkpoints.save = watched


def signal_in_evaluation(fatal: int) -> None:
    run = Suite.run

    def signalled(self, names, params, step, *others):
        if step == fatal:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        yield from run(self, names, params, step, *others)

    Suite.run = signalled


def signal_in_batch(fatal: int) -> None:
    nats = Estimator.nats

    def signalled(self, params, rows, index):
        assert index <= fatal, f"batch {index} is computed"
        if index == fatal and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return nats(self, params, rows, index)

    Estimator.nats = signalled


def wait_in_evaluation(step: int) -> None:
    # Ignored by what a shell has started in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    evaluate = Estimator.__call__

    def waiting(self, params, batches, limit=0):
        if not limit:  # those while training have one
            time.sleep(60)
        return evaluate(self, params, batches, limit)

    Estimator.__call__ = waiting


HINDRANCES = {
    "kill-in-evaluation": kill_in_evaluation,
    "kill-in-save": kill_in_save,
    "signal-in-evaluation": signal_in_evaluation,
    "signal-in-batch": signal_in_batch,
    "wait-in-evaluation": wait_in_evaluation,
}

if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "runs":
        note_shards()
        groups = itertools.groupby(rest, lambda word: word == "--")
        for arguments in [list(words) for is_dashes, words in groups if not is_dashes]:
            assert main.run(arguments) == 0
    else:
        HINDRANCES[what](int(rest[0]))
        sys.argv[1:] = rest[1:]
        main.main()
