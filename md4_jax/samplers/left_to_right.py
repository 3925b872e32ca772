"""Autoregressive sampling with a causal network: docs/families/autoregressive.md."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Denoiser, Needs, pytree
from md4_jax.runtime.scopes import LIKELY, turns
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_at, draw_from
from md4_jax.samplers.transforms import Transform


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class LeftToRight:
    """Draws x_n ~ p(x_n | x_{<n}) for n = 0, 1, ..., from a network trained by `autoregressive`.

    A step t -> s fills the positions from round(L (1 - t)) up to round(L (1 - s)), with one
    evaluation each. Every grid gives the same, exact distribution in L evaluations.
    The network reads [m, z_0, ..., z_{L-2}] at time 0. Prompt tokens are kept; only positions to
    their right see them. A position that is fixed in all prompts of a batch needs no evaluation.
    `fill_cached` draws the same samples with a cache of keys and values.
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
        times = jnp.zeros(len(chain.z))

        def draw(n: Array, chain: Chain) -> tuple[Array, Array]:
            shifted, index_Bx1 = self.inputs(process, chain.z), jnp.full((len(chain.z), 1), n)
            return draw_at(denoiser, self.transform, shifted, times, index_Bx1, keys)

        return one_by_one(process, chain, s, t, draw)

    def inputs(self, process: RevealsMasks, z: Array) -> Array:
        """Returns [m, z_0, ..., z_{L-2}], from which a causal network predicts z."""
        begin_Bx1 = jnp.full((len(z), 1), process.mask_id, z.dtype)
        return jnp.concatenate([begin_Bx1, z[:, :-1]], axis=1)

    def filled_in(self, grid: np.ndarray, length: int) -> np.ndarray:
        """Returns the step of the grid, 0 the first, that fills each position: int [length]."""
        return steps_of(grid, length)

    def is_cached(self, denoiser: Denoiser) -> bool:
        """Returns whether keys and values are cached: those of a causal network."""
        return bool(denoiser.blocks) and not denoiser.blocks.features

    def positions_read(self, process: Any, grid: np.ndarray, length: int) -> float:
        """Returns how many positions are read with a cache: one for each token."""
        return length

    def fill_cached(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        keys_of: Callable[[Array], Array],
    ) -> Chain:
        """Draws the same as the steps of a whole grid, with evaluations that read one token.

        The keys and values of earlier tokens are cached (`Blockwise` of a causal network).

        keys_of: n -> keys [B] of the step that fills position n
        """
        blocks, (rows, length) = denoiser.blocks, chain.z.shape
        zeros = jnp.zeros(rows)

        def draw(n: Array, chain: Chain, h_Bx1xD: Array) -> Chain:
            index_Bx1 = jnp.full((rows, 1), n)
            drawn = draw_from(denoiser, self.transform, h_Bx1xD, index_Bx1, keys_of(n))
            return _put(process, chain, n, drawn)

        def body(n: Array, state: tuple[Chain, Any]) -> tuple[Chain, Any]:
            chain, cache = state
            before_B = chain.z[:, jnp.maximum(n - 1, 0)]
            before_B = jnp.where(n == 0, process.mask_id, before_B).astype(chain.z.dtype)
            h_Bx1xD, cache = blocks.append_block(before_B[:, None], zeros, cache)
            skip = ~jnp.any(process.is_noise(chain.z[:, n]))
            with jax.named_scope(LIKELY):
                chain = jax.lax.cond(skip, lambda chain, h: chain, partial(draw, n), chain, h_Bx1xD)
            return chain, cache

        open_L = jnp.any(process.is_noise(chain.z), axis=0)
        end = jnp.max(jnp.where(open_L, jnp.arange(length) + 1, 0))
        start = (chain, blocks.empty_cache(rows, length))
        with turns(length):
            return jax.lax.fori_loop(0, end, body, start)[0]


def steps_of(grid: np.ndarray, length: int) -> np.ndarray:
    """Returns the step of the grid in which `one_by_one` fills each position: int [length]."""
    ends = np.round(np.float32(length) * (np.float32(1.0) - grid[-2::-1]))
    return np.searchsorted(ends, np.arange(length), side="right")


def one_by_one(
    process: RevealsMasks,
    chain: Chain,
    s: Array,
    t: Array,
    draw: Callable[[Array, Chain], tuple[Array, Array]],
) -> Chain:
    """Fills the positions from round(L (1 - t)) up to round(L (1 - s)), unless all are given.

    draw: (n, chain) -> tokens of position n and their probabilities, [B, 1] each
    """
    length = chain.z.shape[1]
    first, end = (jnp.round(length * (1.0 - time)).astype(jnp.int32) for time in (t, s))

    def body(n: Array, chain: Chain) -> Chain:
        skip = ~jnp.any(process.is_noise(chain.z[:, n]))
        fill = lambda chain: _put(process, chain, n, draw(n, chain))  # noqa: E731
        return jax.lax.cond(skip, lambda chain: chain, fill, chain)

    return jax.lax.fori_loop(first, end, body, chain)


def _put(process: RevealsMasks, chain: Chain, n: Array, drawn: tuple[Array, Array]) -> Chain:
    """Writes tokens and their probabilities, [B, 1] each, at position n unless it is fixed."""
    new = (jnp.arange(chain.z.shape[1]) == n) & process.is_noise(chain.z)
    tokens, confidence = drawn
    return evaluated(
        chain, jnp.where(new, tokens, chain.z), jnp.where(new, confidence, chain.confidence)
    )
