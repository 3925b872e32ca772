"""Trackers: programs that display the metrics and pictures of a run during training."""

import contextlib
import html
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from md4_jax.options.parts import words
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, is_remote, replace

WANDB_FILE = "wandb.json"
# Seconds for which the end of a run waits for W&B's upload; the data is also on the disk.
PATIENCE = 60.0


class Tracked(NamedTuple):
    """Run to track.

    step  the step from which it resumes; 0: a new run
    """

    workdir: Place
    config: Mapping[str, Any]
    step: int


class TensorBoard:
    """Events in the folder `tensorboard` of the run directory."""

    package = "tensorboardX"

    def __init__(self, run: Tracked):
        from md4_jax.training.tensorboard import Events  # takes a fifth of a second

        first = run.step + 1 if run.step else None  # later events are rewritten
        self._events = Events(str(run.workdir / "tensorboard"), purge_step=first)
        self._events.add_text("config", json.dumps(run.config, indent=2), run.step)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step)

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._events.add_image(name, pixels, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._events.add_text(name, text, step)

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class WandB:
    """Run at Weights & Biases. wandb.json stores its id, so that a resumed run continues it.

    The step is a metric of each row, because W&B's own step cannot decrease, and a resumed run
    rewrites the steps after its checkpoint.
    """

    package = "wandb"

    def __init__(self, run: Tracked):
        import wandb

        self._image, self._html = wandb.Image, wandb.Html
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "md4_jax"),
            name=run.workdir.name,
            id=_kept_id(run.workdir),
            resume="allow",
            config=dict(run.config),
            allow_val_change=True,
            settings=wandb.Settings(finish_timeout=PATIENCE),
            dir=None if is_remote(run.workdir) else str(run.workdir),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._run.log({"step": step, name: self._image(pixels)})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: self._html(f"<pre>{html.escape(text)}</pre>")})

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB}


def check_installed(names: str) -> None:
    """Raises UserError for a tracker in 'a,b' if its package is not installed."""
    for name in words(names):
        package = TRACKERS[name].package
        spec = importlib.util.find_spec(package)
        # A folder of that name in the working directory, as wandb creates, has no origin.
        if spec is None or spec.origin is None:
            raise UserError(
                f"log.trackers={names} needs a package: pip install {package}, or remove {name}"
            )


def _kept_id(workdir: Place) -> str:
    """Returns the id in wandb.json of a run directory, creating it at the first call."""
    file = workdir / WANDB_FILE
    if not file.exists():
        replace(file, json.dumps({"id": uuid.uuid4().hex}) + "\n")
    return json.loads(file.read_text())["id"]


class Trackers:
    """All trackers of a run. A tracker that fails is disabled, and training continues."""

    def __init__(self, names: list[str], run: Tracked, say: Callable[[str], None]):
        self._say = say
        self._open: dict[str, Any] = {}
        for name in names:
            self._guarded(name, self._start, name, run)

    def tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of each tracker."""
        for name, tracker in list(self._open.items()):
            self._guarded(name, getattr(tracker, method), *arguments)

    def _start(self, name: str, run: Tracked) -> None:
        self._open[name] = TRACKERS[name](run)

    def _guarded(self, name: str, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # whatever a network or a service may do
            failed = self._open.pop(name, None)
            with contextlib.suppress(Exception):  # closing may have been the call that failed
                failed and failed.close()
            self._say(
                f"warning: {name} of log.trackers failed and receives no more numbers: "
                f"{type(error).__name__}: {error}"
            )
