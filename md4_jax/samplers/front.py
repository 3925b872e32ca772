"""Steps of samplers that draw a text at its first masks, after a prefix whose cache they keep."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import fold_keys
from md4_jax.protocols import Array, Denoiser
from md4_jax.runtime.scopes import likely
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.loop import further_steps


class Memory(NamedTuple):
    """Cache that one evaluation passes to the next.

    cache  the network's cache of the first `count` tokens
    count  int32 [B]
    """

    cache: Any
    count: Array


class Front:
    """Methods of a sampler whose evaluations draw some masks in a window at the first mask.

    Steps go on until no mask is left; the grid has no effect. An evaluation with a cache reads the
    window, and before it the tokens that became final with the evaluation before.

    A subclass has `_draw(denoiser, process, chain, keys)`, which takes one evaluation, and

    width   number of positions of the window
    cached  whether to keep the keys and values of final tokens
    stops   symbols that end a text, from sample.stop. Once one is drawn and no mask is left before
            it, the masks after it become the first of these symbols, without an evaluation
    """

    width: int
    cached: bool
    stops: tuple[int, ...]

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        del s, t

        def draw(chain: Chain) -> Chain:
            return self._draw(denoiser, process, chain, keys)

        left = jnp.any(process.is_noise(chain.z))
        with likely():
            return jax.lax.cond(left, draw, lambda chain: chain, chain)

    def is_cached(self, denoiser: Denoiser) -> bool:
        """Returns whether keys and values are cached with this network."""
        return self.cached and denoiser.ordered.append is not None

    def positions_each(self, length: int) -> int:
        """Returns how many positions an evaluation reads: the window, and new tokens before it."""
        return 2 * self.width

    def positions_read(self, process: RevealsMasks, grid: np.ndarray, length: int) -> float:
        """Returns how many positions are read if each evaluation reveals one token: the most."""
        return float(length * self.positions_each(length))

    def rounds(self, length: int, steps: int) -> int:
        """Returns the largest number of steps: one for each position, or the grid's."""
        return max(length, steps)

    def left(self, process: RevealsMasks, z: Array) -> Array:
        """Marks the masks that further steps draw: bool like z."""
        return process.is_noise(z)

    def step_further(
        self, denoiser: Denoiser, process: RevealsMasks, chain: Chain, keys: Array, number: Array
    ) -> Chain:
        """Takes a step with the keys of `finish`, if masks are left.

        `--mode plan` counts one such step for each position, and none of the grid, since those
        may be skipped.
        """
        return self._draw(denoiser, process, chain, fold_keys(keys, number))

    def finish(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        keys: Array,
        taken: Array | int = 0,
    ) -> Chain:
        """Takes further steps until no mask is left."""
        return further_steps(self, denoiser, process, chain, keys, taken=taken)

    def _ended(self, process: RevealsMasks, z: Array, given: Array) -> Array:
        """Fills the masks of texts that have ended, with the first of `stops`."""
        return ended(self.stops, process, z, given)


def ended(stops: tuple[int, ...], process: RevealsMasks, z: Array, given: Array) -> Array:
    """Fills the masks of texts with one of `stops` drawn before the first mask, with stops[0]."""
    if not stops:
        return z
    before = jnp.arange(z.shape[1]) < first_mask(process, z)[:, None]
    ends = jnp.isin(z, jnp.array(stops)) & before & jnp.logical_not(given)
    over = jnp.any(ends, axis=1, keepdims=True) & process.is_noise(z)
    return jnp.where(over, jnp.asarray(stops[0], z.dtype), z)


def first_mask(process: RevealsMasks, z: Array) -> Array:
    """Returns the position of the first mask of each text [B]; L: there is none."""
    masks, length = process.is_noise(z), z.shape[1]
    first = jnp.where(jnp.any(masks, axis=1), jnp.argmax(masks, axis=1), length)
    return first.astype(jnp.int32)
