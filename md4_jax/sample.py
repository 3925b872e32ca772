"""Parameters -> samples: token arrays, text on the screen and files in the run directory."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from md4_jax.compiling import jit
from md4_jax.paths import Place
from md4_jax.prompts import Template
from md4_jax.protocols import Array, Denoiser, Network, Params, SamplerStep, UserError
from md4_jax.sharding import batch_sharding, batch_shards, local_rows, to_global, to_host


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """The `sample` section, besides the sampler's name, its arguments, transforms and prompts.

    num         how many sequences, of each template
    steps       reverse steps: T of a grid that has a name
    grid        cosine, uniform, log_linear, or a list of times that falls from 1.0 to 0.0
    length      tokens per sequence; 0: as in training
    block       tokens that are sampled together, given those before them; 0: objective.block where
                that is trained, else all of a text
    memory      tokens of earlier blocks that a block sees; 0: as in training
    cached      whether their keys and values are kept, or computed again for each block
    stop        what ends a text before its length: '' nothing, 'end_of_text', with blocks
    min_entropy a text ends too where the symbols of its last `memory` tokens have an entropy below
                this, in nats: where it repeats itself. 0: never. With blocks
    stride      new tokens of each window of a text longer than in training; 0: no windows, the
                network sees all of it at once
    batch_size  sequences sampled at once
    seed        sample i depends on the seed and i alone
    trace       pictures of how the first sample came about
    judge       whose bound on -log p of the samples is reported: '' for nobody's, 'self', or
                the directory of another run with the same tokenizer
    """

    num: int = 4
    steps: int = 256
    grid: str | tuple[float, ...] = "cosine"
    length: int = 0
    stride: int = 0
    block: int = 0
    memory: int = 0
    cached: bool = True
    stop: str = ""
    min_entropy: float = 0.0
    batch_size: int = 16
    seed: int = 0
    trace: bool = False
    judge: str = ""

    def __post_init__(self):
        for name in ("num", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"sample.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("length", "stride", "block", "memory", "min_entropy"):
            if getattr(self, name) < 0:
                raise UserError(f"sample.{name} must not be negative, not {getattr(self, name)}")
        if self.stop not in ("", "end_of_text"):
            raise UserError(f"sample.stop must be '' or 'end_of_text', not {self.stop!r}")


class Samples(NamedTuple):
    """What `draw_samples` returns; frames are of the first sequence, None without a trace.

    tokens       int32 [N, L]
    given        bool [N, L]
    lengths      int64 [N], tokens of each until it ended; what follows means nothing
    evaluations  int64 [N], network evaluations that each sequence used
    seconds      of the compiled programs, their compilation excluded
    frames       (z, sure), each [W, F, L]: after each step of each of W windows; z is -1 where
                 no window has come to
    """

    tokens: np.ndarray
    given: np.ndarray
    lengths: np.ndarray
    evaluations: np.ndarray
    seconds: float
    frames: tuple[np.ndarray, np.ndarray] | None


def make_sampler(
    network: Network, loop: Callable, grid: np.ndarray, mesh: Mesh, *, trace: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A compiled (params, step, keys [B], tokens [B, L], given [B, L]) -> (Chain, frames)."""

    def run(params: Params, step: SamplerStep, keys: Array, tokens: Array, given: Array):
        denoiser: Denoiser = network.bind(params["network"])
        keys = jax.lax.with_sharding_constraint(keys, batch_sharding(mesh))
        return loop(
            denoiser, params["process"], step,
            grid=grid, keys=keys, fixed=(tokens, given), trace=trace,
        )  # fmt: skip

    return jit(run, mesh)


