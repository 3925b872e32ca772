"""The bound of block diffusion: docs/families/block_diffusion.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.objectives.head import at_positions
from md4_jax.objectives.md4 import SMALLEST_TIME, masked_share
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.masking import Masking, uniforms
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Network, UserError


@dataclasses.dataclass(frozen=True)
class BlockDiffusion:
    """Blocks from left to right, each by masked diffusion given those before it (BD3-LM,
    arXiv:2503.09573; identity B01).

        L(x) = sum_b int_0^1 -alpha'_t / (1 - alpha_t)
                     E_q[ sum_{n in b, z_n = m} -log mu_n(z_b, x_{<b}, t)[x_n] ] dt

    with one independent t for each block of `block` positions: at block = L MD4's bound, at
    block = 1 the exact left-to-right likelihood. Nats per sequence [B]. The denoiser is asked once,
    as features(z, t [B, L / block], clean=x, block=block).

    draws 'exact' masks k ~ U{1..block} tokens of a block, with the weight block / k, as
    `any_order` does: the same mean, no noise of the mask count, and at block = 1 nothing
    but masks, and of a time-free network no variance (B02). 'times' draws t and each mask
    by itself.

    low, high  the share of masks is U[low, high] and the weight 1 / share (clipped schedules):
               with draws='times' alone, and a training-only loss unless they are 0 and 1

    The times of a sequence's blocks are strata in a random order, so that no position is tied to a
    noise level. The last block of a length that is not whole blocks is shorter. Blocks that are
    given are never masked: the bound is then of the others after them.
    """

    needs: ClassVar[Needs] = Needs((Masking,), blockwise=True)
    takes_given: ClassVar[bool] = True

    block: int = 16
    draws: str = "exact"
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        if self.block < 1:
            raise UserError(f"objective.block must be at least 1, not {self.block}")
        if self.draws not in ("exact", "times"):
            raise UserError(f"objective.draws must be 'exact' or 'times', not {self.draws!r}")
        if not 0.0 <= self.low < self.high <= 1.0:
            raise UserError(
                "objective.low and objective.high must satisfy 0 <= low < high <= 1, not "
                f"{self.low} and {self.high}"
            )
        if self.is_clipped and self.draws == "exact":
            raise UserError(
                f"objective.low={self.low} and objective.high={self.high} clip the share of masks, "
                "which objective.draws='exact' does not draw: take draws='times'"
            )

    @property
    def is_clipped(self) -> bool:
        """Whether some shares of masks are never drawn."""
        return (self.low, self.high) != (0.0, 1.0)

    def is_bound(self, process: Masking) -> bool:
        return not self.is_clipped

    def is_exact(self, network: Network) -> bool:
        return self.block == 1 and network.time_free and not self.is_clipped

    def check_length(self, length: int) -> None:
        """UserError for sequences that are not whole blocks."""
        if length % self.block:
            raise UserError(
                f"objective.block={self.block} must divide the length of a sequence, "
                f"data.length={length}"
            )

    def __call__(
        self, denoiser: Denoiser, process: Masking, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        order_keys, mask_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        u_BxG = self._spread(u, order_keys, len(self._sizes(batch.tokens.shape[1])))
        z, masked_BxG = self._masked(process, batch.tokens, u_BxG, mask_keys)
        if batch.given is not None:
            z = jnp.where(batch.given, batch.tokens, z)
        nats = self.loss_at(denoiser, process, batch, z, masked_BxG)
        return nats, {"masked": masked_share(process, z)}

    def loss_at(
        self, denoiser: Denoiser, process: Masking, batch: Batch, z: Array, masked_BxG: Array
    ) -> Array:
        """The integrand at z, where masked [B, G] is 1 - alpha of each block: its mean is the
        bound [B]. With draws='exact' the weight follows the masks of z, and masked is only what a
        time-conditioned denoiser is told."""
        length, sizes = z.shape[1], self._sizes(z.shape[1])
        masked = z == process.mask_id
        share_BxG = masked_BxG
        if self.draws == "exact":
            share_BxG = jnp.sum(self._blocks(masked), axis=2) / jnp.asarray(sizes, masked_BxG.dtype)
        clean, context = batch.tokens, dict(batch.context)
        if length % self.block:
            # What fills up the last block is of a segment of its own, which nobody else sees.
            segments = context.get("segments", jnp.zeros_like(clean))
            context["segments"] = self._filled(segments, -1)
            z, clean = self._filled(z), self._filled(clean)
        t_BxG = process.schedule.inverse(masked_BxG)
        h = denoiser.features(z, t_BxG, clean=clean, block=self.block, **context)[:, :length]
        nats_BxL = at_positions(
            denoiser, h, masked, reduce=token_nats, rows=(batch.tokens,), share=self._room(masked)
        )
        per_block = jnp.sum(self._blocks(nats_BxL), axis=2)
        # A block without masks has nothing to weigh, whatever its share is.
        weight = 1.0 / jnp.where(share_BxG > 0.0, share_BxG, 1.0)
        return jnp.sum(weight * per_block, axis=1)

    def _sizes(self, length: int) -> np.ndarray:
        """Tokens of each block; the last may have fewer than the others."""
        begin = np.arange(0, length, self.block)
        return np.minimum(self.block, length - begin)

    def _filled(self, x_BxL: Array, value: float = 0) -> Array:
        """With so many more positions that all blocks are whole."""
        more = -x_BxL.shape[1] % self.block
        return jnp.pad(x_BxL, ((0, 0), (0, more)), constant_values=value)

    def _blocks(self, x_BxL: Array) -> Array:
        """[B, L] -> [B, G, block], zeros where the last block is short."""
        return self._filled(x_BxL).reshape(len(x_BxL), -1, self.block)

    def _spread(self, u: Array, keys: Array, groups: int) -> Array:
        """A stratum of [0, 1) for each block, in random order, shifted by u: [B, G]."""
        rank = jnp.argsort(uniforms(keys, groups), axis=1)
        return (u[:, None] + rank / groups) % 1.0

    def _masked(self, process: Masking, x: Array, u_BxG: Array, keys: Array) -> tuple[Array, Array]:
        """(z, 1 - alpha of each block)."""
        length = x.shape[1]
        draws = self._filled(uniforms(keys, length), jnp.inf)
        draws = draws.reshape(*u_BxG.shape, self.block)
        if self.draws == "times":
            limit = self.low + (self.high - self.low) * jnp.maximum(u_BxG, SMALLEST_TIME)
        else:
            sizes = jnp.asarray(self._sizes(length))
            count = jnp.minimum(jnp.floor(u_BxG * sizes).astype(jnp.int32), sizes - 1)
            # The law of 1 - alpha given that many masks: `Masking.mask_exactly`.
            limit = jnp.take_along_axis(jnp.sort(draws, axis=2), count[..., None], axis=2)[..., 0]
        hidden = (draws <= limit[..., None]).reshape(len(x), -1)[:, :length]
        return jnp.where(hidden, process.mask_id, x), limit

    def _room(self, masked: Array) -> float:
        """Part of the positions that is hardly ever exceeded by the masks [B, L]."""
        rows, length = masked.shape
        mean = 0.5 * (self.low + self.high)
        if self.draws == "exact":
            mean += 0.5 / self.block
        odd = rows % 2 / rows / len(self._sizes(length))
        noise = 2.5 / (rows * length) ** 0.5 if self.draws == "times" else 1.0 / length
        return min(1.0, mean + 0.5 * odd + noise)
