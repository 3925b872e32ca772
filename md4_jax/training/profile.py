"""Traces of some steps with JAX's profiler."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from md4_jax.runtime.paths import Place


class Profile:
    """Trace of the steps first to last, written to a directory that may be in object storage.

    steps: (first, last), or () for none. A run that resumes or ends between them traces only its
    own steps. If tracing fails, it is abandoned with a warning.
    """

    def __init__(self, steps: Sequence[int], directory: Place, say: Callable[[str], None]):
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._directory, self._say = directory, say
        self._traced: list[int] = []
        self._files: tempfile.TemporaryDirectory | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Names a step in the trace; starts the trace at the first one."""
        if number not in self._steps:
            yield
            return
        if not self._traced:
            with self._guarded():
                self._files = tempfile.TemporaryDirectory()
                jax.profiler.start_trace(self._files.name)
        self._traced.append(number)
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield

    def after_step(self, number: int, state: Any) -> None:
        """Ends the trace after the last step, once the devices have computed its state."""
        if self._files is not None and number + 1 not in self._steps:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Ends and writes the trace if it is still running."""
        if self._files is None:
            return
        with self._guarded():
            jax.profiler.stop_trace()
            root = Path(self._files.name)
            for file in sorted(path for path in root.rglob("*") if path.is_file()):
                target = self._directory / str(file.relative_to(root))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
            first, last = self._traced[0], self._traced[-1]
            self._say(f"profile of steps {first} to {last}: {self._directory}")
        self._end()

    def _end(self) -> None:
        if self._files is not None:
            self._files.cleanup()
        self._files = None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the profiler or the disk may do
            self._end()
            self._say(f"warning: log.profile failed: {type(error).__name__}: {error}")
