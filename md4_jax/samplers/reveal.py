"""Masks revealed by a schedule that is drawn before the network is called: docs/samplers.md."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Denoiser, Process
from md4_jax.samplers.chain import (
    NEVER,
    Chain,
    RevealSchedule,
    RevealsIndependently,
    RevealsInOrder,
    SamplerStep,
)
from md4_jax.samplers.draw import draw_at
from md4_jax.samplers.transforms import Transform

# The round of the masks that a schedule leaves: they are drawn after all others, at time 0.
LAST = NEVER - 1
# (process, s, t) -> P(z_s is clean | z_t is the mask).
RevealProbability = Callable[[RevealsMasks, Array, Array], Array]


def has_schedule(step: SamplerStep, process: Process) -> bool:
    """Whether which masks a step reveals does not depend on the network."""
    shown = isinstance(process, RevealsMasks) and process.shows_clean
    return shown and isinstance(step, RevealsIndependently | RevealsInOrder)


def schedule_of(
    step: RevealsIndependently | RevealsInOrder,
    process: RevealsMasks,
    chain: Chain,
    grid: np.ndarray,
    keys: Array,
) -> RevealSchedule:
    """Draws the schedule of a whole run; masks that are left at t = 0 are its last round."""
    if isinstance(step, RevealsInOrder):
        schedule = step.schedule(process, chain, grid, keys)
    else:
        schedule = independent_schedule(process, chain, grid, keys, step.reveal_probability)
    left = process.is_noise(chain.z) & (schedule.round == NEVER)
    return RevealSchedule(
        jnp.where(left, LAST, schedule.round), jnp.where(left, 0.0, schedule.time)
    )


def capacity_of(
    step: RevealsIndependently | RevealsInOrder,
    process: RevealsMasks,
    grid: np.ndarray,
    length: int,
) -> int:
    """Returns how many positions one evaluation draws."""
    if isinstance(step, RevealsInOrder):
        return step.per_round(length)
    return independent_capacity(process, grid, length, step.reveal_probability)


def run(
    denoiser: Denoiser,
    transform: Transform,
    chain: Chain,
    schedule: RevealSchedule,
    *,
    keys: Array,
    capacity: int,
) -> Chain:
    """Draws every scheduled position, all of them masks, a round of each sequence at a time.

    All sequences of a batch go on to their own next round, so that a step at which a sequence
    draws nothing costs it no network evaluation. One evaluation draws `capacity` positions; a
    round with more takes several, all of which see the tokens of earlier rounds alone.
    """
    length = chain.z.shape[1]
    order = jnp.argsort(schedule.round, axis=1, stable=True)
    rounds = jnp.take_along_axis(schedule.round, order, axis=1)
    passes = _passes(rounds, capacity)
    count = jnp.max(jnp.where(rounds < NEVER, passes + 1, 0), axis=1)
    passes = jnp.where(rounds < NEVER, passes, NEVER)
    order, passes, rounds = (
        jnp.pad(x, ((0, 0), (0, capacity)), constant_values=fill)
        for x, fill in ((order, 0), (passes, NEVER), (rounds, NEVER))
    )

    def body(state):
        number, begin, z, confidence = state
        slots = begin[:, None] + jnp.arange(capacity)
        index = jnp.take_along_axis(order, slots, axis=1)
        valid = jnp.take_along_axis(passes, slots, axis=1) == number
        now = jnp.take_along_axis(rounds, slots[:, :1], axis=1)
        time = jnp.take_along_axis(schedule.time, index[:, :1], axis=1)[:, 0]
        later = (schedule.round >= now) & (schedule.round < NEVER)
        seen = jnp.where(later, chain.z, z)
        tokens, chances = draw_at(denoiser, transform, seen, time, index, keys)
        where = jnp.where(valid, index, length)
        put = jax.vmap(lambda row, where, new: row.at[where].set(new, mode="drop"))
        begin = begin + jnp.sum(valid, axis=1, dtype=jnp.int32)
        return number + 1, begin, put(z, where, tokens), put(confidence, where, chances)

    start = (jnp.int32(0), jnp.zeros(len(chain.z), jnp.int32), chain.z, chain.confidence)
    _, _, z, confidence = jax.lax.while_loop(lambda state: state[0] < jnp.max(count), body, start)
    return chain._replace(z=z, confidence=confidence, evaluations=chain.evaluations + count)


def _passes(rounds: Array, capacity: int) -> Array:
    """The evaluation at which each position is drawn, from its round, ascending: [B, L]."""
    here = jnp.arange(rounds.shape[1])[None]
    first = jnp.pad(rounds[:, 1:] != rounds[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    rank = here - jax.lax.cummax(jnp.where(first, here, 0), axis=1)
    return jnp.cumsum(first | (rank % capacity == 0), axis=1, dtype=jnp.int32) - 1


def draw_where(
    denoiser: Denoiser,
    transform: Transform,
    chain: Chain,
    chosen: Array,
    *,
    t: Array,
    keys: Array,
) -> Chain:
    """Draws the chosen positions [B, L] from the denoiser at time t: one round.

    The head is computed at an eighth of the positions, or where more are chosen at all of
    them; the network not at all if none is.
    """
    length = chain.z.shape[1]
    schedule = RevealSchedule(jnp.where(chosen, 0, NEVER), jnp.full(chosen.shape, t, jnp.float32))
    few = min(length, max(16, -(-length // 8)))

    def with_capacity(capacity: int):
        return lambda: run(denoiser, transform, chain, schedule, keys=keys, capacity=capacity)

    if few == length:
        return with_capacity(length)()
    fits = jnp.max(jnp.sum(chosen, axis=1)) <= few
    return jax.lax.cond(fits, with_capacity(few), with_capacity(length))


def independent_schedule(
    process: RevealsMasks,
    chain: Chain,
    grid: np.ndarray,
    keys: Array,
    probability: RevealProbability,
) -> RevealSchedule:
    """Draws the step at which each mask is revealed, where each step reveals it independently.

    A mask survives the steps with probability prod (1 - p); its step is the first whose sum of
    -log(1 - p) reaches an exponential draw. Masks that survive all have NEVER.
    """
    hazard = jnp.cumsum(-jnp.log1p(-_probabilities(process, grid, probability)))
    draws = jax.vmap(lambda key: jax.random.exponential(key, chain.z.shape[1:]))(keys)
    step = jnp.searchsorted(hazard, draws).astype(jnp.int32)
    reached = process.is_noise(chain.z) & (step < len(hazard))
    times = jnp.asarray(grid[:0:-1])
    return RevealSchedule(
        jnp.where(reached, step, NEVER), times[jnp.minimum(step, len(hazard) - 1)]
    )


def independent_capacity(
    process: RevealsMasks, grid: np.ndarray, length: int, probability: RevealProbability
) -> int:
    """Returns a number of positions that a step hardly ever exceeds.

    It is the mean of the largest step and four standard deviations of the binomial.
    """
    with jax.ensure_compile_time_eval():
        each = np.asarray(_probabilities(process, grid, probability), np.float64)
    left = np.concatenate([[1.0], np.cumprod(1.0 - each)[:-1]])
    largest = float(np.max(left * each))
    most = length * largest + 4.0 * math.sqrt(length * largest * (1.0 - largest))
    return min(length, 8 * math.ceil((most + 1.0) / 8.0))


def _probabilities(
    process: RevealsMasks, grid: np.ndarray, probability: RevealProbability
) -> Array:
    """The reveal probability of each step, in the order in which they are taken: [T]."""
    times = jnp.asarray(grid[::-1])
    return jnp.clip(probability(process, times[1:], times[:-1]), 0.0, 1.0)
