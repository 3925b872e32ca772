"""Units, accumulators, writers and the progress line. The one place where nats are converted."""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping

import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm

from md4_jax.paths import Place, append, is_remote, replace
from md4_jax.protocols import Array, UserError

BITS = 1.0 / math.log(2.0)
# Seconds between two writes of a log in object storage, where each writes the whole file.
OBJECT_PAUSE = 60.0


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """The `log` section: steps between two lines of metrics."""

    every: int = 100

    def __post_init__(self):
        if self.every < 1:
            raise UserError(f"log.every must be at least 1, not {self.every}")


def bits(nats: float) -> float:
    """nats -> bits."""
    return nats * BITS


class Likelihood:
    """A bound on -log p of a split: sums in float64 on the host, with its standard error.

    The estimate is the ratio (sum of nats) / (sum of tokens) over sequences, each
    sequence's nats being the mean of its draws. Its standard error is that of a
    ratio, sqrt(N / (N - 1) sum_i (nats_i - ratio tokens_i)^2) / sum_i tokens_i,
    which holds both the spread between sequences and the noise of the draws.
    The same nats over the bytes and over the words of the text are ratios of that kind too.
    """

    def __init__(self):
        self._nats: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._text: list[np.ndarray] = []

    def add(
        self, nats: Array, lengths: Array | int, weight: Array, *, text: Array | None = None
    ) -> None:
        """nats [draws, B] of sequences of lengths [B] or one; rows of weight 0 are padding.

        text [B, 2], the bytes and words that the tokens stand for, if they are known.
        """
        real = np.asarray(weight) > 0
        self._nats.append(np.asarray(nats, np.float64).mean(axis=0)[real])
        self._tokens.append(np.broadcast_to(np.asarray(lengths, np.float64), real.shape)[real])
        if text is not None:
            self._text.append(np.asarray(text, np.float64)[real])

    def result(self, *, characters: bool) -> dict[str, float]:
        """Named numbers with errors: per token, per character where tokens are characters,
        and per byte and word where the text is known and has any."""
        nats, tokens = np.concatenate(self._nats), np.concatenate(self._tokens)
        sizes = {"tokens": tokens}
        if self._text:
            sizes["bytes"], sizes["words"] = np.concatenate(self._text).T
        ratio, error = _ratio(nats, tokens)
        named = {
            "nats_per_token": (ratio, error),
            "bits_per_token": (bits(ratio), bits(error)),
            "perplexity": _perplexity(ratio, error),
        }
        if characters:
            named["bits_per_character"] = named["bits_per_token"]
        if self._text and sizes["bytes"].any():
            named["bits_per_byte"] = tuple(map(bits, _ratio(nats, sizes["bytes"])))
        if self._text and sizes["words"].any():
            named["word_perplexity"] = _perplexity(*_ratio(nats, sizes["words"]))
        out: dict[str, float] = {"sequences": len(nats)}
        out |= {name: int(size.sum()) for name, size in sizes.items()}
        for name, (value, its_error) in named.items():
            out[name], out[name + "_se"] = value, its_error
        return out


def _ratio(nats: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """(sum of nats) / (sum of sizes) over sequences, and its standard error."""
    ratio = nats.sum() / sizes.sum()
    spread = np.sum((nats - ratio * sizes) ** 2) * len(nats) / max(1, len(nats) - 1)
    return ratio, math.sqrt(spread) / sizes.sum() if len(nats) > 1 else math.nan


def _perplexity(nats: float, error: float) -> tuple[float, float]:
    """exp(nats), finite also for a hopeless model, and its standard error."""
    perplexity = math.exp(min(nats, 700.0))
    return perplexity, perplexity * error


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

    def has(self, step: int, name: str) -> bool:
        """Whether that number of that step is written."""
        return name in self._names.get(step, ())

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
    """What the other processes of a run write: nothing, but they remember."""

    def __init__(self):
        self._names: set[tuple[int, str]] = set()

    def has(self, step: int, name: str) -> bool:
        return (step, name) in self._names

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._names.update((step, name) for name in numbers)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def read_rows(path: Place) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that a crash cut short is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
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
