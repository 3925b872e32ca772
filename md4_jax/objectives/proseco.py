"""Training loss of unmasking and of correction: docs/families/self_correction.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.filling import OwnTexts, check_options, predicted
from md4_jax.objectives.head import at_noise, at_positions, features_at_noise, noise_of
from md4_jax.objectives.noising import masked
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError


@dataclasses.dataclass(frozen=True)
class ProSeCo(OwnTexts):
    """Loss of unmasking and of correction, in nats [B] (ProSeCo, arXiv:2602.11590).

    The network fills in the masks of z_t, which gives a text y without masks, and then reads y:

    L(x) = E_t[ w_t (sum_{z_n = m} -log mu_n(z_t)[x_n]) + c v_t sum_n cost_n(mu_n(y)[x_n]) ]

    with w_t = -alpha'_t / (1 - alpha_t), so that the first sum is MD4's bound, and t uniform in
    [least_time, 1]. There is no gradient through y. Where c > 0 it is a training-only loss; it is
    evaluated with MD4's bound. The optimal mu_n(y) is the distribution of x_n given y.

    correction  c
    weighted    v_t is w_t, as in the paper; False: 1. Unlike the first sum, the second one does not
                vanish with t, unless the network is perfect. So with w_t = 1 / t it varies much
    fill        token in place of a mask: most_likely, that of mu_n(z_t), or drawn from it
    everywhere  y has the network's tokens also at visible positions; False: those of x
    upweighted  cost(p) is -log p where y_n is wrong, and -p elsewhere; False: -log p everywhere
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    calls: ClassVar[int] = 2

    correction: float = 1.0
    weighted: bool = False
    fill: str = "most_likely"
    everywhere: bool = False
    upweighted: bool = False
    least_time: float = 0.0

    def __post_init__(self):
        if not self.correction > 0:
            raise UserError(
                f"objective.correction must be above 0, not {self.correction}. Without corrections "
                "the loss is that of objective.name='md4'"
            )
        check_options(self)

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t, own = self.noised(process, batch, u, keys)
        unmasking, correction, wrong = self.parts(denoiser, process, batch, z, t, own)
        extra = {
            "masked": masked(process, z),
            "wrong": jnp.mean(wrong, axis=1, dtype=jnp.float32),
            "correction": correction,
        }
        return unmasking + self.correction * correction, extra

    def parts(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        batch: Batch,
        z: Array,
        t: Array,
        keys: Array,
    ) -> tuple[Array, Array, Array]:
        """Returns (loss of unmasking [B], loss of correction [B], wrong tokens bool [B, L])."""
        noise, x = noise_of(process, batch, z), batch.tokens
        if self.everywhere:
            h = denoiser.features(z, t)
        else:
            h = features_at_noise(denoiser, process, z, t, noise)
        nats = at_noise(denoiser, h, noise, reduce=token_nats, padded=True, rows=(x,))
        weight = reveal_rate(process.schedule, t)
        y = jax.lax.stop_gradient(self.filled(denoiser, batch, z, noise, h, keys))
        wrong = y != x

        def cost(logits: Array, x: Array, wrong: Array) -> Array:
            nats = token_nats(logits, x)
            return jnp.where(wrong, nats, -jnp.exp(-nats)) if self.upweighted else nats

        costs = at_positions(
            denoiser, denoiser.features(y, t), batch.loss_mask, reduce=cost, rows=(x, wrong)
        )
        correction = (weight if self.weighted else 1.0) * jnp.sum(costs, axis=1)
        return weight * jnp.sum(nats, axis=1), correction, wrong

    def filled(
        self, denoiser: Denoiser, batch: Batch, z: Array, noise: Array, h: Array, keys: Array
    ) -> Array:
        """Returns the text y, int32 [B, L], from the features h of z; keys [B] draw tokens."""
        chosen = batch.loss_mask if self.everywhere else noise
        return jnp.where(chosen, predicted(denoiser, h, chosen, self.fill, keys), z)
