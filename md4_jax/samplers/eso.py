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
from md4_jax.samplers import reveal
from md4_jax.samplers.chain import NEVER, Chain, RevealSchedule
from md4_jax.samplers.draw import draw_from
from md4_jax.samplers.orders import InOrder
from md4_jax.samplers.transforms import Transform


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class Eso(InOrder):
    """Draws a text in an order that is drawn first (Eso-LM (B), arXiv:2506.01928).

    A token belongs to diffusion with probability alpha_0. In the steps of the grid, each of these
    is revealed with the probability of `ancestral`; one step draws all of its tokens at once. Then
    the others follow from left to right, each given all before it. In a random order of the
    tokens of diffusion, a prediction sees what earlier steps have revealed and, as masks, the
    tokens of its own step before it.

    alpha_0  0: from left to right alone; 1: diffusion alone. That of the objective unless given
    cached   keeps the keys and values of drawn tokens, so that a network evaluation reads only the
             tokens that are new and those to be drawn. False: the same samples, more slowly

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

        A grid that ends at s > 0 leaves masks. What is known comes first in the order.
        """
        times, masks = jnp.asarray(grid)[::-1], process.is_noise(chain.z)
        levels, end = process.schedule.alpha(times), times[-1] <= 0.0
        # Of a chain at t < 1: the law of the draws given that no mask has been revealed before.
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
        """P(a mask of diffusion's is revealed in the step to s), of all masks at t."""
        early, late = (self.alpha_0 * process.schedule.alpha(time) for time in (s, t))
        return (early - late) / jnp.maximum(1.0 - late, 1e-6)

    def per_round(self, length: int) -> int:
        """Returns how many positions a round reveals at most."""
        return length if self.alpha_0 > 0.0 else 1

    def rounds(self, length: int, steps: int) -> int:
        """Returns how many rounds a text of this length takes at most."""
        return length if self.alpha_0 < 1.0 else min(steps, length)

    def is_cached(self, denoiser: Denoiser) -> bool:
        """Returns whether keys and values are kept with this network."""
        return self.cached and denoiser.ordered.append is not None

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
        """Draws what `reveal.run` draws by the schedule, with keys and values kept.

        An evaluation reads the tokens of the round before and the masks of its own. Two programs do
        so: one for as many positions as a step of diffusion rarely exceeds, or for all if one does,
        and one for the single tokens that are drawn from left to right.
        """
        _rows, length = chain.z.shape
        plan = _Plan(denoiser, self.transform, schedule, process.mask_id, keys)
        drawn = schedule.round < NEVER
        counts = jnp.max(jnp.where(drawn, schedule.round + 1, 0), axis=1)
        cache = _with_known(denoiser, chain, schedule, drawn)
        state = Reading(jnp.int32(0), chain.z, chain.confidence, cache)
        if self.alpha_0 > 0.0:
            sizes = _sizes(schedule.round, drawn)
            # One more evaluation than there are large rounds reads the tokens of the last of them.
            large = jnp.max(jnp.where(sizes > 1, jnp.arange(length) + 2, 0))
            few = reveal.independent_capacity(process, grid, length, self.diffused_share)
            wide = [partial(plan.until, jnp.minimum(large, jnp.max(counts)), size) for size in
                    dict.fromkeys((few, length))]  # fmt: skip
            if len(wide) == 1:
                state = wide[0](state)
            else:
                state = jax.lax.cond(jnp.max(sizes) <= few, *wide, state)
        state = plan.until(jnp.max(counts), 1, state)
        return chain._replace(
            z=state.z, confidence=state.confidence, evaluations=chain.evaluations + counts
        )


def _rounds(draws: Array, rank: Array, levels: Array, *, alpha_0: float) -> Array:
    """Returns the round in which each position is revealed, from 0 on: int32 [B, L].

    Tokens with a draw below alpha_0 are revealed in T rounds: in round i if alpha_0 levels_i <=
    draw < alpha_0 levels_{i+1}; the first and the last take what is beyond. Each other token has a
    round of its own, in the order of the ranks.

    levels  [T + 1], alpha at the times of the grid, rising
    """
    count = len(levels) - 1
    step = jnp.searchsorted(alpha_0 * levels[1:-1], draws, side="right").astype(jnp.int32)
    return jnp.where(draws < alpha_0, step, count + rank)


class Reading(NamedTuple):
    """State between two evaluations with a cache.

    number  int32 [], the evaluation to come, which draws the round of that number
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
    """Returns the cache of the tokens that the chain already has."""
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

    def until(self, end: Array, size: int, state: Reading) -> Reading:
        """Draws the rounds before `end`, of at most `size` positions each."""
        # Positions in the order in which they are drawn, and where each round of it begins.
        key = jnp.where(self.schedule.round < NEVER, self.schedule.rank, NEVER)
        order = jnp.argsort(key, axis=1, stable=True)
        order = jnp.pad(order, ((0, 0), (0, size)))
        ascending = jnp.take_along_axis(self.schedule.round, order, axis=1)
        ascending = ascending.at[:, self.schedule.round.shape[1] :].set(NEVER)
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
        # What only fills the shape comes last, so that nothing else sees it.
        rank = jnp.where(keep, rank, length)
        stays = keep.at[:, size:].set(False)
        append = self.denoiser.ordered.append
        h, cache = append(z, jnp.zeros(len(z)), place, rank, stays, state.cache)
        tokens, chances = draw_from(self.denoiser, self.transform, h[:, size:], now, self.keys)
        where, rows = jnp.where(is_now, now, length), jnp.arange(len(z))[:, None]
        return Reading(
            state.number + 1,
            state.z.at[rows, where].set(tokens, mode="drop"),
            state.confidence.at[rows, where].set(chances, mode="drop"),
            cache,
        )


def _of_round(order: Array, ascending: Array, number: Array, size: int) -> tuple[Array, Array]:
    """Returns (positions [B, size] from the beginning of a round on, which of them are of it)."""
    begin = jnp.sum(ascending < number, axis=1, dtype=jnp.int32)
    slots = jnp.minimum(begin[:, None] + jnp.arange(size), order.shape[1] - 1)
    inside = jnp.take_along_axis(ascending, slots, axis=1) == number
    return jnp.take_along_axis(order, slots, axis=1), inside
