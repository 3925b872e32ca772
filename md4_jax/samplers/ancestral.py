"""Ancestral sampling, z_s ~ p(z_s | z_t) of each process: docs/samplers.md."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import HasReverse, RevealsBySymbol, RevealsMasks
from md4_jax.processes.scheduled import uniforms
from md4_jax.protocols import Array, Denoiser, Needs
from md4_jax.samplers import reveal
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.transforms import Transform


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Ancestral:
    """z_s ~ p(z_s | z_t), all positions at once (MD4, arXiv:2406.04329, eq. 8 and section 6).

    Masks: a masked position is revealed with probability (alpha_s - alpha_t)/(1 - alpha_t),
    and then its token is drawn from the denoiser: two draws, so that the rounding
    of a (V + 1)-way draw cannot change how many tokens appear. With one alpha for all symbols
    the first needs no network; where alpha depends on the symbol the two come from
    `reveal_by_symbol`.
    Other noise: every position is drawn from the process's `reverse_logits`.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks, RevealsBySymbol, HasReverse))
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def __call__(
        self, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain:
        if isinstance(process, RevealsMasks):
            return reveal.step_by_chance(self, denoiser, process, chain, s, t, keys)
        times = jnp.full(chain.z.shape[:1], t)
        outputs = denoiser(chain.z, times)
        if isinstance(process, RevealsBySymbol):
            return self._reveal(process, chain, outputs, process.reveal_probabilities(s, t), keys)
        logits = process.reverse_logits(
            self.transform(outputs), chain.z, jnp.full_like(times, s), times
        )
        z = draw_token(keys, logits)
        return evaluated(chain, z, probability(logits, z))

    def chance(self, process: RevealsMasks, s: Array, t: Array) -> Array:
        """P(a mask is revealed) = (alpha_s - alpha_t) / (1 - alpha_t)."""
        return process.reveal_probability(s, t)

    def _reveal(self, process, chain: Chain, outputs: Array, each: Array, keys: Array) -> Chain:
        reveal_keys, token_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        logits, revealed = reveal_by_symbol(self.transform(outputs), each)
        tokens = draw_token(token_keys, logits)
        chosen = reveal.masked(process, chain)
        chosen &= uniforms(reveal_keys, chain.z.shape[1]) < revealed
        confidence = jnp.where(chosen, probability(outputs, tokens), chain.confidence)
        return evaluated(chain, jnp.where(chosen, tokens, chain.z), confidence)


def evaluated(chain: Chain, z: Array, confidence: Array) -> Chain:
    """The chain after one network evaluation of every sequence."""
    confidence = confidence.astype(
        chain.confidence.dtype
    )  # rates are float64 where jax has 64 bits
    return chain._replace(z=z, confidence=confidence, evaluations=chain.evaluations + 1)


def reveal_by_symbol(logits: Array, each: Array) -> tuple[Array, Array]:
    """(logits of a token given that it is revealed, P(revealed)) from P(revealed | symbol) [V].

    logits [..., V] of mu: P(revealed) = sum_k mu_k p_k and P(k | revealed) prop mu_k p_k
    (docs/families/genmd4.md).
    """
    return logits + jnp.log(each), jax.nn.softmax(logits, axis=-1) @ each
