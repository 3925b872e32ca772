"""The bound of a masked model with an exact number of masks: docs/families/md4.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from md4_jax.objectives.md4 import masked_share
from md4_jax.objectives.token_nats import masked_nats
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError


@dataclasses.dataclass(frozen=True)
class AnyOrder:
    """L(x) = E_{k ~ U{1..L}} (L / k) E[ sum over exactly k masked tokens of -log mu_n(z)[x_n] ].

    Equal to MD4's continuous-time bound for every schedule from 1 to 0 (any-order
    autoregressive form: RADD, arXiv:2406.03736, Theorem 2; identity M06), without
    the binomial noise of the mask count and without an epsilon at either end. A
    time-conditioned denoiser receives the t whose 1 - alpha_t has the law
    Beta(k, L - k + 1), clamped to [0, 1]: with it the value is MD4's integral
    again, and for a schedule that stops short of 0 or 1 the complete bound.

    weight_power 1 is the bound. Below 1 the weight is (L/k)^weight_power, scaled
    to cost the same if every token does; 0 is the plain masked language model.
    max_masked below 1 leaves out the masks of more than that share of the tokens,
    from which there is least to learn. Both make a training-only loss. Nats per
    sequence.
    """

    needs: ClassVar[Needs] = Needs((Masking,))

    weight_power: float = 1.0
    max_masked: float = 1.0

    def __post_init__(self):
        if not 0 < self.max_masked <= 1:
            raise UserError(f"objective.max_masked must lie in (0, 1], not {self.max_masked}")
        if not 0 <= self.weight_power <= 1:
            raise UserError(f"objective.weight_power must lie in [0, 1], not {self.weight_power}")

    def is_bound(self, process: Masking) -> bool:
        return self.weight_power == 1.0 and self.max_masked == 1.0

    def __call__(
        self, denoiser: Denoiser, process: Masking, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        most = self._most(batch.tokens.shape[1])
        count = jnp.clip(jnp.floor(u * most).astype(jnp.int32) + 1, 1, most)
        z, one_minus_alpha = process.mask_exactly(keys, batch.tokens, count)
        t = process.schedule.inverse(one_minus_alpha)
        return self.loss_at(denoiser, process, batch, z, t), {"masked": masked_share(process, z)}

    def loss_at(
        self, denoiser: Denoiser, process: Masking, batch: Batch, z: Array, t: Array
    ) -> Array:
        """The term of this mask pattern: its mean over k and patterns is the bound [B]."""
        count = jnp.sum(z == process.mask_id, axis=1)
        # Mirrored pairs of u add up to half of the masks, an odd row may have them all.
        odd = len(z) // denoiser.groups % 2 / (len(z) // denoiser.groups)
        share = (0.5 + 0.5 * odd) * self.max_masked + 1.0 / z.shape[1]
        nats = masked_nats(denoiser, process.mask_id, batch, z, t, share=share)
        return self._weight(z.shape[1], count) * nats

    def _weight(self, length: int, count: Array) -> Array:
        shares = np.arange(1, self._most(length) + 1) / length
        scale = 1.0 / np.mean(shares ** (1.0 - self.weight_power))
        return scale * (length / count) ** self.weight_power

    def _most(self, length: int) -> int:
        """The largest number of masks that is drawn, at least 1."""
        return max(1, round(self.max_masked * length))
