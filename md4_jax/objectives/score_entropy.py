"""Denoising score entropy of SEDD, for masks and uniform noise: docs/families/sedd.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.head import at_noise, features_at_noise, noise_of
from md4_jax.objectives.noising import masked, noised
from md4_jax.objectives.token_nats import counted, score_nats, uniform_score_nats
from md4_jax.processes.capabilities import RedrawsUniformly, RevealsMasks
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.protocols import Array, Batch, Denoiser, Needs

Scored = RevealsMasks | RedrawsUniformly


@dataclasses.dataclass(frozen=True)
class ScoreEntropy:
    """Denoising score entropy in nats (SEDD, arXiv:2310.16834, eq. 9), sigma = -alpha' / alpha.

    Masking: a masked token costs, with k = alpha / (1 - alpha), s the concrete score and
    C = sum_j s_j / k,

        sigma ( sum_j s_j - k log s_x + k (log k - 1) ) = sigma k ( C - 1 - log(s_x / k) ),

    where sigma k = -alpha' / (1 - alpha). With C = 1 it is MD4's integrand (identity S01),
    otherwise sigma k (C - 1 - log C) is added (S02). scaled: the network's outputs are
    log(s / k) + log V, so that zero outputs are the uniform score (SEDD's scaling by
    expm1(sigma_bar) and V); otherwise they are log s. It is a bound if alpha runs from 1 to 0.

    Uniform noise: a token costs, with r_y = q(y | x) / q(z | x) and s the process's `log_score` of
    the outputs, in any of its parametrisations (S04),

        (sigma / V) sum_{y != z} ( s_y - r_y log s_y + r_y (log r_y - 1) )
            = (sigma / V) sum_{y != z} r_y g(log s_y - log r_y),   g(d) = exp(d) - 1 - d.

    It is a bound for every schedule, since the prior's KL and a network-free decoder of x from z_0
    are added. These are 0 if alpha runs from 1 to 0. scaled has no effect.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks, RedrawsUniformly))
    time_power: ClassVar[int] = 5

    scaled: bool = True

    def is_bound(self, process: Scored) -> bool:
        return isinstance(process, RedrawsUniformly) or process.is_complete

    def __call__(
        self,
        denoiser: Denoiser,
        process: Scored,
        batch: Batch,
        u: Array,
        keys: Array,
    ) -> tuple[Array, dict[str, Array]]:
        z, t = noised(process, batch, u, keys)
        nats = self.loss_at(denoiser, process, batch, z, t)
        if isinstance(process, RedrawsUniformly):
            return with_ends(nats, process, batch)
        return nats, {"masked": masked(process, z)}

    def loss_at(
        self,
        denoiser: Denoiser,
        process: Scored,
        batch: Batch,
        z: Array,
        t: Array,
    ) -> Array:
        """Returns the integrand at (z, t) [B]; its mean over t ~ U(0, 1) and z is the integral."""
        if isinstance(process, RedrawsUniformly):
            log_score = process.log_score(denoiser(z, t), z, t)
            log_rho = -jnp.log1p(process.odds(t))[:, None]
            nats_BxL = uniform_score_nats(log_score, z, batch.tokens, log_rho)
            return rate(process, t) * counted(nats_BxL, batch)
        nats_BxL = self._nats_of_masks(denoiser, process, batch, z, t)
        return reveal_rate(process.schedule, t) * jnp.sum(nats_BxL, axis=1)

    def of_tokens(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> Array:
        """Returns each token's contribution to the bound of masks, [B, L]; draws of `any_order`.

        The mean is that of `__call__` if alpha runs from 1 to 0.
        """
        z, t = AnyOrder().noised(process, batch, u, keys)
        nats_BxL = self._nats_of_masks(denoiser, process, batch, z, t)
        return AnyOrder().weight_of(process, batch, z)[:, None] * nats_BxL

    def _nats_of_masks(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Computes C - 1 - log(s_x / k) at the masks that count, 0 elsewhere: [B, L]."""
        shift_BxL = jnp.broadcast_to(self._shift(process, t)[:, None], z.shape)
        noise = noise_of(process, batch, z)
        return at_noise(
            denoiser,
            features_at_noise(denoiser, process, z, t, noise),
            noise,
            reduce=lambda outputs, x, shift: score_nats(outputs - shift[..., None], x),
            rows=(batch.tokens, shift_BxL),
        )

    def _shift(self, process: RevealsMasks, t: Array) -> Array:
        """Returns the shift [B] that is subtracted from the outputs to get log(s / k)."""
        if self.scaled:
            return jnp.full(t.shape, jnp.log(process.vocab_size))
        # log k, with alpha above 0, where s is zero as well.
        alpha = jnp.maximum(process.schedule.alpha(t), float(jnp.finfo(jnp.float32).tiny))
        noise = process.schedule.one_minus_alpha(t)
        return jnp.log(alpha) - jnp.log(jnp.maximum(noise, float(jnp.finfo(jnp.float32).tiny)))


def rate(process: RedrawsUniformly, t: Array) -> Array:
    """Returns sigma = -alpha' / alpha, like t, with alpha at least the smallest float."""
    alpha = process.schedule.alpha(t)
    return -process.schedule.dalpha(t) / jnp.maximum(alpha, float(jnp.finfo(jnp.float32).tiny))


def with_ends(
    nats: Array, process: RedrawsUniformly, batch: Batch
) -> tuple[Array, dict[str, Array]]:
    """Returns (integrand + prior + reconstruction, {name: the latter two}), in nats, each [B]."""
    prior = counted(process.prior_nats(batch.tokens), batch)
    reconstruction = counted(process.reconstruction_nats(batch.tokens), batch)
    parts = {"prior": prior, "reconstruction": reconstruction}
    return nats + prior + reconstruction, parts
