"""Two samplers: one guesses the clean sequence and noises the guess, one has an order."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import HasReverse, RevealsMasks
from md4_jax.processes.draws import split_keys
from md4_jax.protocols import Array, Denoiser, Needs
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import NEVER, Chain, RevealSchedule
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.orders import InOrder
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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class EvenFirst(InOrder):
    """Draws all tokens at even positions at once, then the others given them."""

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def schedule(
        self, process: Any, chain: Chain, grid: Array | np.ndarray, keys: Array
    ) -> RevealSchedule:
        """The round of each mask, and the time that the network is told in it."""
        odd = jnp.broadcast_to(jnp.arange(chain.z.shape[1]) % 2, chain.z.shape)
        rounds = jnp.where(process.is_noise(chain.z), odd, NEVER)
        return RevealSchedule(rounds, jnp.where(odd, process.schedule.inverse(0.5), 1.0))

    def per_round(self, length: int) -> int:
        """Half of the positions."""
        return (length + 1) // 2

    def rounds(self, length: int, steps: int) -> int:
        """Two, whatever the grid."""
        return 2
