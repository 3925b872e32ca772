"""Path planning (P2), which masks the least confident tokens again: docs/samplers.md."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import split_keys
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.reveal import masks_left
from md4_jax.samplers.transforms import Transform

PLANNERS = ("network", "quality")


@pytree("transform", "eta")
@dataclasses.dataclass(frozen=True)
class PathPlanning:
    """Draws a token for every mask, then masks the least confident tokens again.

    P2 (arXiv:2502.03540). After a step to s there are
    floor((1 - alpha_s) n) masks among the n positions outside the prompt: those with the lowest
    scores. The score is log mu(token) for a token that was just drawn, and eta log mu(token) for
    an earlier one. So a token that is inconsistent with later ones is resampled.

    eta    0: a token stays once it is drawn, as with `confidence`; 1: earlier and new tokens are
           treated alike; above 1: earlier tokens are remasked more readily

    planner  what mu(token) of the scores is:
             network  the network's probability of the token. At visible tokens losses on masks do
                      not train it
             quality  the probability that the token is right, by the head of `network.quality`. It
                      reads the text with all drawn tokens, so a step takes two evaluations
                      (G-Star, arXiv:2510.08369)

    The samples do not have the distribution of the model.
    """

    level: ClassVar[None] = None

    eta: float = 1.0
    transform: Transform = Transform()
    planner: str = "network"

    @property
    def needs(self) -> Needs:
        """Requirements of the step on a process and a network."""
        return Needs((RevealsMasks,), quality=self.planner == "quality")

    def __post_init__(self):
        if self.planner not in PLANNERS:
            raise UserError(
                f"sample.planner must be {' or '.join(map(repr, PLANNERS))}, not {self.planner!r}"
            )
        if isinstance(self.eta, float | int) and not 0 <= self.eta < math.inf:
            raise UserError(f"sample.eta must be a number of at least 0, not {self.eta}")

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        token_keys, _ = split_keys(keys)
        masks = process.is_noise(chain.z)
        times = jnp.full(len(chain.z), t)
        outputs = denoiser(chain.z, times)
        tokens = jnp.where(masks, draw_token(token_keys, self.transform(outputs)), chain.z)
        probabilities = probability(outputs, tokens)
        score = jnp.log(probabilities)
        if self.planner == "quality":
            score = jax.nn.log_sigmoid(denoiser.quality(denoiser.features(tokens, times)))
        hidden = self._hidden(chain, masks, score, masks_left(process, chain, s))
        confidence = jnp.where(masks, probabilities, chain.confidence)
        return chain._replace(
            z=jnp.where(hidden, process.mask_id, tokens),
            confidence=jnp.where(hidden, 0.0, confidence),
            evaluations=chain.evaluations + (2 if self.planner == "quality" else 1),
        )

    def _hidden(self, chain: Chain, masks: Array, score: Array, left: Array) -> Array:
        """Marks the `left` [B] positions with the lowest scores, masks before others: [B, L]."""
        score = jnp.where(masks, score, self.eta * score)
        # 0 times the logarithm of 0 is nan, and a token that stays must not be masked.
        score = jnp.where(jnp.isnan(score), 0.0, score)
        score = jnp.where(chain.prompt_mask, jnp.inf, score)
        # Not `lowest`, by which the first position of a tie is hidden: with eta = 0 a mask of
        # probability 1 has the same score, 0, as all earlier tokens.
        lowest_first = jnp.lexsort((~masks, score), axis=1)
        return jnp.argsort(lowest_first, axis=1) < left[:, None]
