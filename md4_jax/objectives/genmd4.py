"""Bound of GenMD4 and its gradient with respect to the schedule: docs/families/genmd4.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import at_noise, features_at_noise, noise_of
from md4_jax.objectives.noising import masked, prompted
from md4_jax.objectives.token_nats import counted, expected, token_nats
from md4_jax.processes.capabilities import RevealsBySymbol
from md4_jax.processes.draws import split_keys
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError


@dataclasses.dataclass(frozen=True)
class GenMD4:
    """Bound of masking with alpha_{t,k} = 1 - t^{w_k} (arXiv:2406.04329, section 6), in nats.

    L(x) = int_{t_1}^1 E_q[ sum_{z_n = m} (w_x CE_n - w_x + sum_k w_k mu_n,k) / t ] dt
           + sum_n t_1^{w_x} (logsumexp_k(w_k log t_1) - w_x log t_1),           x = x_n,

    where the second line is the reconstruction with the decoder p(x | z_{t_1}) prop
    q(z_{t_1} | x). It is a bound for every first_time t_1 in (0, 1). For an unbiased gradient in w,
    one call of the network takes two z at the same t, and REINFORCE uses each as the baseline of
    the other: (f_1 - f_2) (grad log q_1 - grad log q_2) / 2 (identity G05).
    """

    needs: ClassVar[Needs] = Needs(
        (RevealsBySymbol,),
        time=True,
        why="with a schedule that depends on the symbol the optimal denoiser depends on t",
    )
    time_power: ClassVar[int] = 2

    first_time: float = 1e-3

    def __post_init__(self):
        if not 0 < self.first_time < 1:
            raise UserError(f"objective.first_time must lie in (0, 1), not {self.first_time}")

    def is_bound(self, process: RevealsBySymbol) -> bool:
        return True

    def __call__(
        self, denoiser: Denoiser, process: RevealsBySymbol, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        t = self.first_time + (1.0 - self.first_time) * u
        pair = split_keys(keys)
        z_2xBxL = jnp.stack([prompted(batch, process.corrupt(k, batch.tokens, t)) for k in pair])
        nats, surrogate = self.pair(denoiser, process, batch, z_2xBxL, t)
        reconstruction = self.reconstruction(process, batch)
        total = nats + reconstruction + (surrogate - jax.lax.stop_gradient(surrogate))
        power = process.learned()["power"]
        extra = {
            "diffusion": nats,
            "reconstruction": reconstruction,
            "masked": masked(process, z_2xBxL[0]),
            "power_min": jnp.full_like(nats, jnp.min(power)),
            "power_mean": jnp.full_like(nats, jnp.mean(power)),
            "power_max": jnp.full_like(nats, jnp.max(power)),
        }
        return total, extra

    def pair(
        self, denoiser: Denoiser, process: RevealsBySymbol, batch: Batch, z_2xBxL: Array, t: Array
    ) -> tuple[Array, Array]:
        """Returns (mean of two integrands [B], surrogate with the score-function gradient [B])."""
        size, length = batch.tokens.shape
        # Interleaved, so that rows stay on their device.
        z = jnp.moveaxis(z_2xBxL, 0, 1).reshape(2 * size, length)
        twice = jax.tree.map(lambda a: jnp.repeat(a, 2, axis=0), batch)
        f = self.loss_at(denoiser.repeated(2), process, twice, z, jnp.repeat(t, 2))
        log_q = counted(process.log_probability(z, twice.tokens, jnp.repeat(t, 2)), twice)
        f_Bx2, log_q_Bx2 = f.reshape(size, 2), log_q.reshape(size, 2)
        difference = jax.lax.stop_gradient(f_Bx2[:, 0] - f_Bx2[:, 1])
        surrogate = 0.5 * difference * (log_q_Bx2[:, 0] - log_q_Bx2[:, 1])
        return jnp.mean(f_Bx2, axis=1), surrogate

    def loss_at(
        self, denoiser: Denoiser, process: RevealsBySymbol, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns the integrand at (z, t) times the length 1 - t_1 of the interval [B]."""
        power = process.learned()["power"]

        def terms(logits: Array, x: Array) -> Array:
            return power[x] * token_nats(logits, x) - power[x] + expected(logits, power)

        noise = noise_of(process, batch, z)
        h_BxLxD = features_at_noise(denoiser, process, z, t, noise)
        terms_BxL = at_noise(denoiser, h_BxLxD, noise, reduce=terms, rows=(batch.tokens,))
        return (1.0 - self.first_time) / t * jnp.sum(terms_BxL, axis=1)

    def reconstruction(self, process: RevealsBySymbol, batch: Batch) -> Array:
        """Returns the cost of decoding what is still masked at t_1 [B]; depends only on w."""
        scaled = process.learned()["power"] * jnp.log(self.first_time)
        log_masked = scaled[batch.tokens]
        each = jnp.exp(log_masked) * (jax.nn.logsumexp(scaled) - log_masked)
        return counted(each, batch)
