"""Bound of masked diffusion from two groups in one pass: docs/families/partition.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.head import at_positions, noise_of
from md4_jax.objectives.noising import masked, noised
from md4_jax.objectives.token_nats import counted, token_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Schedule


@dataclasses.dataclass(frozen=True)
class Partition:
    """Estimates MD4's bound twice in one pass, in nats per sequence (arXiv:2505.18883).

    G are the tokens that would be masked at t, and mu predicts each group from the other:

    L(x) = int_0^1 -alpha'_t / 2 E[ sum_{n in G}     -log mu_n[x_n] / (1 - alpha_t)
                                  + sum_{n not in G} -log mu_n[x_n] / alpha_t ] dt.

    The tokens outside G are distributed like those masked at the t' with 1 - alpha_t' = alpha_t, so
    each term estimates MD4's bound. For a text with a prompt the first term is used twice: a prompt
    is outside G, so the second term would predict tokens without the prompt.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), swapped=True)

    def is_bound(self, process: RevealsMasks) -> bool:
        return process.is_complete

    def for_evaluation(self) -> AnyOrder:
        """Returns a bound of the same value; weights of 1/t and 1/(1-t) have no finite variance."""
        return AnyOrder()

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t = noised(process, batch, u, keys)
        return self.loss_at(denoiser, process, batch, z, t), {"masked": masked(process, z)}

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns the integrand at (z, t) [B]; its mean over t ~ U(0, 1) and z is the bound."""
        group = noise_of(process, batch, z)
        h_BxLxD = denoiser.swapped(batch.tokens, group)
        nats_BxL = at_positions(
            denoiser, h_BxLxD, jnp.asarray(batch.loss_mask),
            reduce=token_nats, padded=True, rows=(batch.tokens,),
        )  # fmt: skip
        first, second = (counted(jnp.where(part, nats_BxL, 0.0), batch) for part in (group, ~group))
        first = reveal_rate(process.schedule, t) * first
        second = clean_weight(process.schedule, t) * second
        return jnp.where(has_prompt(batch), first, (first + second) / 2)


def clean_weight(schedule: Schedule, t: Array) -> Array:
    """Returns -alpha'_t / alpha_t, the weight of a token outside the group, like t.

    The second term hides the tokens outside the group, each with probability alpha_t. For uniform t
    this probability has the density of 1 - alpha_t, -1 / alpha'_t, so that the weight is MD4's with
    alpha_t in place of 1 - alpha_t. 0 where alpha underflows: then no token is outside.
    """
    alpha = schedule.alpha(t)
    return jnp.where(alpha > 0, -schedule.dalpha(t) / jnp.where(alpha > 0, alpha, 1.0), 0.0)


def has_prompt(batch: Batch) -> Array:
    """Returns which texts have a prompt, bool [B]: tokens that do not count and are not padding."""
    apart = jnp.logical_not(jnp.asarray(batch.loss_mask))
    if "segments" in batch.context:
        apart = apart & (batch.context["segments"] >= 0)
    return jnp.any(apart, axis=1)
