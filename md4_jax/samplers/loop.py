"""The one scan that every sampler runs in."""

from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Denoiser, SamplerStep


def sample(
    denoiser: Denoiser,
    process: Any,
    step: SamplerStep,
    *,
    grid: Array,
    keys: Array,
    length: int,
) -> tuple[Array, Array]:
    """Runs the reverse process along a grid t(0) < ... < t(T) of float32 times.

    keys [B]: one random key a sequence, so that a sample does not depend on its
    neighbours in a batch. Returns (tokens int32 [B, L], number of network
    evaluations): what the step says for T steps, and one more if noise was left at t(0) (a
    schedule that does not reach alpha_0 = 1), which the step's `finish` then removes.
    """
    steps = grid.shape[0] - 1

    def fold(index: Array) -> Array:
        return jax.vmap(jax.random.fold_in, (0, None))(keys, index)

    def body(z: Array, index: Array) -> tuple[Array, None]:
        s, t = grid[index - 1], grid[index]
        return step(denoiser, process, z, s, t, fold(index)), None

    z = process.prior(fold(jnp.int32(steps + 1)), length)
    z, _ = jax.lax.scan(body, z, jnp.arange(steps, 0, -1))
    left = step.unfinished(process, z)
    z = jax.lax.cond(
        left, lambda z: step.finish(denoiser, process, z, fold(jnp.int32(0))), lambda z: z, z
    )
    return z, step.evaluations(steps, length) + left.astype(jnp.int32)
