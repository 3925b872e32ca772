"""Ancestral sampling of masked models: docs/equations.md, Sampling."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from md4_jax.processes.masking import Masking
from md4_jax.protocols import Array, Denoiser
from md4_jax.samplers.transforms import Transform, draw_token


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Ancestral:
    """z_s ~ p(z_s | z_t) of MD4 (arXiv:2406.04329, eq. 8).

    A masked position is revealed with probability (alpha_s - alpha_t)/(1 - alpha_t),
    and then its token is drawn from the denoiser: two draws, so that the rounding
    of a (V + 1)-way draw cannot change how many tokens appear.
    """

    transform: Transform = Transform()

    def __call__(
        self, denoiser: Denoiser, process: Masking, z: Array, s: Array, t: Array, keys: Array
    ) -> Array:
        reveal_keys, token_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        times = jnp.full(z.shape[:1], t)
        tokens = draw_token(token_keys, self.transform(denoiser(z, times)))
        uniforms = jax.vmap(lambda key: jax.random.uniform(key, z.shape[1:]))(reveal_keys)
        revealed = (z == process.mask_id) & (uniforms < process.reveal_probability(s, t))
        return jnp.where(revealed, tokens, z)

    def finish(self, denoiser: Denoiser, process: Masking, z: Array, keys: Array) -> Array:
        """Masks left at t = 0 are drawn (not maximised) from the denoiser there."""
        tokens = draw_token(keys, self.transform(denoiser(z, jnp.zeros(z.shape[:1]))))
        return jnp.where(z == process.mask_id, tokens, z)
