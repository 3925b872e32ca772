"""SEDD's denoising score entropy on the masking process: docs/equations.md, Score entropy."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.md4 import masked_share, noised
from md4_jax.objectives.token_nats import score_nats
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Array, Batch, Denoiser, Needs


@dataclasses.dataclass(frozen=True)
class ScoreEntropy:
    """The denoising score entropy with absorption (SEDD, arXiv:2310.16834, eq. 9).

    Per masked token, with k = alpha / (1 - alpha), s the concrete score and C = sum_j s_j / k,

        sigma ( sum_j s_j - k log s_x + k (log k - 1) ) = sigma k ( C - 1 - log(s_x / k) ),

    sigma k = -alpha' / (1 - alpha). With C = 1 it is MD4's integrand (identity S01), otherwise
    it is that plus sigma k (C - 1 - log C) (S02). scaled: the network's outputs are
    log(s / k) + log V, so that zero outputs are the uniform score (SEDD's scaling by
    expm1(sigma_bar) and V); not scaled: they are log s. A bound in nats per
    sequence for schedules from alpha = 1 to 0; there the prior's term is zero.
    """

    needs: ClassVar[Needs] = Needs((Masking,))

    scaled: bool = True

    def is_bound(self, process: Masking) -> bool:
        return process.is_complete

    def __call__(
        self, denoiser: Denoiser, process: Masking, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t = noised(process, batch, u, keys)
        return self.given_z(denoiser, process, batch, z, t), {"masked": masked_share(process, z)}

    def given_z(
        self, denoiser: Denoiser, process: Masking, batch: Batch, z: Array, t: Array
    ) -> Array:
        """The integrand at (z, t): its mean over t ~ U(0, 1), z ~ q(. | x, t) is the bound [B]."""
        schedule = process.schedule
        log_ratio = denoiser(z, t, **batch.context) - self._shift(process, t)[:, None, None]
        nats_BxL = score_nats(log_ratio, batch.tokens)
        weight = -schedule.dalpha(t) / schedule.one_minus_alpha(t)
        return weight * jnp.sum(jnp.where(z == process.mask_id, nats_BxL, 0.0), axis=1)

    def _shift(self, process: Masking, t: Array) -> Array:
        """What is taken from the network's outputs to get log(s / k), [B]."""
        if self.scaled:
            return jnp.full(t.shape, jnp.log(process.vocab_size))
        # log k, with alpha kept from zero, where s is zero as well.
        alpha = jnp.maximum(process.schedule.alpha(t), jnp.finfo(jnp.float32).tiny)
        return jnp.log(alpha) - jnp.log(process.schedule.one_minus_alpha(t))
