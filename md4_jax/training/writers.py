"""Units, accumulators, writers and the progress line. The one place where nats are converted."""

import json
import math
import re
import sys
import time
from collections.abc import Mapping

import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm

from md4_jax.runtime.paths import Place, append, is_remote, replace

# Seconds between two writes of a log in object storage, where each writes the whole file.
OBJECT_PAUSE = 60.0


class Writer:
    """metrics.jsonl (a JSON object a line) and TensorBoard events of a run.

    Rows after `resume_step` are dropped at the start: they belong to steps that
    are about to be run again from the checkpoint and will come out the same.
    """

    def __init__(self, workdir: Place, *, resume_step: int):
        self._path = workdir / "metrics.jsonl"
        self._pause = OBJECT_PAUSE if is_remote(workdir) else 0.0
        self._pending: list[str] = []
        self._flushed = time.monotonic()
        self._names: dict[int, set[str]] = {}
        if self._path.exists():
            rows = [row for row in read_rows(self._path) if row["step"] <= resume_step]
            for row in rows:
                self._names.setdefault(row["step"], set()).update(row)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            replace(self._path, text)
        self._events = SummaryWriter(
            str(workdir / "tensorboard"), purge_step=resume_step + 1 if resume_step else None
        )

    def has(self, step: int, prefix: str) -> bool:
        """Whether a number of that step is written whose name begins so."""
        return any(name.startswith(prefix) for name in self._names.get(step, ()))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._names.setdefault(step, set()).update(numbers)
        row = {"step": step} | {name: _plain(value) for name, value in numbers.items()}
        self._pending.append(json.dumps(row) + "\n")
        for name, value in numbers.items():
            if isinstance(value, (int, float, np.number)) and np.isfinite(value):
                self._events.add_scalar(name, value, step)
        if time.monotonic() - self._flushed >= self._pause:
            self.flush()

    def flush(self) -> None:
        """Writes what waits; before a checkpoint, whose rows a resumed run does not make again."""
        if self._pending:
            append(self._path, "".join(self._pending))
            self._events.flush()
        self._pending, self._flushed = [], time.monotonic()

    def close(self) -> None:
        self.flush()
        self._events.close()


class NullWriter:
    """Writer of all processes but the first: writes nothing, but remembers what it was given."""

    def __init__(self):
        self._names: set[tuple[int, str]] = set()

    def has(self, step: int, prefix: str) -> bool:
        return any(at == step and name.startswith(prefix) for at, name in self._names)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._names.update((step, name) for name in numbers)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def read_rows(path: Place) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that a crash cut short is left out.

    Numbers that were written as eval_NAME, when there was one evaluator, are validation/NAME.
    """
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows.append({re.sub("^eval_", "validation/", name): value for name, value in row.items()})
    return rows


def _plain(value):
    """A JSON value; float32 keeps its shortest exact decimal, non-finite becomes a string."""
    if isinstance(value, (np.floating, float)) and not math.isfinite(value):
        return str(float(value))
    return value.item() if isinstance(value, np.generic) else value


class Progress:
    """A live line on a terminal, plain lines when piped, silence on other processes."""

    def __init__(self, total: int, done: int, *, enabled: bool, stream=None):
        self._stream = stream or sys.stderr
        self._live = enabled and self._stream.isatty()
        self._plain = enabled and not self._live
        self._total = total
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not self._live,
            file=self._stream,
            dynamic_ncols=True,
            smoothing=0.05,
            bar_format="step {n_fmt}/{total_fmt} |{bar}| {percentage:3.0f}%{postfix} "
            "[{elapsed} gone, {remaining} left]",
        )

    def advance(self) -> None:
        self._bar.update(1)

    def show(self, step: int, text: str, steps_per_second: float) -> None:
        """`text` beside the bar, or as a line with the time left."""
        if self._plain:
            seconds = int((self._total - step) / max(steps_per_second, 1e-9))
            left = f"{seconds // 60}:{seconds % 60:02d} left"
            print(f"step {step}/{self._total}  {text}  {left}", file=self._stream, flush=True)
        self._bar.set_postfix_str(text, refresh=False)

    def say(self, text: str) -> None:
        """A line of its own that does not break the bar."""
        if self._live:
            self._bar.write(text, file=self._stream)
        elif self._plain:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._bar.close()
