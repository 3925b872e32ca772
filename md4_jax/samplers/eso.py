"""Sampling of Eso-LM: some tokens by diffusion, the rest from left to right, with one cache."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import uniforms
from md4_jax.processes.order import check_clean_share, numbered, ranks
from md4_jax.protocols import Array, Denoiser, Needs, pytree
from md4_jax.runtime.scopes import turns
from md4_jax.samplers import reveal
from md4_jax.samplers.chain import NEVER, Chain, RevealSchedule
from md4_jax.samplers.draw import draw_from
from md4_jax.samplers.orders import InOrder
from md4_jax.samplers.transforms import Transform


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class Eso(InOrder):
    """Draws a random order, then a text in this order (Eso-LM (B), arXiv:2506.01928).

    Each token is drawn by diffusion with probability alpha_0. The steps of the grid reveal these
    tokens with the probability of `ancestral`; a step draws all of its tokens at once. The other
    tokens follow from left to right, each given all earlier ones. Tokens of diffusion have a random
    order. The network sees the tokens of earlier steps and, as masks, those that come before in the
    same step.

    alpha_0  0: only from left to right; 1: only diffusion. The default is that of the objective
    cached   caches the keys and values of drawn tokens, so that a network evaluation reads only new
             tokens and those to be drawn. False: the same samples, more slowly

    With many steps the samples have the likelihood that `eso_orders` bounds.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), ordered=True)
    level: ClassVar[None] = None

    alpha_0: float = 0.125
    cached: bool = True
    transform: Transform = Transform()

    def __post_init__(self):
        check_clean_share("sample.alpha_0", self.alpha_0)

    def schedule(
        self, process: RevealsMasks, chain: Chain, grid: Array | np.ndarray, keys: Array
    ) -> RevealSchedule:
        """Draws the order of all masks, and the rounds of those that the grid reveals.

        If the grid ends at s > 0, masks remain. Known tokens come first in the order.
        """
        times, masks = jnp.asarray(grid)[::-1], process.is_noise(chain.z)
        levels, end = process.schedule.alpha(times), times[-1] <= 0.0
        # For t < 1: the distribution of the draws given that no mask has been revealed before.
        since = jnp.where(times[0] >= 1.0, 0.0, self.alpha_0 * levels[0])
        draws = since + (1.0 - since) * uniforms(keys, chain.z.shape[1])
        first = masks & (draws < self.alpha_0)
        rank = ranks(
            draws, jnp.logical_not(masks), first,
            alpha_0=self.alpha_0, sorted_rest=jnp.ones((len(draws), 1), bool),
        )  # fmt: skip
        reached = masks & (end | (draws < self.alpha_0 * levels[-1]))
        found = _rounds(draws, rank, levels, alpha_0=self.alpha_0)
        found = numbered(jnp.where(reached, found, NEVER))
        rounds = jnp.where(reached, found, NEVER)
        return RevealSchedule(rounds, jnp.zeros_like(draws), rank)

    def diffused_share(self, process: RevealsMasks, s: Array, t: Array) -> Array:
        """P(a mask at t is drawn by diffusion and revealed in the step to s)."""
        early, late = (self.alpha_0 * process.schedule.alpha(time) for time in (s, t))
        return (early - late) / jnp.maximum(1.0 - late, 1e-6)

    def per_round(self, length: int) -> int:
        """Returns the largest number of positions of a round."""
        return length if self.alpha_0 > 0.0 else 1

    def rounds(self, length: int, steps: int) -> int:
        """Returns the largest number of rounds for a text of this length."""
        return length if self.alpha_0 < 1.0 else min(steps, length)

    def is_cached(self, denoiser: Denoiser) -> bool:
        """Returns whether keys and values are cached with this network."""
        return self.cached and denoiser.ordered.append is not None

    def positions_read(self, process: RevealsMasks, grid: np.ndarray, length: int) -> float:
        """Returns about how many positions are read with a cache.

        An evaluation has as many places for tokens of the last round as for masks of its own.
        """
        few, wide, single = self._evaluations(process, grid, length)
        return 2.0 * (wide * few + single)

    def _evaluations(
        self, process: RevealsMasks, grid: np.ndarray, length: int
    ) -> tuple[int, int, int]:
        """Returns (positions of a round of diffusion, evaluations of such rounds, of tokens).

        The mean number of tokens of each kind; every round has at least one. The last round of
        diffusion is read by one evaluation more.
        """
        if not self.alpha_0 > 0.0:
            return 1, 0, length
        few = reveal.independent_capacity(process, grid, length, self.diffused_share)
        diffused = round(self.alpha_0 * length)
        return few, min(len(grid) - 1, diffused) + 1, length - diffused

    def run_cached(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        schedule: RevealSchedule,
        *,
        keys: Array,
        grid: np.ndarray,
    ) -> Chain:
        """Draws the same as `reveal.run` with this schedule, using a cache.

        An evaluation reads the tokens of the previous round and the masks of its own. There are two
        programs: one for rounds of diffusion, with a number of positions that a step rarely exceeds
        (or all positions, if a step exceeds it), and one for single tokens from left to right.
        """
        _rows, length = chain.z.shape
        plan = _Plan(denoiser, self.transform, schedule, process.mask_id, keys)
        drawn = schedule.round < NEVER
        counts = jnp.max(jnp.where(drawn, schedule.round + 1, 0), axis=1)
        cache = _with_known(denoiser, chain, schedule, drawn)
        state = Reading(jnp.int32(0), chain.z, chain.confidence, cache)
        few, wide, single = self._evaluations(process, grid, length)
        if self.alpha_0 > 0.0:
            sizes = _sizes(schedule.round, drawn)
            # One more evaluation than there are large rounds: it reads the tokens of the last one.
            large = jnp.max(jnp.where(sizes > 1, jnp.arange(length) + 2, 0))
            end = jnp.minimum(large, jnp.max(counts))
            programs = [partial(plan.until, end, size, wide) for size in {few: 0, length: 0}]
            if len(programs) == 1:
                state = programs[0](state)
            else:
                state = jax.lax.cond(jnp.max(sizes) <= few, *programs, state)
        state = plan.until(jnp.max(counts), 1, single, state)
        return chain._replace(
            z=state.z, confidence=state.confidence, evaluations=chain.evaluations + counts
        )


