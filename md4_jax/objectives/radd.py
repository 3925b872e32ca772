"""Losses of RADD for masked models without time: docs/families/radd.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.head import noise_of
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.noising import SMALLEST_TIME, masked, noised, prompted
from md4_jax.objectives.token_nats import masked_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.protocols import Array, Batch, Denoiser, Needs


@dataclasses.dataclass(frozen=True)
class TDCE:
    """Denoising cross-entropy in t (RADD, arXiv:2406.03736; identity S03), k = alpha / (1 - alpha).

    int_0^1 sigma E_q[ sum_{z_n = m} -k log(k c_n(z)[x_n]) ] dt
        = L_DSE - L (H_b(alpha_1) - H_b(alpha_0))

    with sigma = -alpha' / alpha, c the denoiser's distribution, H_b the binary entropy in nats and
    L_DSE the score entropy's integral, which is MD4's. The term -sigma k log k of a masked token
    has no parameters, but drawing it adds variance, which is infinite for most schedules. The
    objective adds the offset L (H_b(alpha_1) - H_b(alpha_0)) and replaces the term by its mean.
    Both cancel, so each draw equals MD4's. drawn_constant draws the term instead, with the same
    mean and gradients. `loss_at` is the integrand itself.

    A bound in nats per sequence if alpha runs from 1 to 0, where the offset is 0. For other
    schedules the prior's term is missing, and it is a training-only loss.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    time_power: ClassVar[int] = 2

    drawn_constant: bool = False

    def is_bound(self, process: RevealsMasks) -> bool:
        return process.is_complete

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t = noised(process, batch, u, keys)
        nats = MD4().loss_at(denoiser, process, batch, z, t)
        if self.drawn_constant:
            tokens = jnp.sum(batch.loss_mask, axis=1)
            nats = nats + constant(process, batch, z, t) + tokens * offset(process)
        return nats, {"masked": masked(process, z)}

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns RADD's integrand at (z, t) [B], without the offset; it may be negative."""
        return MD4().loss_at(denoiser, process, batch, z, t) + constant(process, batch, z, t)


@dataclasses.dataclass(frozen=True)
class LambdaDCE:
    """Denoising cross-entropy in lambda (RADD, arXiv:2406.03736; identity M06):

        L(x) = int_0^1 (1 / lambda) E[ sum over masked tokens of -log c_n(z)[x_n] ] dlambda,

    in nats per sequence, with each token masked independently with probability lambda. It is MD4's
    bound with lambda = 1 - alpha_t, complete for every schedule. If the schedule has no such t, a
    time-conditioned denoiser gets the nearest one. `any_order` has the same mean, without variance
    from the number of masks.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    time_power: ClassVar[int] = 2

    def is_bound(self, process: RevealsMasks) -> bool:
        return True

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        probability = jnp.maximum(u, SMALLEST_TIME)
        z = prompted(batch, process.mask_each(keys, batch.tokens, probability))
        nats = self.loss_at(denoiser, process, batch, z, probability)
        return nats, {"masked": masked(process, z)}

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, probability: Array
    ) -> Array:
        """Returns the integrand at z and lambda = probability [B]."""
        t = process.schedule.inverse(probability)
        return masked_nats(denoiser, process, batch, z, t) / probability


def constant(process: RevealsMasks, batch: Batch, z: Array, t: Array) -> Array:
    """Sums -sigma k log k over the counted masked tokens of z at t, nats per sequence [B]."""
    schedule = process.schedule
    noise = schedule.one_minus_alpha(t)
    # sigma k = -alpha' / (1 - alpha). alpha stays above 0, where log k is infinite.
    tiny = float(jnp.finfo(jnp.float32).tiny)
    log_k = jnp.log(jnp.maximum(schedule.alpha(t), tiny)) - jnp.log(jnp.maximum(noise, tiny))
    masks = jnp.sum(noise_of(process, batch, z), axis=1)
    return -reveal_rate(schedule, t) * log_k * masks


def offset(process: RevealsMasks) -> Array:
    """Returns H_b(alpha_1) - H_b(alpha_0) of one token, in nats []; 0 if alpha runs from 1 to 0."""
    start, end = jnp.zeros(()), jnp.ones(())
    return _entropy(process, end) - _entropy(process, start)


def _entropy(process: RevealsMasks, t: Array) -> Array:
    """Returns the binary entropy of alpha_t, in nats."""
    return sum(
        jnp.where(p > 0, -p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)
        for p in (process.schedule.alpha(t), process.schedule.one_minus_alpha(t))
    )
