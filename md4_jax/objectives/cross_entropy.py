"""Plain cross-entropy under noise, for training only: docs/families/uniform.md."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import LOGITS, at_positions
from md4_jax.objectives.in_blocks import (
    beginning,
    check_block,
    check_blocks,
    features,
    noised_in_blocks,
    of_positions,
)
from md4_jax.objectives.left_to_right import check_left_to_right, next_token_nats
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.capabilities import RedrawsUniformly
from md4_jax.processes.draws import fold_keys, uniforms
from md4_jax.protocols import Array, Batch, Conditioned, Denoiser, Needs, UserError

# Folded into the keys of a step, which also draw the noise.
CONDITIONING = 0x73656C66


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Loss E_{t ~ U(0, 1)} E_q[ sum_n -log mu_n(z_t, t)[x_n] ] with equal weights, in nats [B].

    It is D3PM's auxiliary term (arXiv:2107.03006, eq. 5) alone. Its optimum is the posterior of x_n
    given all of z_t, z_n included. Only the mixture form computes the right score and step from it.
    It includes tokens that noise left unchanged, so it is not a bound.

    block  tokens of a block; 0: the whole text. Blocks have times of their own, and each sees the
           clean blocks before it, as in `uniform_elbo`
    self_conditioning  probability with which a sequence is predicted twice: the second pass reads
           the prediction of the first, and only the second is trained (arXiv:2208.04202)
    left_to_right  weight of the cross-entropy of each token given those before it, as in `block`
    """

    block: int = 0
    self_conditioning: float = 0.0
    left_to_right: float = 0.0

    def __post_init__(self):
        check_block(self.block)
        if not 0 <= self.self_conditioning <= 1:
            raise UserError(
                f"objective.self_conditioning must lie in [0, 1], not {self.self_conditioning}"
            )
        check_left_to_right(self.left_to_right)

    @property
    def needs(self) -> Needs:
        return Needs(
            (RedrawsUniformly,),
            parametrisations=("mixture",),
            why=(
                "cross-entropy learns the posterior of x_n given all of z, which the joint "
                "parametrisation does not predict"
            ),
            blockwise=self.block > 0,
            recalls=self.self_conditioning > 0,
            reads=self.left_to_right > 0,
        )

    @property
    def block_times(self) -> bool:
        """Whether each block has a time of its own."""
        return self.block > 0

    def is_bound(self, process: Any) -> bool:
        return False

    def check_length(self, length: int, key: str = "data.length") -> None:
        """Raises UserError, with the length's key, unless blocks divide the length."""
        check_blocks(self.block, length, key)

    def __call__(
        self,
        denoiser: Denoiser,
        process: Any,
        batch: Batch,
        u: Array,
        keys: Array,
        power: float = 1.0,
    ) -> tuple[Array, dict[str, Array]]:
        begin = beginning(denoiser, batch)
        z, t, weight = noised_in_blocks(process, batch, u, keys, self.block, power, begin)
        changed = of_positions(weight, self.block, z.shape[1], begin) * (z != batch.tokens)
        read = z
        if self.self_conditioning:
            chosen = uniforms(fold_keys(keys, CONDITIONING), 1) < self.self_conditioning
            read = conditioned(denoiser, batch, z, t, self.block, chosen)
        nats = self.loss_at(denoiser, process, batch, read, t, weight)
        extra = {"changed": jnp.mean(changed, axis=1)}
        if self.left_to_right:
            extra["left_to_right"] = next_token_nats(denoiser, batch)
            nats = nats + self.left_to_right * extra["left_to_right"]
        return nats, extra

    def loss_at(
        self,
        denoiser: Denoiser,
        process: Any,
        batch: Batch,
        z: Array | Conditioned,
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
        begin, length = beginning(denoiser, batch), batch.tokens.shape[1]
        factor = of_positions(weight * jnp.ones_like(t), self.block, length, begin)
        return jnp.sum(factor * nats_BxL, axis=1)


def conditioned(
    denoiser: Denoiser, batch: Batch, z: Array, t: Array, block: int, chosen: Array
) -> Conditioned:
    """Returns z with what is predicted of it, where chosen [B, 1], and else with no signal.

    No gradient flows through the prediction. Its logits are made a part of the text at a time.
    """
    h_BxLxD = jax.lax.stop_gradient(features(denoiser, batch, z, t, block))
    vocabulary = jax.eval_shape(denoiser.unembed, h_BxLxD[0, 0]).shape[-1]
    rows, length, _ = h_BxLxD.shape
    parts = min(length, -(-rows * length * vocabulary // LOGITS.at_once))
    more = -length % parts
    padded = jnp.pad(h_BxLxD, ((0, 0), (0, more), (0, 0)))
    split = jnp.moveaxis(padded.reshape(rows, parts, -1, padded.shape[-1]), 1, 0)
    signal = jax.lax.map(lambda h: denoiser.recall(denoiser.unembed(h)), split)
    signal = jnp.moveaxis(signal, 0, 1).reshape(rows, length + more, -1)[:, :length]
    signal = jnp.where(chosen[..., None], jax.lax.stop_gradient(signal), 0.0)
    return Conditioned(z, signal.astype(h_BxLxD.dtype))
