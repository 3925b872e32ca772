"""Writers of the metrics of a run, and its progress bar."""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from tqdm import tqdm

from md4_jax.generate import pictures
from md4_jax.runtime.paths import Place, append, is_remote, place, replace
from md4_jax.runtime.retries import patiently
from md4_jax.runtime.streams import printable
from md4_jax.training.trackers import Trackers

# Seconds between writes of a log in object storage, where each write copies the whole file.
OBJECT_PAUSE = 60.0


class Writer:
    """Writer of metrics.jsonl, with one JSON object per line, and of the run's trackers.

    Rows after `resume_step` are dropped at the start, because these steps will run again.
    trackers: opens the trackers; called last, so that none is open if the file cannot be written.
    retries: number of retries of a failed write, with growing pauses.
    """

    def __init__(
        self,
        workdir: Place,
        *,
        resume_step: int,
        trackers: Callable[[], Trackers] | None = None,
        retries: int = 0,
    ):
        self._path = workdir / "metrics.jsonl"
        self._retries = retries
        self._pause = OBJECT_PAUSE if is_remote(workdir) else 0.0
        self._pending: list[str] = []
        self._flushed = time.monotonic()
        self._rows: dict[int, dict[str, Any]] = {}
        if self._path.exists():
            rows = [row for row in read_rows(self._path) if row["step"] <= resume_step]
            for row in rows:
                self._rows.setdefault(row["step"], {}).update(row)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            patiently(lambda: replace(self._path, text), retries)
        self._trackers = None if trackers is None else trackers()

    def has(self, step: int, prefix: str) -> bool:
        """Returns whether a metric with this prefix has been written for the step."""
        return any(name.startswith(prefix) for name in self._rows.get(step, ()))

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Returns the written rows, one per step, also those of earlier processes of the run."""
        return self._rows.values()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        plain = {name: _plain(value) for name, value in numbers.items()}
        row = {"step": step, **plain}
        self._rows.setdefault(step, {}).update(row)
        self._pending.append(json.dumps(row) + "\n")
        finite = {tag(name): v for name, v in plain.items() if not isinstance(v, str)}
        self._tell("write", step, finite)
        if time.monotonic() - self._flushed >= self._pause:
            self.flush()

    def picture(self, step: int, name: str, file: str) -> None:
        """Adds a PNG file to the trackers."""
        self._tell("picture", step, name, pictures.read(place(file)))

    def text(self, step: int, name: str, file: str) -> None:
        """Adds a text file to the trackers."""
        self._tell("text", step, name, place(file).read_text(encoding="utf-8"))

    def flush(self) -> None:
        """Writes pending rows. Call it before a save, since a resumed run does not rewrite them."""
        if self._pending:
            patiently(lambda: append(self._path, "".join(self._pending)), self._retries)
        self._tell("flush")  # also what belongs to rows that are written
        self._pending, self._flushed = [], time.monotonic()

    def close(self) -> None:
        self.flush()
        self._tell("close")

    def _tell(self, method: str, *arguments: Any) -> None:
        if self._trackers is not None:
            self._trackers.tell(method, *arguments)


class NullWriter:
    """Writer of all processes except the first: writes nothing, but remembers its rows."""

    def __init__(self):
        self._names: set[tuple[int, str]] = set()

    def has(self, step: int, prefix: str) -> bool:
        return any(at == step and name.startswith(prefix) for at, name in self._names)

    def rows(self) -> Iterable[Mapping[str, Any]]:
        return ()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._names.update((step, name) for name in numbers)

    def picture(self, step: int, name: str, file: str) -> None:
        pass

    def text(self, step: int, name: str, file: str) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def read_rows(path: Place) -> list[dict]:
    """Reads the rows of a metrics.jsonl, without a last line truncated by a crash.

    Skips lines that are not rows. Metrics that old runs named eval_NAME become validation/NAME;
    current names eval_LONG/NAME belong to an evaluator.
    """
    return [
        {re.sub(r"^eval_(?=[^/]*$)", "validation/", name): value for name, value in row.items()}
        for row in objects(path)
        if type(row.get("step")) is int
    ]


def objects(path: Place) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file, one per line, skipping other lines."""
    for line in path.read_bytes().decode(errors="replace").splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def tag(name: str) -> str:
    """Returns the name of a metric in trackers: evaluator or 'train', a slash, and its key."""
    return name if "/" in name else f"train/{name.removeprefix('train_')}"


def _plain(value):
    """Converts to a JSON value; numbers that are not finite become strings."""
    if isinstance(value, (np.floating, float)) and not math.isfinite(value):
        return str(float(value))
    return value.item() if isinstance(value, np.generic) else value


class Progress:
    """Progress bar on a terminal, plain lines if piped, nothing in other processes.

    budget: returns the remaining seconds of the time budget; infinity if there is none.
    """

    def __init__(
        self,
        total: int,
        done: int,
        *,
        enabled: bool,
        stream=None,
        budget: Callable[[], float] = lambda: math.inf,
    ):
        self._stream = stream or sys.stderr
        self._live = enabled and self._stream.isatty()
        self._plain = enabled and not self._live
        self._total, self._budget = total, budget
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not self._live,
            file=self._stream,
            dynamic_ncols=True,
            smoothing=0.05,
            bar_format="step {n_fmt}/{total_fmt} |{bar}| {percentage:3.0f}%{postfix} "
            "[{elapsed} gone]",
        )

    def advance(self) -> None:
        self._bar.update(1)

    def show(self, step: int, text: str, steps_per_second: float) -> None:
        """Shows `text` and the remaining time beside the bar, or as a line."""
        seconds = min((self._total - step) / max(steps_per_second, 1e-9), self._budget())
        left = f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"
        if self._plain:
            print(f"step {step}/{self._total}  {text}  {left}", file=self._stream, flush=True)
        self._bar.set_postfix_str(f"{left}, {text}", refresh=False)  # the terminal cuts the end off

    def say(self, text: str) -> None:
        """Prints a separate line without disturbing the bar."""
        text = printable(text)
        if self._live:
            self._bar.write(text, file=self._stream)
        elif self._plain:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._bar.close()
