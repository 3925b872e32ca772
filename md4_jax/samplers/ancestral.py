"""Ancestral sampling, z_s ~ p(z_s | z_t) of each process: docs/samplers.md."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import (
    HasReverse,
    ObservesMasks,
    RevealsBySymbol,
    RevealsMasks,
    RevealsParts,
)
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.protocols import Array, Denoiser, Needs, pytree
from md4_jax.samplers.chain import Chain, RevealsByOutputs, RevealsIndependently
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.observed import reveal_observed
from md4_jax.samplers.reveal import draw_where
from md4_jax.samplers.sub_tokens import reveal_parts
from md4_jax.samplers.transforms import Transform


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class Ancestral:
    """Draws z_s ~ p(z_s | z_t) at all positions (MD4, arXiv:2406.04329, eq. 8 and section 6).

    Masks: each mask is revealed with probability (alpha_s - alpha_t) / (1 - alpha_t), and then
    its token is drawn from the denoiser. With a single draw over V + 1 symbols, rounding could
    change the number of revealed tokens. If alpha depends on the symbol (GenMD4), so does the
    probability, which then needs the network. The Gaussian observations of masks (CANDI) take a
    step too: `reveal_observed`. Sub-tokens are revealed one by one: `reveal_parts`.
    Other noise: every position is drawn from the process's `reverse_logits`.
    """

    needs: ClassVar[Needs] = Needs(
        (RevealsMasks, RevealsBySymbol, HasReverse, ObservesMasks, RevealsParts)
    )
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def __call__(
        self, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain:
        if isinstance(process, RevealsMasks):
            return reveal_masks(self, denoiser, process, chain, s, t, keys)
        if isinstance(process, ObservesMasks):
            return reveal_observed(self.transform, denoiser, process, chain, (s, t), keys)
        if isinstance(process, RevealsParts):
            return reveal_parts(self.transform, denoiser, process, chain, (s, t), keys)
        outputs = denoiser(chain.z, jnp.full(chain.z.shape[:1], t))
        if isinstance(process, RevealsBySymbol | RevealsByOutputs):
            return self._reveal_by_outputs(process, chain, outputs, s, t, keys)
        return self._reverse(process, chain, outputs, s, t, keys)

    def reveal_probability(self, process: RevealsMasks, s: Array, t: Array) -> Array:
        """P(a mask is revealed) = (alpha_s - alpha_t) / (1 - alpha_t)."""
        return process.reveal_probability(s, t)

    def _reveal_by_outputs(
        self, process: RevealsBySymbol | RevealsByOutputs, chain: Chain, outputs: Array, s, t, keys
    ) -> Chain:
        reveal_keys, token_keys = split_keys(keys)
        logits = self.transform(outputs)
        if isinstance(process, RevealsByOutputs):
            revealed = process.revealed(logits, s, t)
        else:
            logits, revealed = reveal_by_symbol(logits, process.reveal_probabilities(s, t))
        tokens = draw_token(token_keys, logits)
        chosen = process.is_noise(chain.z)
        chosen &= uniforms(reveal_keys, chain.z.shape[1]) < revealed
        confidence = jnp.where(chosen, probability(outputs, tokens), chain.confidence)
        return evaluated(chain, jnp.where(chosen, tokens, chain.z), confidence)

    def _reverse(self, process: HasReverse, chain: Chain, outputs: Array, s, t, keys) -> Chain:
        before, now = (jnp.full(chain.z.shape[:1], time) for time in (s, t))
        logits = process.reverse_logits(self.transform(outputs), chain.z, before, now)
        z = draw_token(keys, logits)
        return evaluated(chain, z, jnp.where(process.is_noise(z), 0.0, probability(logits, z)))


def reveal_masks(
    step: RevealsIndependently,
    denoiser: Denoiser,
    process: RevealsMasks,
    chain: Chain,
    s: Array,
    t: Array,
    keys: Array,
) -> Chain:
    """Reveals each mask with the step's probability and draws its token from the denoiser at t.

    `reveal.py` can draw the steps that reveal each mask in advance, with the same distribution.
    """
    reveal_keys, token_keys = split_keys(keys)
    draws = uniforms(reveal_keys, chain.z.shape[1])
    revealed = process.is_noise(chain.z) & (draws < step.reveal_probability(process, s, t))
    return draw_where(denoiser, step.transform, chain, revealed, t=t, keys=token_keys)


def evaluated(chain: Chain, z: Array, confidence: Array) -> Chain:
    """Returns the chain at z after one network evaluation of every sequence."""
    # Rates, and so this probability, are float64 if jax uses 64 bits.
    confidence = confidence.astype(chain.confidence.dtype)
    return chain._replace(z=z, confidence=confidence, evaluations=chain.evaluations + 1)


def reveal_by_symbol(logits: Array, each: Array) -> tuple[Array, Array]:
    """Returns (logits of a token given that it is revealed, P(revealed)).

    logits [..., V] are those of mu, and each [V] is p_k = P(revealed | symbol k). Then
    P(revealed) = sum_k mu_k p_k, and P(k | revealed) is proportional to mu_k p_k
    (docs/families/genmd4.md).
    """
    revealed = jnp.matmul(jax.nn.softmax(logits), each, precision=jax.lax.Precision.HIGHEST)
    return logits + jnp.log(each), revealed
