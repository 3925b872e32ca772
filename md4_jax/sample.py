"""Parameters -> samples: token arrays, text on the screen and files in the run directory."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from md4_jax.protocols import Array, Denoiser, Network, Params, SamplerStep, UserError
from md4_jax.sharding import batch_sharding, batch_shards, to_host


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """The `sample` section, besides the sampler's name and its transforms.

    num         how many sequences
    steps       T of the grid: reverse steps, one network evaluation each
    grid        cosine or uniform
    length      tokens per sequence; 0: as in training
    batch_size  sequences sampled at once
    seed        sample i depends on the seed and i alone
    """

    num: int = 4
    steps: int = 256
    grid: str = "cosine"
    length: int = 0
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self):
        for name in ("num", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"sample.{name} must be at least 1, not {getattr(self, name)}")
        if self.length < 0:
            raise UserError(f"sample.length must not be negative, not {self.length}")


def make_sampler(
    network: Network, loop: Callable, grid: np.ndarray, length: int, mesh: Mesh
) -> Callable[[Params, SamplerStep, Array], tuple[Array, Array]]:
    """A compiled (params, step, keys [B]) -> (tokens [B, L], network evaluations)."""

    def run(params: Params, step: SamplerStep, keys: Array):
        denoiser: Denoiser = network.bind(params["network"])
        keys = jax.lax.with_sharding_constraint(keys, batch_sharding(mesh))
        return loop(
            denoiser, params["process"], step, grid=jnp.asarray(grid), keys=keys, length=length
        )

    return jax.jit(run)


def draw_samples(
    sampler: Callable, params: Params, step: SamplerStep, options: SampleOptions, mesh: Mesh
) -> tuple[np.ndarray, int]:
    """(tokens [num, L], network evaluations per sequence), in batches of one compiled shape."""
    shards = batch_shards(mesh)
    size = -(-min(options.batch_size, options.num) // shards) * shards
    rows, evaluations = [], 0
    for start in range(0, options.num, size):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(options.seed), jnp.arange(start, start + size)
        )
        with jax.set_mesh(mesh):
            tokens, used = sampler(params, step, keys)
        rows.append(to_host(tokens))
        evaluations = max(evaluations, int(to_host(used)))
    return np.concatenate(rows)[: options.num], evaluations


def write_samples(
    directory: Path, step: int, texts: list[str], tokens: np.ndarray, facts: dict
) -> Path:
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
            row = {"sample": i, "step": step, **facts, "text": text, "tokens": tokens[i].tolist()}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path
