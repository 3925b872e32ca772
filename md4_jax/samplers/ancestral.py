"""Ancestral sampling, z_s ~ p(z_s | z_t) of each process: docs/equations.md, Sampling."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.masking import Masking, uniforms
from md4_jax.processes.rates import Rates
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Array, Denoiser, Needs
from md4_jax.samplers.transforms import Transform, draw_token

MASKED = (Masking, StateDependent)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Ancestral:
    """z_s ~ p(z_s | z_t), all positions at once (MD4, arXiv:2406.04329, eq. 8 and section 6).

    Masks: a masked position is revealed with probability (alpha_s - alpha_t)/(1 - alpha_t),
    and then its token is drawn from the denoiser: two draws, so that the rounding
    of a (V + 1)-way draw cannot change how many tokens appear. Where alpha depends
    on the symbol the two come from `reveal`. Other noise: every position is drawn
    from the process's `reverse_logits`.
    """

    needs: ClassVar[Needs] = Needs((*MASKED, Uniform, Transition, Rates))

    transform: Transform = Transform()

    def __call__(
        self, denoiser: Denoiser, process: Any, z: Array, s: Array, t: Array, keys: Array
    ) -> Array:
        times = jnp.full(z.shape[:1], t)
        outputs = self.transform(denoiser(z, times))
        if not isinstance(process, MASKED):
            return draw_token(
                keys, process.reverse_logits(outputs, z, jnp.full_like(times, s), times)
            )
        reveal_keys, token_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        logits, chance = reveal(outputs, process.reveal_probability(s, t))
        tokens = draw_token(token_keys, logits)
        revealed = (z == process.mask_id) & (uniforms(reveal_keys, z.shape[1]) < chance)
        return jnp.where(revealed, tokens, z)

    def evaluations(self, steps: int, length: int) -> int:
        """One network evaluation a step."""
        return steps

    def unfinished(self, process: Any, z: Array) -> Array:
        """Whether a mask is left, or the schedule keeps other noise at t = 0."""
        if isinstance(process, MASKED):
            return jnp.any(z == process.mask_id)
        if isinstance(process, Transition):
            return jnp.zeros((), bool)  # its step 0 has no noise
        return process.schedule.one_minus_alpha(jnp.float32(0.0)) > 0.0

    def finish(self, denoiser: Denoiser, process: Any, z: Array, keys: Array) -> Array:
        """What is left at t = 0 is drawn (not maximised) from the denoiser there."""
        times = jnp.zeros(z.shape[:1])
        outputs = self.transform(denoiser(z, times))
        if not isinstance(process, MASKED):
            return draw_token(keys, process.clean_logits(outputs, z, times))
        return jnp.where(z == process.mask_id, draw_token(keys, outputs), z)


def reveal(logits: Array, probability: Array) -> tuple[Array, Array]:
    """(logits of a token given that it is revealed, P(revealed)) from P(revealed | symbol).

    logits [..., V] of mu and probability p, one number or [V]: P(revealed) =
    sum_k mu_k p_k and P(k | revealed) prop mu_k p_k (docs/equations.md, GenMD4).
    """
    if jnp.ndim(probability) == 0:
        return logits, probability
    return logits + jnp.log(probability), jax.nn.softmax(logits, axis=-1) @ probability
