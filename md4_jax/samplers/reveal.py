"""Reveals whose positions are chosen before the network is called: docs/samplers.md."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.scheduled import uniforms
from md4_jax.protocols import Array, Denoiser
from md4_jax.samplers.chain import NEVER, Chain, RevealSchedule
from md4_jax.samplers.draw import draw_at
from md4_jax.samplers.transforms import Transform

# P(z_s is clean | z_t is the mask) of one step: (process, s, t) -> probability.
Chance = Callable[[object, Array, Array], Array]


def run(
    denoiser: Denoiser,
    transform: Transform,
    process,
    chain: Chain,
    plan: RevealSchedule,
    *,
    keys: Array,
    room: int,
) -> Chain:
    """Draws every planned position, a round of each sequence at a time.

    All sequences of a batch go on to their own next round, so that a step at which a sequence
    draws nothing costs it no network evaluation. `room` positions fit one evaluation; a
    round with more takes several, all of which see the tokens of earlier rounds alone.
    """
    length = chain.z.shape[1]
    order = jnp.argsort(plan.round, axis=1, stable=True)
    rounds = jnp.take_along_axis(plan.round, order, axis=1)
    passes = _passes(rounds, room)
    count = jnp.max(jnp.where(rounds < NEVER, passes + 1, 0), axis=1)
    passes = jnp.where(rounds < NEVER, passes, NEVER)
    order, passes, rounds = (
        jnp.pad(x, ((0, 0), (0, room)), constant_values=fill)
        for x, fill in ((order, 0), (passes, NEVER), (rounds, NEVER))
    )

    def body(state):
        number, begin, z, confidence = state
        slots = begin[:, None] + jnp.arange(room)
        index = jnp.take_along_axis(order, slots, axis=1)
        valid = jnp.take_along_axis(passes, slots, axis=1) == number
        now = jnp.take_along_axis(rounds, slots[:, :1], axis=1)
        time = jnp.take_along_axis(plan.time, index[:, :1], axis=1)[:, 0]
        later = (plan.round >= now) & (plan.round < NEVER)
        seen = jnp.where(later, process.mask_id, z)
        tokens, chances = draw_at(denoiser, transform, seen, time, index, keys)
        where = jnp.where(valid, index, length)
        put = jax.vmap(lambda row, where, new: row.at[where].set(new, mode="drop"))
        begin = begin + jnp.sum(valid, axis=1, dtype=jnp.int32)
        return number + 1, begin, put(z, where, tokens), put(confidence, where, chances)

    start = (jnp.int32(0), jnp.zeros(len(chain.z), jnp.int32), chain.z, chain.confidence)
    _, _, z, confidence = jax.lax.while_loop(lambda state: state[0] < jnp.max(count), body, start)
    return chain._replace(z=z, confidence=confidence, evaluations=chain.evaluations + count)


def _passes(rounds: Array, room: int) -> Array:
    """The evaluation at which each position is drawn, from its round, ascending: [B, L]."""
    here = jnp.arange(rounds.shape[1])[None]
    first = jnp.pad(rounds[:, 1:] != rounds[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    rank = here - jax.lax.cummax(jnp.where(first, here, 0), axis=1)
    return jnp.cumsum(first | (rank % room == 0), axis=1, dtype=jnp.int32) - 1


def draw_where(
    denoiser: Denoiser,
    transform: Transform,
    process,
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
    plan = RevealSchedule(jnp.where(chosen, 0, NEVER), jnp.full(chosen.shape, t, jnp.float32))
    few = min(length, max(16, -(-length // 8)))

    def with_room(room: int):
        return lambda: run(denoiser, transform, process, chain, plan, keys=keys, room=room)

    if few == length:
        return with_room(length)()
    fits = jnp.max(jnp.sum(chosen, axis=1)) <= few
    return jax.lax.cond(fits, with_room(few), with_room(length))


def masked(process, chain: Chain) -> Array:
    """The positions that hold a mask, which are the ones to be drawn: bool [B, L]."""
    return process.is_noise(chain.z)


def plan_of(
    step, process, chain: Chain, grid: np.ndarray, keys: Array
) -> tuple[RevealSchedule, int, bool] | None:
    """(all of the step's choices, room for one evaluation, whether none can be left at the end).

    None if its choices need the network.
    """
    length = chain.z.shape[1]
    if hasattr(step, "plan"):
        with jax.ensure_compile_time_eval():
            left = float(process.schedule.one_minus_alpha(jnp.float32(grid[0])))
        return step.plan(process, chain, grid, keys), step.room(length), left <= 0.0
    if isinstance(process, RevealsMasks) and hasattr(step, "chance"):
        plan = plan_by_chance(process, chain, grid, keys, step.chance)
        with jax.ensure_compile_time_eval():
            last = float(_chances(process, grid, step.chance)[-1])
        return plan, room_by_chance(process, grid, length, step.chance), last >= 1.0
    return None


def plan_by_chance(
    process, chain: Chain, grid: np.ndarray, keys: Array, chance: Chance
) -> RevealSchedule:
    """The step at which each mask is revealed, drawn from the law of independent steps.

    A mask survives the steps with probability prod (1 - chance); its step is the first whose
    sum of -log(1 - chance) reaches an exponential draw. Masks that survive all have NEVER.
    """
    hazard = jnp.cumsum(-jnp.log1p(-_chances(process, grid, chance)))
    draws = jax.vmap(lambda key: jax.random.exponential(key, chain.z.shape[1:]))(keys)
    step = jnp.searchsorted(hazard, draws).astype(jnp.int32)
    reached = masked(process, chain) & (step < len(hazard))
    times = jnp.asarray(grid[:0:-1])
    return RevealSchedule(
        jnp.where(reached, step, NEVER), times[jnp.minimum(step, len(hazard) - 1)]
    )


def room_by_chance(process, grid: np.ndarray, length: int, chance: Chance) -> int:
    """Positions of one step that are hardly ever exceeded: mean and four standard deviations."""
    with jax.ensure_compile_time_eval():
        each = np.asarray(_chances(process, grid, chance), np.float64)
    left = np.concatenate([[1.0], np.cumprod(1.0 - each)[:-1]])
    share = float(np.max(left * each))
    most = length * share + 4.0 * math.sqrt(length * share * (1.0 - share))
    return min(length, 8 * math.ceil((most + 1.0) / 8.0))


def _chances(process, grid: np.ndarray, chance: Chance) -> Array:
    """Of the steps in the order in which they are taken, [T]."""
    times = jnp.asarray(grid[::-1])
    return jnp.clip(chance(process, times[1:], times[:-1]), 0.0, 1.0)


def step_by_chance(
    step: Any, denoiser: Denoiser, process, chain: Chain, s: Array, t: Array, keys: Array
) -> Chain:
    """Each mask is revealed with probability step.chance, and then its token is drawn."""
    reveal_keys, token_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    revealed = uniforms(reveal_keys, chain.z.shape[1]) < step.chance(process, s, t)
    chosen = masked(process, chain) & revealed
    return draw_where(denoiser, step.transform, process, chain, chosen, t=t, keys=token_keys)
