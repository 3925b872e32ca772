"""Bound on uniform noise for a denoiser that predicts x: docs/families/uniform.md."""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.head import at_positions
from md4_jax.objectives.in_blocks import (
    beginning,
    check_block,
    check_blocks,
    features,
    noised_in_blocks,
    of_positions,
)
from md4_jax.objectives.score_entropy import rate, with_ends
from md4_jax.objectives.token_nats import others_log1p, two_and_others
from md4_jax.processes.capabilities import RedrawsUniformly
from md4_jax.protocols import Array, Batch, Denoiser, Needs


@dataclasses.dataclass(frozen=True)
class UniformELBO:
    """Continuous-time bound on uniform noise (UDLM, arXiv:2412.10193; Duo, arXiv:2506.10892).

    It equals `score_entropy` for mu, the softmax of the outputs, in nats per sequence. With
    rho = q(another symbol | x) / q(x | x) and 1 + odds = 1 / rho, the score is
    s_y = a (1 + b mu_y) for y != z, where

    joint    b = odds,         a = 1 / (1 + odds mu_z)
    mixture  b = odds / rest,  a = rest = 1 - (1 - rho) mu_z

    With g(log v) = v - 1 - log v, and r = rho if z = x and 1 otherwise, a token costs

        (sigma / V) ( r sum_{y != z, x} g(log s_y - log r) + [z != x] g(log s_x + log rho) / rho ).

    No array of scores [B, L, V] is created, and large arrays of logits are computed in chunks.
    Prior and reconstruction are included, for every schedule. Joint is the form of UDLM and Duo.

    block  number of tokens of a block; 0: the whole text. Blocks come from left to right, and the
           bound is the sum of the bounds of each block given the clean ones before it. Each block
           has its own time; the times of a sequence are stratified, in random order
    """

    time_power: ClassVar[int] = 5

    block: int = 0

    def __post_init__(self):
        check_block(self.block)

    @property
    def needs(self) -> Needs:
        return Needs(
            (RedrawsUniformly,),
            parametrisations=("joint", "mixture"),
            why=(
                "its outputs must be a distribution over x. For scores use "
                "objective.name='score_entropy'"
            ),
            blockwise=self.block > 0,
        )

    @property
    def block_times(self) -> bool:
        """Whether each block has its own time."""
        return self.block > 0

    def is_bound(self, process: RedrawsUniformly) -> bool:
        return True

    def check_length(self, length: int, key: str = "data.length") -> None:
        """Raises UserError, with the length's key, unless blocks divide the length."""
        check_blocks(self.block, length, key)

    def __call__(
        self,
        denoiser: Denoiser,
        process: RedrawsUniformly,
        batch: Batch,
        u: Array,
        keys: Array,
        power: float = 1.0,
    ) -> tuple[Array, dict[str, Array]]:
        z, t, weight = self.noised(denoiser, process, batch, u, keys, power)
        nats = self.loss_at(denoiser, process, batch, z, t, weight)
        return with_ends(nats, process, batch)

    def noised(
        self,
        denoiser: Denoiser,
        process: RedrawsUniformly,
        batch: Batch,
        u: Array,
        keys: Array,
        power: float = 1.0,
    ) -> tuple[Array, Array, Array]:
        """Draws (z, t, weight) of `loss_at`; see `in_blocks.noised_in_blocks`."""
        begin = beginning(denoiser, batch)
        return noised_in_blocks(process, batch, u, keys, self.block, power, begin)

    def loss_at(
        self,
        denoiser: Denoiser,
        process: RedrawsUniformly,
        batch: Batch,
        z: Array,
        t: Array,
        weight: Array | float = 1.0,
    ) -> Array:
        """Returns the integrand at (z, t) [B]; its mean over t ~ U(0, 1) and z is the integral.

        t is [B], or [B, G] of blocks. weight, like t, is a factor of the integrand of each.
        """
        begin, length = beginning(denoiser, batch), batch.tokens.shape[1]
        odds, factor = (
            jnp.broadcast_to(of_positions(x, self.block, length, begin), z.shape)
            for x in (process.odds(t), weight * rate(process, t))
        )
        nats_BxL = at_positions(
            denoiser, features(denoiser, batch, z, t, self.block), batch.loss_mask,
            reduce=functools.partial(uniform_nats, process), rows=(z, batch.tokens, odds),
        )  # fmt: skip
        return jnp.sum(factor * nats_BxL, axis=1)


def uniform_nats(
    process: RedrawsUniformly, outputs: Array, z: Array, x: Array, odds: Array
) -> Array:
    """Returns the cost of each token per unit of sigma, [B, L]."""
    mu_z, mu_x, mu_others = two_and_others(outputs, z, x)
    kept = z == x
    left = mu_others + jnp.where(kept, 0.0, mu_x)  # 1 - mu_z without cancellation
    rho, stays = 1.0 / (1.0 + odds), odds / (1.0 + odds)
    log_rho = -jnp.log1p(odds)
    if process.parametrisation == "joint":
        b, log_a = odds, -jnp.log1p(odds * mu_z)
        # s_y / r - 1 = (b mu_y - short) w, and w = a / r.
        short = jnp.where(kept, -stays * left, odds * mu_z)
    else:
        rest = left + rho * mu_z
        b, log_a = odds / rest, jnp.log(rest)
        short = jnp.where(kept, -stays * left, stays * mu_z) / rest
    count = process.vocab_size - jnp.where(kept, 1, 2)
    far = log_a - jnp.where(kept, log_rho, 0.0)
    log_w = jnp.where(short > -0.5, -jnp.log1p(jnp.maximum(short, -0.5)), far)
    excess = jnp.exp(log_a) * (b * mu_others - count * short)
    logs = others_log1p(outputs, b, z, x) + count * log_w
    log_v = log_a + jnp.log1p(b * mu_x) + log_rho
    jump = jnp.exp(-log_rho) * (jnp.expm1(log_v) - log_v)
    total = excess - jnp.where(kept, rho, 1.0) * logs + jnp.where(kept, 0.0, jump)
    return total / process.vocab_size
