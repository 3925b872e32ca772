"""Bound of a masked model with an exact number of masks: docs/families/md4.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.head import noise_of
from md4_jax.objectives.noising import masked, prompted
from md4_jax.objectives.token_nats import masked_nats, nats_of_masks
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError


@dataclasses.dataclass(frozen=True)
class AnyOrder:
    """L(x) = E_{k ~ U{1..L}} (L / k) E[ sum over exactly k masked tokens of -log mu_n(z)[x_n] ].

    It equals MD4's continuous-time bound for every schedule from 1 to 0 (any-order
    autoregressive form: RADD, arXiv:2406.03736, Theorem 2; identity M06). The number of masks adds
    no variance, and no epsilon is needed at t = 0 or 1. A time-conditioned denoiser receives
    the t whose 1 - alpha_t has the distribution Beta(k, L - k + 1), clamped to [0, 1]. Then the
    value is MD4's integral again, and the complete bound if the schedule stops before 0 or 1.

    weight_power 1 is the bound. Below 1 the weight is (L/k)^weight_power, scaled so that the loss
    of a constant cross-entropy is unchanged; 0 is a masked language model. max_masked below 1
    draws k up to this fraction of the tokens, which avoids sequences with few clean tokens.
    With either option it is a training-only loss. Nats per sequence.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))

    weight_power: float = 1.0
    max_masked: float = 1.0

    def __post_init__(self):
        if not 0 < self.max_masked <= 1:
            raise UserError(f"objective.max_masked must lie in (0, 1], not {self.max_masked}")
        if not 0 <= self.weight_power <= 1:
            raise UserError(f"objective.weight_power must lie in [0, 1], not {self.weight_power}")

    def is_bound(self, process: RevealsMasks) -> bool:
        return self.weight_power == 1.0 and self.max_masked == 1.0

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t = self.noised(process, batch, u, keys)
        return self.loss_at(denoiser, process, batch, z, t), {"masked": masked(process, z)}

    def of_tokens(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> Array:
        """Returns the contribution of each token to the loss of `__call__`, [B, L]."""
        z, t = self.noised(process, batch, u, keys)
        nats_BxL = nats_of_masks(denoiser, process, batch, z, t)
        return self.weight_of(process, batch, z)[:, None] * nats_BxL

    def noised(
        self, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, Array]:
        """Returns z with exactly k masks, k drawn by u, and the time input of the network [B]."""
        most = self._most(jnp.sum(batch.loss_mask, axis=1))
        count = jnp.minimum(jnp.floor(u * most).astype(jnp.int32) + 1, most)
        z, noise = process.mask_exactly(keys, batch.tokens, count, batch.loss_mask)
        return prompted(batch, z), process.schedule.inverse(noise)

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns the term of this mask pattern [B]; its mean over patterns is the bound."""
        nats = masked_nats(denoiser, process, batch, z, t)
        return self.weight_of(process, batch, z) * nats

    def weight_of(self, process: RevealsMasks, batch: Batch, z: Array) -> Array:
        """Returns the weight of each mask of z, [B]: (L / k)^weight_power as above."""
        count = jnp.sum(noise_of(process, batch, z), axis=1)
        tokens = jnp.sum(batch.loss_mask, axis=1)
        return self._weight(tokens, jnp.maximum(count, 1), z.shape[1])

    def _weight(self, tokens: Array, count: Array, length: int) -> Array:
        """Computes (n / k)^weight_power of k = count and n = tokens, divided by its mean: [B]."""
        weight = (tokens / count) ** self.weight_power
        if self.weight_power == 1.0:
            return weight
        counts, most = jnp.arange(1, length + 1), self._most(tokens)[:, None]
        costs = (counts / jnp.maximum(tokens, 1)[:, None]) ** (1.0 - self.weight_power)
        mean = jnp.sum(jnp.where(counts <= most, costs, 0.0), axis=1) / most[:, 0]
        return weight / mean

    def _most(self, tokens: Array) -> Array:
        """Returns the largest number of masks that is drawn, at least 1: int32 like tokens."""
        return jnp.maximum(1, jnp.round(self.max_masked * tokens).astype(jnp.int32))
