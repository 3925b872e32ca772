"""Decoding of reparameterized diffusion models (RDM), as in DPLM: docs/samplers.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import split_keys
from md4_jax.processes.order import lowest
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, gumbel, log_probability, probability
from md4_jax.samplers.reveal import masks_left
from md4_jax.samplers.transforms import Transform

SCORES = ("noised", "probability", "logit")
# Top-p with which symbols that were too frequent are drawn again.
NUCLEUS = 0.95


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class Reparameterized:
    """Draws a token at every position, then masks those with the lowest scores.

    RDM (arXiv:2302.05737), decoded as in DPLM (arXiv:2402.18567). Each step draws a token at every
    position outside the prompt, from the network's outputs there. After a step to s, the
    floor((1 - alpha_s) n) of the n positions with the lowest scores are masks. A mask that is not
    among them gets the drawn token. An earlier token that is not among them does not change.

    score     of a position, by what was drawn there:
              noised       log softmax(logits + G)[token], with Gumbel noise G whose largest sum
                           with the logits also chooses the token (DPLM's gumbel_argmax)
              probability  log of the probability with which the token was drawn (its vanilla)
              logit        the network's logit of the token (its argmax, with temperature 0)
    resample  a symbol with more than this fraction of a text's tokens is masked and drawn again,
              given the other tokens, with top-p 0.95.
              This costs a network evaluation. 0: never

    This uses the network's outputs at visible tokens, which losses on masks do not train. The
    samples do not have the distribution of the model.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    level: ClassVar[None] = None

    score: str = "noised"
    resample: float = 0.25
    transform: Transform = Transform()

    def __post_init__(self):
        if self.score not in SCORES:
            raise UserError(f"sample.score must be one of {', '.join(SCORES)}, not {self.score!r}")
        if not 0 <= self.resample <= 1:
            raise UserError(f"sample.resample must lie in [0, 1], not {self.resample}")

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        first_keys, again_keys = split_keys(keys)
        masks, times = process.is_noise(chain.z), jnp.full(len(chain.z), t)
        outputs = denoiser(chain.z, times)
        tokens, score = self._drawn(first_keys, outputs, self.transform)
        probabilities = probability(outputs, tokens)
        if self.resample:
            tokens = jnp.where(chain.prompt_mask, chain.z, tokens)
            frequent = _frequent(tokens, outputs.shape[-1], self.resample) & ~chain.prompt_mask

            def again() -> tuple[Array, Array, Array]:
                z = jnp.where(frequent, process.mask_id, tokens)
                transform = dataclasses.replace(self.transform, top_p=NUCLEUS)
                others = denoiser(z, times)
                drawn, own = self._drawn(again_keys, others, transform)
                pairs = ((drawn, tokens), (own, score), (probability(others, drawn), probabilities))
                return tuple(jnp.where(frequent, new, old) for new, old in pairs)

            tokens, score, probabilities = jax.lax.cond(
                jnp.any(frequent), again, lambda: (tokens, score, probabilities)
            )
            chain = chain._replace(evaluations=chain.evaluations + jnp.any(frequent, axis=1))
        score = jnp.where(chain.prompt_mask, jnp.inf, score)
        hidden = lowest(score, masks_left(process, chain, s))
        confidence = jnp.where(masks, probabilities, chain.confidence)
        return chain._replace(
            z=jnp.where(hidden, process.mask_id, jnp.where(masks, tokens, chain.z)),
            confidence=jnp.where(hidden, 0.0, confidence),
            evaluations=chain.evaluations + 1,
        )

    def _drawn(self, keys: Array, outputs: Array, transform: Transform) -> tuple[Array, Array]:
        """Draws a token at every position; returns tokens and their scores, both [B, L]."""
        logits = transform(outputs)
        if self.score == "noised":
            noised = logits + gumbel(keys, logits)
            tokens = jnp.argmax(noised, axis=-1).astype(jnp.int32)
            return tokens, log_probability(noised, tokens)
        tokens = draw_token(keys, logits)
        if self.score == "probability":
            return tokens, log_probability(logits, tokens)
        return tokens, jnp.take_along_axis(outputs, tokens[..., None], axis=-1)[..., 0]


def _frequent(tokens: Array, symbols: int, share: float) -> Array:
    """Marks the tokens of symbols with more than this share of a row: bool [B, L]."""
    counts = jnp.sum(jax.nn.one_hot(tokens, symbols, dtype=jnp.int32), axis=1)
    return jnp.take_along_axis(counts > share * tokens.shape[1], tokens, axis=1)
