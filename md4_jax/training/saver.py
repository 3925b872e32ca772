"""Saving of a run: checkpoints with the positions of the data and the log."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from md4_jax.training import base
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.log import TrainLog
from md4_jax.training.notices import Notices
from md4_jax.training.step import TrainState


class Saver(NamedTuple):
    """Saves checkpoints with everything needed for resuming, and determines the best one.

    figure: name of the logged metric that compares checkpoints, '' for none.
    """

    checkpoints: Checkpoints
    log: TrainLog
    data: Any
    text: dict[str, Any]
    notices: Notices
    figure: str

    def save(self, step: int, state: TrainState) -> None:
        """Starts to save in the background."""
        self.log.flush()
        self.log.write_down()
        position = {"data": self.data.get_state(), "log": self.log.state(), "text": self.text}
        position |= base.mark(self.checkpoints.directory.parent)
        position["elapsed"] = self.notices.elapsed
        self.notices.saved()
        # Frozen parameters are in the base of the run.
        self.checkpoints.save(step, state._replace(frozen=()), position)

    def best(self, steps: Iterable[int]) -> int | None:
        """Returns the best of these steps; None if none of them was evaluated."""
        return self.log.best(self.figure, steps) if self.figure else None

    def save_if_best(self, step: int, state: TrainState) -> None:
        """Saves an evaluated step if it is the best so far and not saved yet."""
        steps = self.checkpoints.steps()
        if step not in steps and self.best([*steps, step]) == step:
            self.save(step, state)

    def finish(self, step: int, state: TrainState) -> None:
        """Waits until all saves are on disk, and deletes surplus checkpoints."""
        if self.checkpoints.wait():
            self.save(step, state)
            self.checkpoints.wait()
