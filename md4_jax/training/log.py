"""Log of a training run: means over windows of steps, as rows of a file and as a printed line."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from md4_jax.data import units
from md4_jax.evals.context import numbers_of
from md4_jax.evals.metrics import bits
from md4_jax.protocols import Array, UserError
from md4_jax.protocols.phrases import amount, plus_minus
from md4_jax.runtime.sharding import max_over_processes
from md4_jax.training.keeping import best_of
from md4_jax.training.writers import Progress, Writer

COUNTERS = ("skipped", "skipped_in_a_row")


class LogSettings(NamedTuple):
    """Settings of a log.

    every: steps of a window. batch_shape: (sequences, tokens). is_bound: whether the training loss
    is a bound. learning_rate: step -> rate. held_out: evaluator with the bound to show beside the
    training bound. unit: name of a token in the lines, the domain's `unit`.
    """

    every: int
    batch_shape: tuple[int, int]
    is_bound: bool
    learning_rate: Callable[[int], Array]
    max_skipped_in_a_row: int
    held_out: str = ""
    unit: str = "token"


class TrainLog:
    """Log of the means of metrics over windows of `every` steps.

    Metrics of step n - 1 are read while step n runs, to keep the device busy. `state()` is part of
    a checkpoint, so a restart does not change the means of a window. The standard error of the loss
    is that of a mean over steps, so it includes the progress within a window; for one step it is
    NaN.
    """

    def __init__(self, writer: Writer, progress: Progress, settings: LogSettings):
        self._writer, self._progress, self._settings = writer, progress, settings
        self._held_out_text = ""
        self._pending: tuple[int, dict] | None = None
        self._sums: dict[str, float] = {}
        self._squares, self._count = 0.0, 0
        self._clock: tuple[float, int] | None = None

    def state(self) -> dict:
        """Returns the open window as JSON; call `flush` first."""
        # A copy: it is saved while training continues.
        return {"sums": dict(self._sums), "squares": self._squares, "count": self._count}

    def set_state(self, state: dict) -> None:
        """Continues a window; its error is unknown for old checkpoints, which lack the squares."""
        self._sums, self._count = dict(state["sums"]), state["count"]
        self._squares = state.get("squares", math.nan if self._count else 0.0)

    def add(self, step: int, metrics: dict[str, Array]) -> None:
        """Adds a step's metrics, still on the device, and reads those of the previous step."""
        self.flush()
        if self._clock is None:
            self._clock = (time.monotonic(), step - 1)
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Reads pending metrics; UserError after too many non-finite steps in a row."""
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        host = jax.device_get(metrics)
        self._check_finite(step, int(host["skipped_in_a_row"]))
        if host["skipped_in_a_row"] == 0:
            for name in sorted(host.keys() - set(COUNTERS)):
                self._sums[name] = self._sums.get(name, 0.0) + float(host[name])
            self._squares += float(host["nats"]) ** 2
            self._count += 1
        if step % self._settings.every == 0:
            self._line(step, int(host["skipped"]))
            self._sums, self._squares, self._count = {}, 0.0, 0

    def _check_finite(self, step: int, streak: int) -> None:
        if streak == 1:
            self._progress.say(f"step {step} skipped: non-finite loss, gradient or update")
        if streak >= self._settings.max_skipped_in_a_row:
            raise UserError(
                f"{amount(streak, 'step')} in a row had a non-finite loss, gradient or update "
                f"(train.max_skipped_in_a_row={self._settings.max_skipped_in_a_row}). These steps "
                "did not change the parameters, and the last checkpoint is intact. Try a lower "
                "optim.learning_rate or a longer optim.warmup_steps. To do so in this run, add "
                "--back STEP (or best), which continues from an earlier checkpoint and skips the "
                "data used since then"
            )

    def _line(self, step: int, skipped: int) -> None:
        size, length = self._settings.batch_shape
        means = {name: total / max(1, self._count) for name, total in self._sums.items()}
        nats = means.pop("nats", math.nan)
        loss, error = bits(nats) / length, bits(self._error(nats)) / length
        now = time.monotonic()
        rate = (step - self._clock[1]) / max(now - self._clock[0], 1e-9)
        self._clock = (now, step)
        # A training-only loss has another name, here and in the picture.
        name = "train_bits_per_token" if self._settings.is_bound else "train_loss_bits"
        numbers = {
            name: loss,
            f"{name}_se": error,
            **means,
            "learning_rate": float(self._settings.learning_rate(step - 1)),
            "skipped": skipped,
            "tokens_per_second": rate * size * length,
        }
        self._writer.write(step, numbers)
        kind = "bound" if self._settings.is_bound else "training loss"
        unit = self._settings.unit
        rewarded = f"reward {means['reward']:.3f}, " if "reward" in means else ""
        rewarded += f"{means['clipped']:.0%} clipped, " if "clipped" in means else ""
        said = f"{kind} {loss:.3f}{plus_minus(error, '.3f')} bits/{unit}{self._held_out_text}"
        text = (
            f"{rewarded}{_of_classes(means) or said}, "
            f"{units.speed(unit, rate * size * length, length)}{_loads(means)}"
            + (f", {skipped} skipped" if skipped else "")
        )
        self._progress.show(step, text, rate)

    def _error(self, mean: float) -> float:
        """Returns the standard error of the mean nats of the window's steps."""
        if self._count < 2:
            return math.nan
        spread = self._squares - self._count * mean**2
        return math.sqrt(max(spread, 0.0) / (self._count - 1) / self._count)

    def missing(self, step: int, names: Iterable[str]) -> list[str]:
        """Returns the evaluators among `names` that have not been logged at this step."""
        # Only the process that writes knows.
        return [n for n in names if not max_over_processes(int(self._writer.has(step, f"{n}/")))]

    def best(self, figure: str, steps: Iterable[int]) -> int | None:
        """Returns the step with the lowest logged figure; None if no step has it."""
        found = best_of(self._writer.rows(), figure, set(steps))
        # Only the process that writes knows.
        return max_over_processes(found.step if found else 0) or None

    def write_down(self) -> None:
        """Writes pending rows to the file."""
        self._writer.flush()

    def say(self, text: str) -> None:
        """Prints a line above the progress line."""
        self._progress.say(text)

    def evaluation(self, step: int, name: str, result: Mapping[str, Any]) -> None:
        """Writes the metrics of an evaluator, each as 'NAME/key'.

        Later lines show the bound of the evaluator `held_out` beside the training bound, but not
        beside a training-only loss, which is not comparable.
        """
        numbers = numbers_of(result)
        self._writer.write(step, {f"{name}/{key}": value for key, value in numbers.items()})
        if "picture" in result:
            self._writer.picture(step, name, result["picture"])
        if "texts" in result:
            self._writer.text(step, name, result["texts"])
        if name == self._settings.held_out and self._settings.is_bound:
            value, error = result["bits_per_token"], result["bits_per_token_se"]
            self._held_out_text = f" (held out {value:.3f}{plus_minus(error, '.3f')})"
        self._clock = (time.monotonic(), step)


def _of_classes(means: Mapping[str, float]) -> str:
    """Formats the loss of a classifier, which is per sequence; '' for other losses."""
    if "accuracy" not in means:
        return ""
    nats, right = means["cross_entropy"], means["accuracy"]
    return f"cross-entropy of the class {nats:.3f} nats, accuracy {right:.1%}"


def _loads(means: Mapping[str, float]) -> str:
    """Formats the metrics of `loads.figures`, or nothing without experts."""
    if "expert_load" not in means:
        return ""
    return f", fullest expert {means['expert_load']:.2f}x, {means['experts_idle']:.0%} idle"
