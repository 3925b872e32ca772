"""Bound of masking with Gaussian observations of the hidden tokens: docs/families/candi.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import at_noise, noise_of
from md4_jax.objectives.noising import SMALLEST_TIME, masked, prompted
from md4_jax.objectives.token_nats import counted, token_nats
from md4_jax.processes.capabilities import ObservesMasks
from md4_jax.processes.draws import split_keys
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.processes.outputs import widened
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

FORMS = ("bound", "cross_entropy")


@dataclasses.dataclass(frozen=True)
class CANDI:
    """Bound of CANDI's hybrid process on -log p, in nats (arXiv:2510.22510).

    L(x) = int_0^1 E_q[ sum_{z_n = m} -w_t log mu_n[x_n] + g_t / 2 |onehot(x_n) - mu_n|^2 ] dt
           + L |onehot(x) - 1/V|^2 / (2 sigma_1^2),

    where w = -alpha' / (1 - alpha) is the rate of unmasking, g = -d(1 / sigma^2) / dt the rate at
    which the precision of the Gaussian part changes, and mu_n(z_t, y_t, t) the network's
    distribution. It is the divergence of the paths of (z, y) given x from those of the model, whose
    y_1 is Gaussian around 1/V. With the optimal network its mean is the entropy of the data plus
    the divergence of q(y_1) from that Gaussian.

    form  bound          L
          cross_entropy  the first term alone, the paper's loss. It leaves out the information in
                         the Gaussian part, is below the entropy for the optimal network, and is
                         a training-only loss
    """

    needs: ClassVar[Needs] = Needs(
        (ObservesMasks,),
        time=True,
        mixtures=True,
        why="the width of the Gaussian noise depends on t",
    )
    time_power: ClassVar[int] = 2

    form: str = "bound"

    def __post_init__(self):
        if self.form not in FORMS:
            known = " or ".join(map(repr, FORMS))
            raise UserError(f"objective.form must be {known}, not {self.form!r}")

    def is_bound(self, process: ObservesMasks) -> bool:
        return self.form == "bound" and process.is_complete

    def __call__(
        self, denoiser: Denoiser, process: ObservesMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        t = jnp.maximum(u, SMALLEST_TIME)
        of_masks, of_noise = split_keys(keys)
        z = prompted(batch, process.corrupt(of_masks, batch.tokens, t))
        y = process.observed(of_noise, batch.tokens, t)
        nats = self.loss_at(denoiser, process, batch, z, y, t)
        extra = {"masked": masked(process, z)}
        if self.form == "cross_entropy":
            return nats, extra
        prior = self.prior(process, batch)
        return nats + prior, extra | {"prior": prior}

    def loss_at(
        self, denoiser: Denoiser, process: ObservesMasks, batch: Batch, z: Array, y: Array, t: Array
    ) -> Array:
        """Returns the integrand at (z, y, t) [B]; its mean is the bound without the prior."""
        h_BxLxD = denoiser.features(process.seen(z, y, t), t)
        weights = [reveal_rate(process.schedule, t), -0.5 * process.precision_slope(t)]
        rows = [jnp.broadcast_to(weight[:, None], z.shape) for weight in weights]
        evidence = process.evidence(y, t)
        rows += [] if evidence is None else [evidence]

        def cost(logits: Array, x: Array, reveal: Array, drift: Array, *evidence: Array) -> Array:
            logits = sum(evidence, logits)
            nats = reveal * token_nats(logits, x)
            if self.form == "cross_entropy":
                return nats
            return nats + drift * squared_distance(logits, x)

        nats_BxL = at_noise(
            denoiser, h_BxLxD, noise_of(process, batch, z),
            reduce=cost, rows=(batch.tokens, *rows), padded=evidence is None,
        )  # fmt: skip
        return jnp.sum(nats_BxL, axis=1)

    def prior(self, process: ObservesMasks, batch: Batch) -> Array:
        """Returns the divergence of y_1 from the model's, in nats [B]."""
        return counted(process.prior_nats(batch.tokens), batch)


def squared_distance(logits: Array, x: Array) -> Array:
    """Computes |onehot(x) - softmax(logits)|^2: logits [..., V], x [...] -> [...].

    1 - mu_x is computed as the sum over the others, which is accurate where mu_x is near 1.
    """
    mu = jax.nn.softmax(widened(logits), axis=-1)
    others = jnp.where(jnp.arange(logits.shape[-1]) == x[..., None], 0.0, mu)
    return jnp.sum(others, axis=-1) ** 2 + jnp.sum(others**2, axis=-1)
