"""Sampling with a reveal schedule that is drawn before the network is called: docs/samplers.md."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.protocols import Array, Denoiser, Process
from md4_jax.runtime.scopes import turns
from md4_jax.runtime.sharding import token_groups
from md4_jax.samplers.chain import (
    NEVER,
    Chain,
    RevealSchedule,
    RevealsIndependently,
    RevealsInOrder,
    SamplerStep,
)
from md4_jax.samplers.draw import draw_at, reading
from md4_jax.samplers.transforms import Transform

# Round of the masks that remain after a step's own schedule: the last one, at time 0.
LAST = NEVER - 1
# (process, s, t) -> P(z_s is clean | z_t is the mask).
RevealProbability = Callable[[RevealsMasks, Array, Array], Array]


def has_schedule(step: SamplerStep, process: Process) -> bool:
    """Returns whether the step chooses the masks to reveal independently of the network."""
    shown = isinstance(process, RevealsMasks) and process.shows_clean
    return shown and isinstance(step, RevealsIndependently | RevealsInOrder)


def schedule_of(
    step: RevealsIndependently | RevealsInOrder,
    process: RevealsMasks,
    chain: Chain,
    grid: np.ndarray,
    keys: Array,
) -> RevealSchedule:
    """Draws the schedule of a whole run; the last round holds the masks left at t = 0."""
    if isinstance(step, RevealsInOrder):
        schedule = step.schedule(process, chain, grid, keys)
    else:
        schedule = independent_schedule(process, chain, grid, keys, step.reveal_probability)
    left = process.is_noise(chain.z) & (schedule.round == NEVER)
    return schedule._replace(
        round=jnp.where(left, LAST, schedule.round), time=jnp.where(left, 0.0, schedule.time)
    )


def capacity_of(
    step: RevealsIndependently | RevealsInOrder,
    process: RevealsMasks,
    grid: np.ndarray,
    length: int,
) -> int:
    """Returns the number of positions that one network evaluation can draw."""
    # 3.6 times as fast as capacity L at V = 50257, 1024 tokens in 8 steps on CPU; 1.2 at V = 27.
    if isinstance(step, RevealsInOrder):
        return step.per_round(length)
    return independent_capacity(process, grid, length, step.reveal_probability)


class Passes(NamedTuple):
    """Network evaluations that draw the positions of a schedule, in their order.

    start     int32 [B, L], symbols before the first one
    schedule  rounds and times of the positions
    order     int32 [B, L + capacity], positions in the order of drawing
    number    int32 like order, the evaluation that draws each; NEVER if none does
    round     int32 like order, the round of each
    count     int32 [B], evaluations of each sequence
    """

    start: Array
    schedule: RevealSchedule
    order: Array
    number: Array
    round: Array
    count: Array


class Drawing(NamedTuple):
    """State between two evaluations.

    number      int32 [], index of the next evaluation
    begin       int32 [B], index in `Passes.order` at which it begins
    z           int32 [B, L], symbols so far
    confidence  float32 [B, L], as in `Chain`
    """

    number: Array
    begin: Array
    z: Array
    confidence: Array


def run(
    denoiser: Denoiser,
    transform: Transform,
    chain: Chain,
    schedule: RevealSchedule,
    *,
    keys: Array,
    capacity: int,
) -> Chain:
    """Draws every scheduled position, round by round. All of them must be masks.

    Each sequence of a batch continues with its own next round, so that empty rounds take no network
    evaluation. One evaluation draws up to `capacity` positions. A round with more takes several
    evaluations, which see only the tokens of earlier rounds.
    """
    passes = passes_of(chain.z, schedule, capacity)

    def body(state: Drawing) -> Drawing:
        return one_pass(denoiser, transform, passes, state, keys=keys, capacity=capacity)

    left = lambda state: state.number < jnp.max(passes.count)  # noqa: E731
    drawn = jax.lax.while_loop(left, body, begin(chain))
    return chain._replace(
        z=drawn.z, confidence=drawn.confidence, evaluations=chain.evaluations + passes.count
    )


def begin(chain: Chain) -> Drawing:
    """Returns the state before the first evaluation."""
    return Drawing(jnp.int32(0), jnp.zeros(len(chain.z), jnp.int32), chain.z, chain.confidence)


def passes_of(start: Array, schedule: RevealSchedule, capacity: int) -> Passes:
    """Returns the evaluations for a schedule, each of at most `capacity` positions."""
    order = jnp.argsort(schedule.round, axis=1, stable=True)
    rounds = jnp.take_along_axis(schedule.round, order, axis=1)
    passes = _passes(rounds, capacity)
    count = jnp.max(jnp.where(rounds < NEVER, passes + 1, 0), axis=1)
    passes = jnp.where(rounds < NEVER, passes, NEVER)
    padded = (
        jnp.pad(x, ((0, 0), (0, _shared(capacity))), constant_values=fill)
        for x, fill in ((order, 0), (passes, NEVER), (rounds, NEVER))
    )
    return Passes(start, schedule, *padded, count)


def one_pass(
    denoiser: Denoiser,
    transform: Transform,
    passes: Passes,
    state: Drawing,
    *,
    keys: Array,
    capacity: int,
) -> Drawing:
    """Draws the positions of one evaluation."""
    schedule, length = passes.schedule, passes.start.shape[1]
    slots = state.begin[:, None] + jnp.arange(_shared(capacity))
    index = jnp.take_along_axis(passes.order, slots, axis=1)
    valid = jnp.take_along_axis(passes.number, slots, axis=1) == state.number
    now = jnp.take_along_axis(passes.round, slots[:, :1], axis=1)
    time = jnp.take_along_axis(schedule.time, index[:, :1], axis=1)[:, 0]
    later = (schedule.round >= now) & (schedule.round < NEVER)
    z = jnp.where(later, passes.start, state.z)
    reader = denoiser if schedule.rank is None else reading(denoiser, schedule.rank)
    tokens, confidence = draw_at(reader, schedule.sharper(transform, index), z, time, index, keys)
    where = jnp.where(valid, index, length)
    put = jax.vmap(lambda row, where, new: row.at[where].set(new, mode="drop"))
    return Drawing(
        state.number + 1,
        state.begin + jnp.sum(valid, axis=1, dtype=jnp.int32),
        put(state.z, where, tokens),
        put(state.confidence, where, confidence),
    )


def _shared(capacity: int) -> int:
    """Rounds a number of positions up to one that the devices of a sequence can share."""
    parts = token_groups()[1]
    return -(-capacity // parts) * parts


def _passes(rounds: Array, capacity: int) -> Array:
    """Number of the evaluation that draws each position, from ascending rounds: [B, L]."""
    here = jnp.arange(rounds.shape[1])[None]
    first = jnp.pad(rounds[:, 1:] != rounds[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    rank = here - jax.lax.cummax(jnp.where(first, here, 0), axis=1)
    return jnp.cumsum(first | (rank % capacity == 0), axis=1, dtype=jnp.int32) - 1


def masks_left(process: RevealsMasks, chain: Chain, t: Array) -> Array:
    """Returns floor((1 - alpha_t) n) for the n positions outside the prompt: int32 [B, *t.shape].

    Samplers with fixed numbers of tokens leave this number of masks at t.
    """
    free = jnp.sum(~chain.prompt_mask, axis=1)
    free = free.reshape(-1, *[1] * jnp.ndim(t))
    return jnp.floor(process.schedule.one_minus_alpha(t) * free + 1e-4).astype(jnp.int32)


def draw_where(
    denoiser: Denoiser, transform: Transform, chain: Chain, chosen: Array, *, t: Array, keys: Array,
) -> Chain:  # fmt: skip
    """Draws the chosen positions [B, L] from the denoiser at time t.

    The head is computed at an eighth of the positions, or at all of them if more are chosen. The
    network is not evaluated if none is chosen.
    """
    length = chain.z.shape[1]
    schedule = RevealSchedule(jnp.where(chosen, 0, NEVER), jnp.full(chosen.shape, t, jnp.float32))
    # 2.3 times as fast as capacity L for `remask` at V = 50257, 1024 tokens in 32 steps on CPU.
    few = min(length, max(16, -(-length // 8)))

    def with_capacity(capacity: int) -> Chain:
        with turns(1):
            return run(denoiser, transform, chain, schedule, keys=keys, capacity=capacity)

    if few == length:
        return with_capacity(length)
    fits = jnp.max(jnp.sum(chosen, axis=1)) <= few
    return jax.lax.cond(fits, lambda: with_capacity(few), lambda: with_capacity(length))


def exchange(
    denoiser: Denoiser,
    transform: Transform,
    process: RevealsMasks,
    chain: Chain,
    probabilities: tuple[Array, Array],
    *,
    t: Array,
    keys: Array,
) -> Chain:
    """Remasks tokens and reveals masks independently, with these two probabilities.

    Each is [], [B, 1] or [B, L]. Revealed tokens are drawn at time t, from a network evaluation
    that still sees the remasked tokens. Prompts do not change.
    """
    remasked, revealed = probabilities
    take_keys, reveal_keys, token_keys = split_keys(keys, 3)
    masks, length = process.is_noise(chain.z), chain.z.shape[1]
    taken = ~masks & ~chain.prompt_mask & (uniforms(take_keys, length) < remasked)
    chosen = masks & (uniforms(reveal_keys, length) < revealed)
    out = draw_where(denoiser, transform, chain, chosen, t=t, keys=token_keys)
    return out._replace(
        z=jnp.where(taken, process.mask_id, out.z),
        confidence=jnp.where(taken, 0.0, out.confidence),
    )


def independent_schedule(
    process: RevealsMasks,
    chain: Chain,
    grid: np.ndarray,
    keys: Array,
    probability: RevealProbability,
) -> RevealSchedule:
    """Draws the step that reveals each mask, for steps that reveal masks independently.

    A mask survives the first j steps with probability prod (1 - p_i). So it is revealed at the
    first step at which the sum of -log(1 - p_i) reaches an exponential draw; NEVER if none does.
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
    """Returns a number of positions that a step of a sequence rarely exceeds.

    It is the mean number of the largest step plus four binomial standard deviations.
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
    """Reveal probability of each step, in the order of sampling: [T]."""
    times = jnp.asarray(grid[::-1])
    return jnp.clip(probability(process, times[1:], times[:-1]), 0.0, 1.0)
