"""Masked (absorbing) forward process: docs/families/md4.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.conditioning import check_conditioning
from md4_jax.processes.draws import uniforms
from md4_jax.processes.event_rates import reveal_probability
from md4_jax.processes.scheduled import Scheduled
from md4_jax.processes.schedules import Linear, covers_unit_interval
from md4_jax.protocols import Array, Schedule, pytree


class Masks(Scheduled):
    """Methods of processes in which a token becomes the mask V with probability 1 - alpha_t."""

    shows_clean: ClassVar[bool] = True
    vocab_size: int

    @property
    def mask_id(self) -> int:
        return self.vocab_size

    @property
    def is_complete(self) -> bool:
        """Whether alpha runs from 1 to 0, so that a bound over t in [0, 1] misses no term."""
        with jax.ensure_compile_time_eval():
            return covers_unit_interval(self.schedule)

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], t [B] and keys [B]."""
        return self.mask_each(keys, x, self.schedule.one_minus_alpha(t))

    def mask_each(self, keys: Array, x: Array, probability: Array) -> Array:
        """Masks each token of row b with probability[b], independently."""
        draws_BxL = uniforms(keys, x.shape[1])
        return jnp.where(draws_BxL < probability[:, None], self.mask_id, x)

    def reveal_probability(self, s: Array, t: Array) -> Array:
        """Returns P(z_s is clean | z_t is the mask), s < t."""
        return reveal_probability(self.schedule, s, t)

    def is_noise(self, z: Array) -> Array:
        """Returns whether each symbol is the mask: bool like z."""
        return z == self.mask_id

    def prior(self, keys: Array, length: int) -> Array:
        """Returns all masks, int32 [B, length]: exact if alpha_1 = 0."""
        return jnp.full((keys.shape[0], length), self.mask_id, jnp.int32)


@pytree()
@dataclasses.dataclass(frozen=True)
class Masking(Masks):
    """Masking: each token becomes the mask V independently with probability 1 - alpha_t.

    MD4 (arXiv:2406.04329, eq. 1), D3PM-absorbing, SEDD-absorb, MDLM and RADD use this process.
    Nothing is learned. conditioning: the time input of the network, `time` t, `alpha` alpha_t,
    `sigma` -log alpha_t or `zero` 0.
    """

    vocab_size: int
    schedule: Schedule = Linear()
    conditioning: str = "time"

    def __post_init__(self):
        check_conditioning(self.conditioning)

    def mask_exactly(
        self, keys: Array, x: Array, count: Array, among: Array
    ) -> tuple[Array, Array]:
        """Masks a random set of count[b] of the n positions `among`: (z, 1 - alpha [B]).

        1 - alpha is drawn from its distribution given that exactly k = count[b] tokens are masked.
        This is Beta(k, n - k + 1), the distribution of the k-th smallest of n uniforms. It is
        independent of which positions are masked (docs/families/notation.md).
        """
        draws_BxL = jnp.where(among, uniforms(keys, x.shape[1]), jnp.inf)
        order_BxL = jnp.argsort(draws_BxL, axis=1)
        rank_BxL = jnp.argsort(order_BxL, axis=1)
        z = jnp.where(rank_BxL < count[:, None], self.mask_id, x)
        last = jnp.take_along_axis(order_BxL, count[:, None] - 1, axis=1)
        return z, jnp.take_along_axis(draws_BxL, last, axis=1)[:, 0]
