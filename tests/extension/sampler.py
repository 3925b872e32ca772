"""A sampler: guess the clean sequence, then noise the guess."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import HasReverse
from md4_jax.processes.draws import split_keys
from md4_jax.protocols import Array, Denoiser, Needs
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.transforms import Transform


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class GuessAndNoise:
    """z_s ~ q(z_s | guess), the guess drawn from p(x | z_t) at each position by itself."""

    needs: ClassVar[Needs] = Needs((HasReverse,))
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def __call__(
        self, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain:
        """The chain at s."""
        guess_keys, noise_keys = split_keys(keys)
        times = jnp.full(len(chain.z), t)
        logits = process.clean_logits(self.transform(denoiser(chain.z, times)), chain.z, times)
        guess = draw_token(guess_keys, logits)
        z = process.corrupt(noise_keys, guess, jnp.full_like(times, s))
        return evaluated(chain, z, probability(logits, guess))
