"""Bound of block diffusion: docs/families/block_diffusion.md."""

import dataclasses

import jax.numpy as jnp

from md4_jax.objectives.head import at_noise, noise_of
from md4_jax.objectives.in_blocks import check_blocks, in_blocks, spread
from md4_jax.objectives.left_to_right import check_left_to_right, next_token_nats
from md4_jax.objectives.noising import SMALLEST_TIME, masked, prompted
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Network, UserError


@dataclasses.dataclass(frozen=True)
class BlockDiffusion:
    """Bound of block diffusion: blocks from left to right, with masked diffusion in each.

    Block diffusion, BD3-LM (arXiv:2503.09573; identity B01):

        L(x) = sum_b int_0^1 -alpha'_t / (1 - alpha_t)
                     E_q[ sum_{n in b, z_n = m} -log mu_n(z_b, x_{<b}, t)[x_n] ] dt

    with an independent t for each block of `block` positions, in nats per sequence [B]. block = L
    gives MD4's bound, block = 1 the exact left-to-right likelihood. The denoiser is called once, as
    blocks.features(z, t [B, L / block], x, block).

    draws      'exact' masks k ~ U{1..block} tokens of a block and multiplies its loss by block / k,
               as `any_order` does. The mean is the same, without variance from the number of masks;
               with block = 1 and a time-free network there is no variance (B02). 'times' draws t
               and each mask independently
    low, high  clipped schedules: with draws='times', a token is masked with probability
               p ~ U[low, high] and its block weighs 1 / p. A training-only loss unless 0 and 1
    weights    'bound', or 'equal': with draws='exact' each block weighs 1, whatever its number of
               masks, as in E2D2's training (arXiv:2510.22852). A training-only loss
    left_to_right  weight of the cross-entropy of each token given those before it, which is added
               in training for a network that reads clean tokens from left to right, as in
               Nemotron-Labs-Diffusion (arXiv:2607.05722). A training-only loss above 0

    The times of a sequence's blocks are stratified, in random order. The last block is shorter if
    `block` does not divide the length. Tokens that do not count are never masked.
    """

    block: int = 16
    draws: str = "exact"
    low: float = 0.0
    high: float = 1.0
    left_to_right: float = 0.0
    weights: str = "bound"

    def __post_init__(self):
        check_left_to_right(self.left_to_right)
        if self.block < 1:
            raise UserError(f"objective.block must be at least 1, not {self.block}")
        if self.draws not in ("exact", "times"):
            raise UserError(f"objective.draws must be 'exact' or 'times', not {self.draws!r}")
        if self.weights not in ("bound", "equal"):
            raise UserError(f"objective.weights must be 'bound' or 'equal', not {self.weights!r}")
        if self.weights == "equal" and self.draws != "exact":
            raise UserError(
                "objective.weights='equal' needs objective.draws='exact', which draws each "
                f"number of masks with the same probability, not {self.draws!r}"
            )
        if not 0.0 <= self.low < self.high <= 1.0:
            raise UserError(
                "objective.low and objective.high must satisfy 0 <= low < high <= 1, not "
                f"{self.low} and {self.high}"
            )
        if self.is_clipped and self.draws == "exact":
            raise UserError(
                f"objective.low={self.low} and objective.high={self.high} limit the fraction of "
                "masks, which objective.draws='exact' does not draw: set objective.draws='times'"
            )

    @property
    def needs(self) -> Needs:
        return Needs((RevealsMasks,), blockwise=True, reads=self.left_to_right > 0)

    @property
    def is_clipped(self) -> bool:
        """Whether some fractions of masks are never drawn."""
        return (self.low, self.high) != (0.0, 1.0)

    def is_bound(self, process: RevealsMasks) -> bool:
        return not (self.is_clipped or self.left_to_right or self.weights == "equal")

    def for_evaluation(self) -> "BlockDiffusion":
        """Returns the same bound with the least variance."""
        return BlockDiffusion(self.block)

    def is_exact(self, network: Network) -> bool:
        exact = self.block == 1 and self.draws == "exact" and self.is_bound(None)
        return exact and network.time_free

    def check_length(self, length: int, key: str = "data.length") -> None:
        """Raises UserError, with the length's key, unless blocks divide the length."""
        check_blocks(self.block, length, key)

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, noise_BxG = self.noised(process, batch, u, keys)
        nats = self.loss_at(denoiser, process, batch, z, noise_BxG)
        extra = {"masked": masked(process, z)}
        if self.left_to_right:
            extra["left_to_right"] = next_token_nats(denoiser, batch)
            nats = nats + self.left_to_right * extra["left_to_right"]
        return nats, extra

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, noise_BxG: Array
    ) -> Array:
        """Returns the integrand at z [B]; its mean is the bound.

        noise [B, G] is 1 - alpha of each block. With draws='exact' it only determines the time
        input of the denoiser, and the weight is computed from the masks of z.
        """
        chance_BxG, noise = noise_BxG, noise_of(process, batch, z)
        if self.draws == "exact":
            masks = jnp.sum(in_blocks(noise, self.block), axis=2)
            tokens = jnp.sum(in_blocks(batch.loss_mask, self.block), axis=2)
            chance_BxG = masks / jnp.maximum(tokens, 1).astype(noise_BxG.dtype)
        t_BxG = process.schedule.inverse(noise_BxG)
        h = denoiser.blocks.features(z, t_BxG, batch.tokens, self.block)
        nats_BxL = at_noise(
            denoiser, h, noise, reduce=token_nats, padded=True, rows=(batch.tokens,)
        )
        if self.weights == "equal":
            return jnp.sum(nats_BxL, axis=1)
        per_block = jnp.sum(in_blocks(nats_BxL, self.block), axis=2)
        # A block without masks costs 0, whatever its weight.
        weight = 1.0 / jnp.where(chance_BxG > 0.0, chance_BxG, 1.0)
        return jnp.sum(weight * per_block, axis=1)

    def noised(
        self, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, Array]:
        """Draws z [B, L] and 1 - alpha of each block [B, G], stratified with the offset u."""
        order_keys, mask_keys = split_keys(keys)
        u_BxG = spread(u, order_keys, -(-batch.tokens.shape[1] // self.block))
        return self._masked(process, batch, u_BxG, mask_keys)

    def _masked(
        self, process: RevealsMasks, batch: Batch, u_BxG: Array, keys: Array
    ) -> tuple[Array, Array]:
        """Draws (z [B, L], 1 - alpha of each block [B, G])."""
        x = batch.tokens
        draws_BxL = jnp.where(batch.loss_mask, uniforms(keys, x.shape[1]), jnp.inf)
        draws = in_blocks(draws_BxL, self.block, jnp.inf)
        if self.draws == "times":
            limit = self.low + (self.high - self.low) * jnp.maximum(u_BxG, SMALLEST_TIME)
        else:
            tokens = jnp.sum(in_blocks(batch.loss_mask, self.block), axis=2)
            count = jnp.clip(jnp.floor(u_BxG * tokens).astype(jnp.int32), 0, tokens - 1)
            # 1 - alpha given this number of masks: see `Masking.mask_exactly`.
            limit = jnp.take_along_axis(jnp.sort(draws, axis=2), count[..., None], axis=2)[..., 0]
        hidden = (draws <= limit[..., None]).reshape(len(x), -1)[:, : x.shape[1]]
        return prompted(batch, jnp.where(hidden, process.mask_id, x)), limit
