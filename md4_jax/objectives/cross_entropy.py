"""Plain cross-entropy under noise, for training only: docs/families/uniform.md."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from md4_jax.objectives.head import at_positions
from md4_jax.objectives.in_blocks import (
    check_block,
    check_blocks,
    features,
    noised_in_blocks,
    of_positions,
)
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.capabilities import RedrawsUniformly
from md4_jax.protocols import Array, Batch, Denoiser, Needs


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Loss E_{t ~ U(0, 1)} E_q[ sum_n -log mu_n(z_t, t)[x_n] ] with equal weights, in nats [B].

    It is D3PM's auxiliary term (arXiv:2107.03006, eq. 5) alone. Its optimum is the posterior of x_n
    given all of z_t, z_n included. Only the mixture form turns that into the right score and step.
    It also counts tokens that noise left unchanged, so it is no bound.

    block  tokens of a block; 0: the whole text. Blocks have times of their own, and each sees the
           clean blocks before it, as in `uniform_elbo`
    """

    block: int = 0

    def __post_init__(self):
        check_block(self.block)

    @property
    def needs(self) -> Needs:
        return Needs(
            (RedrawsUniformly,),
            parametrisations=("mixture",),
            why="cross-entropy learns the posterior of x_n given all of z, which the plug-in form "
            "does not want",
            blockwise=self.block > 0,
        )

    @property
    def block_times(self) -> bool:
        """Whether each block has a time of its own."""
        return self.block > 0

    def is_bound(self, process: Any) -> bool:
        return False

    def check_length(self, length: int) -> None:
        """UserError for sequences that are not whole blocks."""
        check_blocks(self.block, length)

    def __call__(
        self,
        denoiser: Denoiser,
        process: Any,
        batch: Batch,
        u: Array,
        keys: Array,
        power: float = 1.0,
    ) -> tuple[Array, dict[str, Array]]:
        z, t, weight = noised_in_blocks(process, batch, u, keys, self.block, power)
        changed = of_positions(weight, self.block, z.shape[1]) * (z != batch.tokens)
        nats = self.loss_at(denoiser, process, batch, z, t, weight)
        return nats, {"changed": jnp.mean(changed, axis=1)}

    def loss_at(
        self,
        denoiser: Denoiser,
        process: Any,
        batch: Batch,
        z: Array,
        t: Array,
        weight: Array | float = 1.0,
    ) -> Array:
        """Returns the cost of each sequence at (z, t) [B].

        t is [B], or [B, G] of blocks. weight, like t, is a factor of the cost of each.
        """
        h_BxLxD, rows = features(denoiser, batch, z, t, self.block), (batch.tokens,)
        nats_BxL = at_positions(
            denoiser, h_BxLxD, batch.loss_mask, reduce=token_nats, padded=True, rows=rows
        )
        factor = of_positions(weight * jnp.ones_like(t), self.block, z.shape[1])
        return jnp.sum(factor * nats_BxL, axis=1)
