"""Samplers that reveal one or a few masks at a time, in an order drawn without the network."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers import reveal
from md4_jax.samplers.chain import NEVER, Chain, RevealSchedule
from md4_jax.samplers.transforms import Transform

ORDERS = ("random", "left_to_right", "right_to_left")
SPLITS = ("grid", "even")


def blocks_of(chain: Chain, size: int) -> Array | int:
    """Returns the block of each position, of `size` positions outside the prompt: int32 [B, L].

    size 0: all are in block 0.
    """
    if not size:
        return 0
    return (jnp.cumsum(~chain.prompt_mask, axis=1, dtype=jnp.int32) - 1) // size


def masks_share(chain: Chain, masks: Array) -> Array:
    """Returns the fraction of these masks [B, L] among positions outside the prompt: [B]."""
    free = jnp.sum(~chain.prompt_mask, axis=1)
    return jnp.sum(masks, axis=1) / jnp.maximum(free, 1)


def in_order(chosen: Array, values: Array, block: Array | int = 0) -> Array:
    """Sorts positions by block, then by value; those that are not chosen are last: [B, L]."""
    values = jnp.where(chosen, values, jnp.inf)
    if isinstance(block, int):
        return jnp.argsort(values, axis=1, stable=True)
    return jnp.lexsort((values, jnp.where(chosen, block, NEVER)), axis=1)


def ranked(values: Array, chosen: Array, block: Array | int = 0) -> Array:
    """Rank of each chosen position by block, then by value, in ascending order: int32 [B, L]."""
    return jnp.argsort(in_order(chosen, values, block), axis=1).astype(jnp.int32)


def evenly(masks: Array, chain: Chain, s: Array, t: Array, size: int) -> Array:
    """Returns how many masks [B, L] to reveal so that all steps of a block reveal the same: [B].

    If the steps do not divide the masks, the first steps reveal one more (LLaDA's code). The T
    steps from t = 1 to 0 have equal lengths, and each block of `size` positions gets its share of
    them; 0: one block.
    """
    free = jnp.sum(~chain.prompt_mask, axis=1)
    steps, left = (jnp.round(x / (t - s)).astype(jnp.int32) for x in (1.0, t))
    block = jnp.broadcast_to(blocks_of(chain, size), masks.shape)
    first = jnp.min(jnp.where(masks, block, NEVER), axis=1, keepdims=True)
    here = jnp.sum(masks & (block == first), axis=1)
    later = (-(-free // size) if size else 1) - 1 - first[:, 0]
    own = jnp.maximum(left - later * steps // (later + 1 + first[:, 0]), 1)
    return -(-here // own)


class InOrder:
    """A step that `RevealsInOrder`: a call draws and runs a schedule between its two times."""

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        schedule_keys, draw_keys = split_keys(keys)
        schedule = self.schedule(process, chain, jnp.stack([s, t]), schedule_keys)
        most = self.per_round(chain.z.shape[1])
        return reveal.run(denoiser, self.transform, chain, schedule, keys=draw_keys, capacity=most)


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class FirstHitting(InOrder):
    """Reveals one mask at a time, at the times of the exact process (arXiv:2409.02908).

    With n masks at time t, the next is revealed at tau with 1 - alpha_tau = (1 - alpha_t) U^(1/n).
    It is chosen uniformly, and its token is drawn from the denoiser at tau (identities T11, M16).
    The values 1 - alpha at all times are drawn together, as n sorted independent uniforms. There is
    one network evaluation for each mask and no discretisation error; steps and grid have no effect.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def schedule(
        self, process: RevealsMasks, chain: Chain, grid: Array | np.ndarray, keys: Array
    ) -> RevealSchedule:
        """Draws the times of the masks that are revealed between the ends of the grid."""
        until, since = (process.schedule.one_minus_alpha(jnp.asarray(grid[i])) for i in (0, -1))
        noise = since * uniforms(keys, chain.z.shape[1])
        reached = process.is_noise(chain.z) & (noise >= until)
        rank = ranked(-noise, reached)
        return RevealSchedule(jnp.where(reached, rank, NEVER), process.schedule.inverse(noise))

    def rounds(self, length: int, steps: int) -> int:
        """Returns the largest number of rounds of a text of this length: one per position."""
        return length

    def per_round(self, length: int) -> int:
        """Returns 1: a round reveals one position."""
        return 1


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class AnyOrder(InOrder):
    """Reveals `per_step` masks at a time, in a random order, left to right or right to left.

    per_step 0 reveals as many as the grid and `split` say. With "grid" floor((1 - alpha_s) n) of
    the n positions outside the prompt are masks after a step to s; with "even" each step of a block
    reveals the same number, the first steps one more (LLaDA's code). Otherwise steps and grid have
    no effect, and the time input of the network is that at which the expected fraction of masks is
    that of the sequence.
    With per_step 1 and a fixed order, x ~ prod_n mu(x_n | tokens drawn before) exactly, and
    `along_order` computes the likelihood of such samples.

    semi_autoregressive  positions of a block, 0: one block. Blocks are filled from left to right,
    counted from the end of the prompt, and the order is that within a block (LLaDA, 2502.09992).
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    level: ClassVar[None] = None

    order: str = "random"
    per_step: int = 1
    transform: Transform = Transform()
    semi_autoregressive: int = 0
    split: str = "grid"

    def __post_init__(self):
        if self.split not in SPLITS:
            raise UserError(f"sample.split must be one of {', '.join(SPLITS)}, not {self.split!r}")
        if self.split != "grid" and self.per_step:
            raise UserError(
                f"sample.split={self.split!r} is only for sample.per_step=0, not {self.per_step}"
            )
        if self.order not in ORDERS:
            raise UserError(f"sample.order must be one of {', '.join(ORDERS)}, not {self.order!r}")
        for key in ("per_step", "semi_autoregressive"):
            if getattr(self, key) < 0:
                raise UserError(f"sample.{key} must not be negative, not {getattr(self, key)}")
        if self.semi_autoregressive and self.order == "right_to_left":
            raise UserError(
                f"sample.semi_autoregressive={self.semi_autoregressive} fills blocks from left to "
                "right, so sample.order must not be 'right_to_left'"
            )

    @property
    def has_fixed_order(self) -> bool:
        """Whether the order is always the same, so that samples have an exact likelihood."""
        return self.order != "random"

    def schedule(
        self, process: RevealsMasks, chain: Chain, grid: Array | np.ndarray, keys: Array
    ) -> RevealSchedule:
        """Draws the order of all masks, or of those that the grid reveals."""
        length, chosen = chain.z.shape[1], process.is_noise(chain.z)
        here = jnp.broadcast_to(jnp.arange(length, dtype=jnp.float32), chain.z.shape)
        if self.order == "random":
            here = uniforms(keys, length)
        elif self.order == "right_to_left":
            here = -here
        ranks = ranked(here, chosen, blocks_of(chain, self.semi_autoregressive))
        if not self.per_step:
            times = jnp.asarray(grid)[::-1]
            return _in_steps(chosen, ranks, self._revealed(process, chain, ranks, times), times)
        rank = ranks // self.per_step
        free = jnp.maximum(jnp.sum(~chain.prompt_mask, axis=1, keepdims=True), 1)
        left = jnp.sum(chosen, axis=1, keepdims=True) - rank * self.per_step
        return RevealSchedule(jnp.where(chosen, rank, NEVER), process.schedule.inverse(left / free))

    def _revealed(self, process: RevealsMasks, chain: Chain, rank: Array, times: Array) -> Array:
        """Returns how many masks are revealed after each step of descending times: [B, T]."""
        masks = process.is_noise(chain.z)
        if self.split == "grid":
            count = jnp.sum(masks, axis=1, keepdims=True)
            return count - reveal.masks_left(process, chain, times[1:])

        def step(count: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            left = masks & (rank >= count[:, None])
            due = evenly(left, chain, ends[1], ends[0], self.semi_autoregressive)
            count += due.astype(jnp.int32)
            return count, count

        none = jnp.zeros(len(masks), jnp.int32)
        return jax.lax.scan(step, none, (times[:-1], times[1:]))[1].T

    def rounds(self, length: int, steps: int) -> int:
        """Returns how many rounds a text of this length takes at most."""
        return -(-length // self.per_step) if self.per_step else steps

    def per_round(self, length: int) -> int:
        """Returns how many positions a round reveals at most."""
        return min(self.per_step or length, length)


def _in_steps(masks: Array, rank: Array, revealed_BxT: Array, times: Array) -> RevealSchedule:
    """Reveals masks in the order of their rank, until a number is revealed after each step."""
    step = jnp.sum(revealed_BxT[:, None] <= rank[..., None], axis=2, dtype=jnp.int32)
    reached = masks & (step < revealed_BxT.shape[1])
    return RevealSchedule(jnp.where(reached, step, NEVER), times[jnp.minimum(step, len(times) - 2)])
