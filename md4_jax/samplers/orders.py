"""Samplers that reveal one or a few masks at a time, in an order drawn without the network."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.scheduled import uniforms
from md4_jax.protocols import Array, Denoiser, Needs, UserError
from md4_jax.samplers import reveal
from md4_jax.samplers.chain import NEVER, Chain, RevealSchedule, RevealsInOrder
from md4_jax.samplers.transforms import Transform

ORDERS = ("random", "left_to_right", "right_to_left")


def _ranks(values: Array, chosen: Array) -> Array:
    """Rank of each chosen position in ascending order of values: int32 [B, L]."""
    order = jnp.argsort(jnp.where(chosen, values, jnp.inf), axis=1, stable=True)
    return jnp.argsort(order, axis=1).astype(jnp.int32)


def run_segment(
    step: RevealsInOrder, denoiser: Denoiser, process, chain: Chain, s, t, keys
) -> Chain:
    """Runs one step from t to s by a schedule of its own."""
    schedule_keys, draw_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    schedule = step.schedule(process, chain, jnp.stack([s, t]), schedule_keys)
    most = step.per_round(chain.z.shape[1])
    return reveal.run(denoiser, step.transform, chain, schedule, keys=draw_keys, capacity=most)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class FirstHitting:
    """Reveals one mask at a time, at the times of the exact process (arXiv:2409.02908).

    With n masks at time t, the next is revealed at tau with 1 - alpha_tau = (1 - alpha_t) U^(1/n).
    It is a uniformly chosen one, drawn from the denoiser at tau (identities T11, M16). All these
    times together are n independent uniforms in order, and are drawn so. There is one network
    evaluation for each mask and no discretisation error; steps and grid change nothing.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        return run_segment(self, denoiser, process, chain, s, t, keys)

    def schedule(
        self, process: RevealsMasks, chain: Chain, grid: Array | np.ndarray, keys: Array
    ) -> RevealSchedule:
        """Draws the times of the masks that are revealed between the ends of the grid."""
        until, since = (process.schedule.one_minus_alpha(jnp.asarray(grid[i])) for i in (0, -1))
        noise = since * uniforms(keys, chain.z.shape[1])
        reached = process.is_noise(chain.z) & (noise >= until)
        rank = _ranks(-noise, reached)
        return RevealSchedule(jnp.where(reached, rank, NEVER), process.schedule.inverse(noise))

    def per_round(self, length: int) -> int:
        """Returns 1: a round reveals one position."""
        return 1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["transform"],
    meta_fields=["order", "per_step"],
)
@dataclasses.dataclass(frozen=True)
class AnyOrder:
    """Reveals `per_step` masks at a time, in a random order, left to right or right to left.

    With per_step 1 and a given order, x ~ prod_n mu(x_n | tokens drawn before) exactly, the law
    whose likelihood `along_order` computes. steps and grid change nothing. The network is told
    the time at which the expected share of masks is that of the sequence.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    level: ClassVar[None] = None

    order: str = "random"
    per_step: int = 1
    transform: Transform = Transform()

    def __post_init__(self):
        if self.order not in ORDERS:
            raise UserError(f"sample.order must be one of {', '.join(ORDERS)}, not {self.order!r}")
        if self.per_step < 1:
            raise UserError(f"sample.per_step must be at least 1, not {self.per_step}")

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        return run_segment(self, denoiser, process, chain, s, t, keys)

    def schedule(
        self, process: RevealsMasks, chain: Chain, grid: Array | np.ndarray, keys: Array
    ) -> RevealSchedule:
        """Draws the order of all masks, whatever the grid."""
        del grid
        length, chosen = chain.z.shape[1], process.is_noise(chain.z)
        here = jnp.broadcast_to(jnp.arange(length, dtype=jnp.float32), chain.z.shape)
        if self.order == "random":
            here = uniforms(keys, length)
        elif self.order == "right_to_left":
            here = -here
        rank = _ranks(here, chosen) // self.per_step
        left = jnp.sum(chosen, axis=1, keepdims=True) - rank * self.per_step
        return RevealSchedule(
            jnp.where(chosen, rank, NEVER), process.schedule.inverse(left / length)
        )

    def per_round(self, length: int) -> int:
        """Returns how many positions a round reveals at most."""
        return min(self.per_step, length)
