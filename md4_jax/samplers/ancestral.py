"""Ancestral sampling of masked models: docs/equations.md, Sampling."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.masking import Masking, uniforms
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.protocols import Array, Denoiser
from md4_jax.samplers.transforms import Transform, draw_token


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Ancestral:
    """z_s ~ p(z_s | z_t) of MD4 and GenMD4 (arXiv:2406.04329, eq. 8 and section 6).

    A masked position is revealed with probability (alpha_s - alpha_t)/(1 - alpha_t),
    and then its token is drawn from the denoiser: two draws, so that the rounding
    of a (V + 1)-way draw cannot change how many tokens appear. Where alpha depends
    on the symbol the two come from `reveal`.
    """

    processes: ClassVar[tuple[type, ...]] = (Masking, StateDependent)

    transform: Transform = Transform()

    def __call__(
        self, denoiser: Denoiser, process: Masking, z: Array, s: Array, t: Array, keys: Array
    ) -> Array:
        reveal_keys, token_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        times = jnp.full(z.shape[:1], t)
        logits = self.transform(denoiser(z, times))
        logits, chance = reveal(logits, process.reveal_probability(s, t))
        tokens = draw_token(token_keys, logits)
        revealed = (z == process.mask_id) & (uniforms(reveal_keys, z.shape[1]) < chance)
        return jnp.where(revealed, tokens, z)

    def finish(self, denoiser: Denoiser, process: Masking, z: Array, keys: Array) -> Array:
        """Masks left at t = 0 are drawn (not maximised) from the denoiser there."""
        tokens = draw_token(keys, self.transform(denoiser(z, jnp.zeros(z.shape[:1]))))
        return jnp.where(z == process.mask_id, tokens, z)


def reveal(logits: Array, probability: Array) -> tuple[Array, Array]:
    """(logits of a token given that it is revealed, P(revealed)) from P(revealed | symbol).

    logits [..., V] of mu and probability p, one number or [V]: P(revealed) =
    sum_k mu_k p_k and P(k | revealed) prop mu_k p_k (docs/equations.md, GenMD4).
    """
    if jnp.ndim(probability) == 0:
        return logits, probability
    return logits + jnp.log(probability), jax.nn.softmax(logits, axis=-1) @ probability