def _rounds(draws: Array, rank: Array, levels: Array, *, alpha_0: float) -> Array:
    """Returns the round in which each position is revealed, from 0 on: int32 [B, L].

    Tokens with a draw below alpha_0 are revealed in T rounds: in round i if alpha_0 levels_i <=
    draw < alpha_0 levels_{i+1}; draws outside belong to the first or last round. Each other token
    has its own round, in the order of the ranks.

    levels  [T + 1], alpha at the times of the grid, increasing
    """
    count = len(levels) - 1
    step = jnp.searchsorted(alpha_0 * levels[1:-1], draws, side="right").astype(jnp.int32)
    return jnp.where(draws < alpha_0, step, count + rank)


class Reading(NamedTuple):
    """State between two evaluations with a cache.

    number  int32 [], index of the next evaluation, which draws the round with this index
    z, confidence  as in `Chain`
    cache   of the tokens of the rounds before the last one
    """

    number: Array
    z: Array
    confidence: Array
    cache: Any


def _sizes(round: Array, drawn: Array) -> Array:
    """Counts the positions of each round: int32 [B, L]."""
    rows = jnp.arange(len(round))[:, None]
    return jnp.zeros_like(round).at[rows, round].add(drawn.astype(round.dtype), mode="drop")


def _with_known(denoiser: Denoiser, chain: Chain, schedule: RevealSchedule, drawn: Array) -> Any:
    """Returns the cache of the tokens that are already known in the chain."""
    rows, length = chain.z.shape
    empty, known = denoiser.ordered.empty_cache(rows, length), jnp.logical_not(drawn)
    place = jnp.broadcast_to(jnp.arange(length), chain.z.shape)

    def read(cache: Any) -> Any:
        zeros = jnp.zeros(rows)
        return denoiser.ordered.append(chain.z, zeros, place, schedule.rank, known, cache)[1]

    return jax.lax.cond(jnp.any(known), read, lambda cache: cache, empty)


class _Plan(NamedTuple):
    """Evaluations of a run: the network, the schedule and the keys that all of them share."""

    denoiser: Denoiser
    transform: Transform
    schedule: RevealSchedule
    mask_id: int
    keys: Array

    def until(self, end: Array, size: int, number: int, state: Reading) -> Reading:
        """Draws the rounds before `end`, about `number`, of at most `size` positions each."""
        # Positions in the order of drawing, and where each round begins in it.
        key = jnp.where(self.schedule.round < NEVER, self.schedule.rank, NEVER)
        order = jnp.argsort(key, axis=1, stable=True)
        order = jnp.pad(order, ((0, 0), (0, size)))
        ascending = jnp.take_along_axis(self.schedule.round, order, axis=1)
        ascending = ascending.at[:, self.schedule.round.shape[1] :].set(NEVER)
        with turns(number):
            return jax.lax.while_loop(
                lambda state: state.number < end,
                lambda state: self._draw(state, size, order, ascending),
                state,
            )

    def _draw(self, state: Reading, size: int, order: Array, ascending: Array) -> Reading:
        """Draws the positions of one round."""
        length = state.z.shape[1]
        (before, was), (now, is_now) = (
            _of_round(order, ascending, number, size) for number in (state.number - 1, state.number)
        )
        place, keep = jnp.concatenate([before, now], 1), jnp.concatenate([was, is_now], 1)
        held = jnp.take_along_axis(state.z, before, axis=1)
        z = jnp.concatenate([held, jnp.full_like(now, self.mask_id)], axis=1)
        rank = jnp.take_along_axis(self.schedule.rank, place, axis=1)
        # Padding comes last, so that other positions do not see it.
        rank = jnp.where(keep, rank, length)
        stays = keep.at[:, size:].set(False)
        append = self.denoiser.ordered.append
        h, cache = append(z, jnp.zeros(len(z)), place, rank, stays, state.cache)
        tokens, confidence = draw_from(self.denoiser, self.transform, h[:, size:], now, self.keys)
        where, rows = jnp.where(is_now, now, length), jnp.arange(len(z))[:, None]
        return Reading(
            state.number + 1,
            state.z.at[rows, where].set(tokens, mode="drop"),
            state.confidence.at[rows, where].set(confidence, mode="drop"),
            cache,
        )


def _of_round(order: Array, ascending: Array, number: Array, size: int) -> tuple[Array, Array]:
    """Returns (positions [B, size] from the beginning of a round, which of them belong to it)."""
    begin = jnp.sum(ascending < number, axis=1, dtype=jnp.int32)
    slots = jnp.minimum(begin[:, None] + jnp.arange(size), order.shape[1] - 1)
    inside = jnp.take_along_axis(ascending, slots, axis=1) == number
    return jnp.take_along_axis(order, slots, axis=1), inside
