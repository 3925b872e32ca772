"""Confidence-based order of reveals, as in MaskGIT and LLaDA."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Denoiser, Needs, UserError
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.reveal import masks_left
from md4_jax.samplers.transforms import Transform

SCORES = ("probability", "margin", "entropy")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["transform", "noise"],
    meta_fields=["score", "per_step"],
)
@dataclasses.dataclass(frozen=True)
class Confidence:
    """Draws a token for every mask and keeps those with the highest score.

    score     of a position, from mu after temperature, top-k and top-p:
              probability  log mu of the token (MaskGIT, arXiv:2202.04200; LLaDA, 2502.09992)
              margin       the largest mu less the second largest (arXiv:2502.06768)
              entropy      sum mu log mu, the negative entropy
    per_step  masks that a step reveals. 0: as many as the grid says, so that after a step to s
              floor((1 - alpha_s) n) of the n positions outside the prompt are masks
    noise     noise * t * (a Gumbel draw) is added to the score (MaskGIT)

    The law of the samples is not that of the model. With margin or entropy and without noise the
    positions follow from the logits alone, and samples have a likelihood: the evaluator `path`.
    With probability the order depends on the drawn tokens, and there is none.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    level: ClassVar[None] = None

    score: str = "probability"
    per_step: int = 0
    noise: float = 0.0
    transform: Transform = Transform()

    def __post_init__(self):
        if self.score not in SCORES:
            raise UserError(f"sample.score must be one of {', '.join(SCORES)}, not {self.score!r}")
        if self.per_step < 0:
            raise UserError(f"sample.per_step must not be negative, not {self.per_step}")
        if isinstance(self.noise, float | int) and self.noise < 0:
            raise UserError(f"sample.noise must not be negative, not {self.noise}")

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        masks = process.is_noise(chain.z)
        count = jnp.minimum(self._count(process, chain, masks, s), jnp.sum(masks, axis=1))

        def draw(chain: Chain) -> Chain:
            return self._draw(denoiser, chain, masks, count, t, keys)

        return jax.lax.cond(jnp.any(count > 0), draw, lambda chain: chain, chain)

    def _draw(
        self, denoiser: Denoiser, chain: Chain, masks: Array, count: Array, t: Array, keys: Array
    ) -> Chain:
        """Reveals the count [B] masks with the highest scores in each sequence."""
        token_keys, noise_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        outputs = denoiser(chain.z, jnp.full(len(chain.z), t))
        logits = self.transform(outputs)
        tokens = draw_token(token_keys, logits)
        gumbel = jax.vmap(lambda key: jax.random.gumbel(key, masks.shape[1:]))(noise_keys)
        score = self._score(logits, tokens) + self.noise * t * gumbel
        chosen = _best(masks, score, count)
        return chain._replace(
            z=jnp.where(chosen, tokens, chain.z),
            confidence=jnp.where(chosen, probability(outputs, tokens), chain.confidence),
            evaluations=chain.evaluations + (count > 0),
        )

    @property
    def is_deterministic(self) -> bool:
        """Whether the positions to reveal are a function of the logits alone."""
        return self.score != "probability" and self.noise == 0

    def reveals(self, process: RevealsMasks, chain: Chain, logits: Array, s: Array) -> Array:
        """Marks the positions that the step to s reveals, given transformed logits: bool [B, L]."""
        masks = process.is_noise(chain.z)
        count = self._count(process, chain, masks, s)
        return _best(masks, self._score(logits, chain.z), count)

    def _count(self, process: RevealsMasks, chain: Chain, masks: Array, s: Array) -> Array:
        """Number of masks that the step to s reveals: [B]."""
        if self.per_step:
            return jnp.full(len(chain.z), self.per_step)
        return jnp.sum(masks, axis=1) - masks_left(process, chain, s)

    def _score(self, logits: Array, tokens: Array) -> Array:
        if self.score == "probability":
            return jnp.log(probability(logits, tokens))
        log_mu = jax.nn.log_softmax(logits, axis=-1)
        if self.score == "margin":
            best, second = jnp.moveaxis(jax.lax.top_k(log_mu, 2)[0], -1, 0)
            return jnp.exp(best) - jnp.exp(second)
        mu = jnp.exp(log_mu)
        return jnp.sum(jnp.where(mu > 0, mu * log_mu, 0.0), axis=-1)


def _best(masks: Array, score: Array, count: Array) -> Array:
    """Marks the count [B] masks with the highest scores of each sequence: bool [B, L]."""
    best_first = jnp.argsort(jnp.where(masks, -score, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(best_first, axis=1)
    return masks & (rank < count[:, None])
