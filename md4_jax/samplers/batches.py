"""Parameters -> samples: token arrays, text on the screen and files in the run directory."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from md4_jax.options import SampleOptions
from md4_jax.protocols import Array, Network, Params, Template
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.sharding import batch_sharding, batch_shards, local_rows, to_global, to_host
from md4_jax.samplers.chain import SamplerStep


class Samples(NamedTuple):
    """What `draw_samples` returns; frames are of the first sequence, None without a trace.

    tokens       int32 [N, L]
    given        bool [N, L]
    lengths      int64 [N], tokens of each until it ended; what follows means nothing
    evaluations  int64 [N], network evaluations that each sequence used
    seconds      of the compiled programs, their compilation excluded
    frames       (z, confidence), each [W, F, L]: after each step of each of W windows; z is -1
                 where no window has come to
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
        denoiser = network.denoiser(params)
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
    out, known, confidence = tokens.copy(), given.copy(), np.where(given[0], 1.0, 0.0)
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
                frames.append(_placed(to_host(path), out[0], known[0], confidence, part))
                confidence = frames[-1][1][-1]
            keep = min(size, total - start)
            out[start : start + keep, part] = to_host(chain.z)[:keep]
            evaluations[start : start + keep] += to_host(chain.evaluations)[:keep]
        known[:, part] = True
    path = tuple(np.stack(x) for x in zip(*frames, strict=True)) if frames else None
    # A text that has ended is masked from there on.
    ended = np.asarray(params["process"].is_noise(out))
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


def _placed(path, tokens: np.ndarray, known: np.ndarray, confidence: np.ndarray, part: slice):
    """A window's frames in the whole text: -1 where nothing is yet."""
    z = np.tile(np.where(known, tokens, -1), (len(path.z), 1))
    chances = np.tile(confidence, (len(path.z), 1))
    z[:, part] = path.z
    chances[:, part] = np.where(known[part], confidence[part], path.confidence)
    return z, chances
