"""Training loss of masks and of the quality of drawn tokens: docs/families/prism.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.filling import OwnTexts, check_options, predicted
from md4_jax.objectives.head import at_noise, features_at_noise, noise_of
from md4_jax.objectives.noising import masked
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

ORDERS = ("random", "confidence")


@dataclasses.dataclass(frozen=True)
class Prism(OwnTexts):
    """Loss of masks and of the quality of tokens, in nats [B] (PRISM, arXiv:2510.01384).

    The network predicts tokens at some masks S of z_t, which gives y, and then reads y and says
    which of them are right:

    L(x) = E_t[ w_t sum_{z_n = m} -log mu_n(z_t)[x_n]
                + c (N / k) sum_{n in S} -log p(q_n(y), y_n = x_n) ]

    with w_t = -alpha'_t / (1 - alpha_t), so that the first sum is MD4's bound, N counted tokens, t
    uniform in [least_time, 1], and p the probability of a label given its logit. There is no
    gradient through y. With k = 1 the best q_n(y) is the logit of p(x_n = y_n | y without y_n),
    however y_n was drawn. This is a training-only loss; it is evaluated with MD4's bound.

    quality     c
    tokens      k, number of tokens of S; all masks if there are fewer. 0: all masks, as in G-Star
                (arXiv:2510.08369), and k is their number
    texts       number of texts y for each z_t: the same tokens, but with S drawn again
    fill        token at a mask: drawn from mu_n(z_t), or the most_likely
    order       S: drawn at random, or the masks with the most likely tokens (confidence)
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), quality=True)

    quality: float = 2.0
    tokens: int = 8
    texts: int = 1
    fill: str = "drawn"
    order: str = "random"
    least_time: float = 0.0

    def __post_init__(self):
        if not self.quality > 0:
            raise UserError(
                f"objective.quality must be above 0, not {self.quality}. Without it the loss is "
                "that of objective.name='md4'"
            )
        for key, least in (("tokens", 0), ("texts", 1)):
            if getattr(self, key) < least:
                raise UserError(
                    f"objective.{key} must be at least {least}, not {getattr(self, key)}"
                )
        if self.order not in ORDERS:
            raise UserError(
                f"objective.order must be {' or '.join(map(repr, ORDERS))}, not {self.order!r}"
            )
        if self.texts > 1 and (self.order == "confidence" or not self.tokens):
            raise UserError(
                f"objective.texts={self.texts} is only for objective.order='random' with "
                "objective.tokens above 0: otherwise all texts would be the same"
            )
        check_options(self)

    @property
    def calls(self) -> int:
        """Number of passes of a step: of z_t, and of each text y."""
        return 1 + self.texts

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t, own = self.noised(process, batch, u, keys)
        unmasking, judging, right = self.parts(denoiser, process, batch, z, t, own)
        extra = {"masked": masked(process, z), "right": right, "judging": judging}
        return unmasking + self.quality * judging, extra

    def parts(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        batch: Batch,
        z: Array,
        t: Array,
        keys: Array,
    ) -> tuple[Array, Array, Array]:
        """Returns (loss of masks, loss of quality, fraction of right tokens of S), each [B]."""
        noise, x, several = noise_of(process, batch, z), batch.tokens, self.texts
        h = features_at_noise(denoiser, process, z, t, noise)
        nats = at_noise(denoiser, h, noise, reduce=token_nats, padded=True, rows=(x,))
        fill_keys, order_keys = split_keys(keys)
        tokens, nats_of_them = jax.lax.stop_gradient(self._filled(denoiser, h, noise, fill_keys))
        if self.order == "random":
            length = z.shape[1]
            score = uniforms(order_keys, several * length).reshape(-1, length)
        else:
            score = nats_of_them
        repeated = lambda rows: jnp.repeat(rows, several, axis=0)  # noqa: E731
        here = repeated(noise)
        first = jnp.argsort(jnp.where(here, score, jnp.inf), axis=1, stable=True)
        drawn_here = here & (jnp.argsort(first, axis=1) < (self.tokens or z.shape[1]))
        y = jnp.where(drawn_here, repeated(tokens), repeated(z))
        reader = denoiser.repeated(several)
        logits = denoiser.quality(reader.features_where(y, repeated(t), drawn_here))
        right = y == repeated(x)
        costs = jnp.where(drawn_here, jax.nn.softplus(jnp.where(right, -logits, logits)), 0.0)
        of_text = lambda rows: jnp.sum(rows.reshape(len(z), -1), axis=1)  # noqa: E731
        counted, number = jnp.sum(batch.loss_mask, axis=1), jnp.maximum(of_text(drawn_here), 1)
        most = several * self.tokens if self.tokens else number
        judging = counted / most * of_text(costs)
        weight = reveal_rate(process.schedule, t)
        return weight * jnp.sum(nats, axis=1), judging, of_text(drawn_here & right) / number

    def _filled(
        self, denoiser: Denoiser, h: Array, noise: Array, keys: Array
    ) -> tuple[Array, Array]:
        """Returns the network's tokens at masks, int32 [B, L], and their -log mu; keys [B]."""
        tokens = predicted(denoiser, h, noise, self.fill, keys)
        if self.order == "random":
            return tokens, jnp.zeros(tokens.shape)
        return tokens, at_noise(denoiser, h, noise, reduce=token_nats, padded=True, rows=(tokens,))
