"""Autoregressive sampling with a causal network: docs/families/autoregressive.md."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Denoiser, Needs
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_at
from md4_jax.samplers.transforms import Transform


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LeftToRight:
    """Draws x_n ~ p(x_n | x_{<n}) for n = 0, 1, ..., from a network trained by `autoregressive`.

    A step t -> s fills the positions from round(L (1 - t)) up to round(L (1 - s)), with one
    evaluation of the whole sequence each. Every grid gives the same exact law in L evaluations.
    The network reads [m, z_0, ..., z_{L-2}] at time 0. Prompt tokens are kept; only positions to
    their right see them. A position that all prompts of a batch fix costs no evaluation.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), causal=True)
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        length = chain.z.shape[1]
        first, end = (jnp.round(length * (1.0 - time)).astype(jnp.int32) for time in (t, s))
        times = jnp.zeros(len(chain.z))
        begin_Bx1 = jnp.full((len(chain.z), 1), process.mask_id, chain.z.dtype)

        def draw(n: Array, chain: Chain) -> Chain:
            shifted = jnp.concatenate([begin_Bx1, chain.z[:, :-1]], axis=1)
            index_Bx1 = jnp.full((len(chain.z), 1), n)
            tokens, confidence = draw_at(denoiser, self.transform, shifted, times, index_Bx1, keys)
            new = (jnp.arange(length) == n) & process.is_noise(chain.z)
            return evaluated(
                chain, jnp.where(new, tokens, chain.z), jnp.where(new, confidence, chain.confidence)
            )

        def body(n: Array, chain: Chain) -> Chain:
            skip = ~jnp.any(process.is_noise(chain.z[:, n]))
            return jax.lax.cond(skip, lambda chain: chain, lambda chain: draw(n, chain), chain)

        return jax.lax.fori_loop(first, end, body, chain)
