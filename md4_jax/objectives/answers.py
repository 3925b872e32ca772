"""Bounds on answers, for training on preferences and rewards; two models share the noise."""

import jax.numpy as jnp

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.draws import evaluation_power
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.processes.capabilities import RedrawsUniformly, RevealsMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Process

Bound = AnyOrder | BlockDiffusion | UniformELBO


def needs(block: int, *, teacher: bool, preferences: bool = False, rewards: bool = False) -> Needs:
    """Returns the requirements of an objective on answers, in blocks if block > 0."""
    return Needs(
        (RevealsMasks, RedrawsUniformly),
        parametrisations=("joint", "mixture"),
        why="its outputs must be a distribution over x",
        blockwise=block > 0,
        teacher=teacher,
        preferences=preferences,
        rewards=rewards,
    )


def bound_of(process: Process, block: int) -> Bound:
    """Returns the bound with the least variance, for whole texts or for blocks of this size."""
    if not isinstance(process, RevealsMasks):
        return UniformELBO(block)
    return BlockDiffusion(block) if block else AnyOrder()


def drawn(
    bound: Bound, denoiser: Denoiser, process: Process, batch: Batch, u: Array, keys: Array
) -> tuple[Array, ...]:
    """Draws (z, ...): the noisy texts and the other arguments of `bound.loss_at`."""
    if isinstance(bound, UniformELBO):
        return bound.noised(denoiser, process, batch, u, keys, evaluation_power(bound, process))
    return bound.noised(process, batch, u, keys)


def noise_share(process: Process, batch: Batch, z: Array) -> dict[str, Array]:
    """Returns {name in the log: fraction of positions with a mask or a changed token [B]}."""
    name = "masked" if isinstance(process, RevealsMasks) else "changed"
    return {name: jnp.mean(z != batch.tokens, axis=1, dtype=jnp.float32)}