def draw_samples(
    sampler: Callable,
    params: Params,
    step: SamplerStep,
    options: SampleOptions,
    templates: Sequence[Template],
    *,
    mesh: Mesh,
    window: int,
) -> Samples:
    """`options.num` samples of each template, in batches of one compiled shape.

    window: tokens that the network sees at once. Longer templates are filled window by
    window, each `options.stride` tokens further; what is already there is given to the next.
    """
    tokens = np.repeat(np.stack([t.tokens for t in templates]), options.num, axis=0)
    given = np.repeat(np.stack([t.given for t in templates]), options.num, axis=0)
    total, shards = len(tokens), batch_shards(mesh)
    size = -(-min(options.batch_size, total) // shards) * shards
    out, known, sure = tokens.copy(), given.copy(), np.where(given[0], 1.0, 0.0)
    evaluations, seconds, frames, compiled = np.zeros(total, np.int64), 0.0, [], None
    for number, part in enumerate(windows(tokens.shape[1], window, options.stride)):
        for start in range(0, total, size):
            rows = np.minimum(np.arange(start, start + size), total - 1)
            keys = _keys(options.seed, number, np.arange(start, start + size))
            own = rows[local_rows(mesh, size)]
            fixed = to_global((out[own][:, part], known[own][:, part]), mesh)
            with jax.set_mesh(mesh):
                compiled = compiled or sampler.lower(params, step, keys, *fixed).compile()
                began = time.perf_counter()
                chain, path = jax.block_until_ready(compiled(params, step, keys, *fixed))
            seconds += time.perf_counter() - began
            if path is not None and start == 0:
                frames.append(_placed(to_host(path), out[0], known[0], sure, part))
                sure = frames[-1][1][-1]
            keep = min(size, total - start)
            out[start : start + keep, part] = to_host(chain.z)[:keep]
            evaluations[start : start + keep] += to_host(chain.evaluations)[:keep]
        known[:, part] = True
    path = tuple(np.stack(x) for x in zip(*frames, strict=True)) if frames else None
    # A text that has ended is masked from there on.
    ended = out == (-1 if params["process"].mask_id is None else params["process"].mask_id)
    lengths = np.where(ended.any(axis=1), ended.argmax(axis=1), out.shape[1])
    return Samples(out, given, lengths, evaluations, seconds, path)


def windows(length: int, window: int, stride: int) -> Iterator[slice]:
    """The parts of a text that are filled one after another, the last one at its end."""
    start = 0
    while start + window < length:
        yield slice(start, start + window)
        start += stride
    yield slice(max(0, length - window), length)


def _keys(seed: int, window: int, rows: np.ndarray) -> Array:
    root = jax.random.key(seed)
    if window:
        root = jax.random.fold_in(root, 2**31 + window)
    return jax.vmap(jax.random.fold_in, (None, 0))(root, rows)


def _placed(path, tokens: np.ndarray, known: np.ndarray, sure: np.ndarray, part: slice):
    """A window's frames in the whole text: -1 where nothing is yet, sure as before where known."""
    z = np.tile(np.where(known, tokens, -1), (len(path.z), 1))
    chances = np.tile(sure, (len(path.z), 1))
    z[:, part] = path.z
    chances[:, part] = np.where(known[part], sure[part], path.sure)
    return z, chances


def write_samples(
    directory: Place, step: int, texts: list[str], samples: Samples, facts: dict
) -> Place:
    """samples/step_N.txt to read and step_N.jsonl for programs; an older file is kept beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    stem, count = f"step_{step:08d}", 1
    while (directory / f"{stem}.txt").exists():
        count += 1
        stem = f"step_{step:08d}-{count}"
    body = "\n\n".join(f"--- sample {i} ---\n{text}" for i, text in enumerate(texts))
    path = directory / f"{stem}.txt"
    path.write_text(body + "\n", encoding="utf-8")
    with (directory / f"{stem}.jsonl").open("w", encoding="utf-8") as file:
        for i, text in enumerate(texts):
            row = {
                "sample": i,
                "step": step,
                **facts,
                "network_evaluations": int(samples.evaluations[i]),
                "text": text,
                "tokens": samples.tokens[i][: samples.lengths[i]].tolist(),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path
