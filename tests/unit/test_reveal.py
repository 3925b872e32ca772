"""Reveal schedules: rounds, capacity, evaluations, their law, and features of few positions."""

import functools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extension.sampler import EvenFirst
from scipy import stats

from md4_jax.networks.transformer import Transformer
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine, Geometric, Linear
from md4_jax.protocols import Denoiser
from md4_jax.samplers import loop, reveal
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.chain import NEVER, RevealSchedule, rounds_of
from md4_jax.samplers.eso import Eso
from md4_jax.samplers.grids import cosine, uniform
from md4_jax.samplers.orders import AnyOrder, FirstHitting
from md4_jax.samplers.transforms import Transform

N = 20_000
L, MASK = 6, 2
TABLE = exact.denoiser_of(exact.table_logits(2, L), time=1.0)


@functools.partial(jax.jit, static_argnames=("denoiser", "mask", "capacity"))
def run(z, rounds, times, keys, *, before=0, denoiser=TABLE, mask=MASK, capacity=L):
    chain = exact.chain_of(z)
    chain = chain._replace(evaluations=chain.evaluations + before)
    arguments = Transform(), chain, RevealSchedule(rounds, times)
    return reveal.run(denoiser, *arguments, keys=keys, capacity=capacity)


def random_schedule(most: int, seed: int = 0, rows: int = 64):
    """(z, rounds, times): half of the rounds empty, a quarter of the positions NEVER."""
    rng = np.random.default_rng(seed)
    rounds = 2 * rng.integers(0, most, (rows, L))
    never = rng.random((rows, L)) < 0.25
    z = np.where(never & (rng.random((rows, L)) < 0.5), 1, MASK).astype(np.int32)
    times = 1.0 - rounds / (2.0 * most)
    rounds = np.where(never, NEVER, rounds).astype(np.int32)
    return z, rounds, times.astype(np.float32)


@pytest.mark.parametrize(
    "step, steps, most",
    [
        (FirstHitting(), 3, L),
        (AnyOrder(per_step=4), 3, 2),
        (AnyOrder(per_step=0), 3, 3),
        (Eso(0.0), 3, L),
        (Eso(0.5), 3, L),
        (Eso(1.0), 3, 3),
    ],
)
def test_the_rounds_of_a_step_are_the_most_that_a_text_takes(step, steps, most):
    """Of 2000 texts of six masks some take that many; half a chance for each gives 1 / 64."""
    chain = exact.chain_of(np.full((2000, L), MASK))
    draw = jax.jit(lambda keys: step.schedule(Masking(2), chain, uniform(steps), keys).round)
    assert np.max(draw(exact.keys_for(0, 2000))) + 1 == most == rounds_of(step, L, steps)


def test_an_order_of_ones_own():
    """The example of docs/extending.md, with a model whose odd tokens repeat the one before."""

    def outputs(z, t):
        before = jnp.roll(z, 1, axis=1)
        return jnp.where((before < MASK)[..., None], 30.0 * jax.nn.one_hot(before, MASK), 0.0)

    @jax.jit
    def draw(keys):
        return loop.sample(
            Denoiser(outputs, lambda h: h), Masking(MASK), EvenFirst(),
            grid=uniform(7), keys=keys, prompt=loop.no_prompt(64, L), trace=1,
        )  # fmt: skip

    chain, frames = draw(exact.keys_for(0, 64))
    np.testing.assert_array_equal(chain.z[:, 1::2], chain.z[:, ::2])
    assert len(np.unique(chain.z, axis=0)) > 6 and (chain.evaluations == 2).all()
    masks = np.sum(frames.z[:, 0] == MASK, axis=1)
    np.testing.assert_array_equal(masks, [L, L // 2, 0])


def test_the_capacity_changes_no_token():
    """A denoiser of z and t, 64 sequences of up to 4 rounds: the same bits with 1, 3 and L."""
    arguments = *random_schedule(4), exact.keys_for(1, 64)
    whole = run(*arguments, capacity=L)
    for capacity in (1, 3):
        part = run(*arguments, capacity=capacity)
        np.testing.assert_array_equal(part.z, whole.z)
        np.testing.assert_allclose(part.confidence, whole.confidence, rtol=1e-6)
        assert (part.evaluations >= whole.evaluations).all()
    assert len(np.unique(whole.z, axis=0)) > 20


def test_the_order_of_rounds_matters_to_this_denoiser():
    """The test above has power: with all positions in one round other tokens come out."""
    z, rounds, times = random_schedule(4)
    together = np.where(rounds == NEVER, NEVER, 0).astype(np.int32)
    keys = exact.keys_for(1, 64)
    apart = run(z, rounds, np.ones_like(times), keys)
    assert (run(z, together, np.ones_like(times), keys).z != apart.z).any()


def features_of_what_is_seen(z, t):
    """The token drawn is the number of tokens seen, plus ten times t."""
    seen = jnp.sum(z != 20, axis=1) + jnp.round(10.0 * t).astype(jnp.int32)
    picks = 1e4 * jax.nn.one_hot(seen, 20)
    return jnp.broadcast_to(picks[:, None], (*z.shape, 20))


COUNTING = Denoiser(features_of_what_is_seen, lambda h: h)


@pytest.mark.parametrize("capacity", [1, 2, 6])
def test_a_round_sees_the_rounds_before_and_what_is_given(capacity):
    """Also when its positions do not fit one evaluation; NEVER stays, as a mask or as a token."""
    never = NEVER
    rounds = np.array([[0, 2, 0, 0, 2, 0], [1, never, 0, never, 1, 7], [never] * 6], np.int32)
    z = np.array([[20] * 6, [20, 5, 20, 20, 20, 20], [20, 1, 20, 20, 3, 20]], np.int32)
    times = np.where(rounds == 2, 0.5, 0.0).astype(np.float32)
    after = run(
        z, rounds, times, exact.keys_for(0, 3), denoiser=COUNTING, mask=20, capacity=capacity
    )
    expected = [[0, 9, 0, 0, 9, 0], [2, 5, 1, 20, 2, 4], z[2]]
    np.testing.assert_array_equal(after.z, expected)
    np.testing.assert_array_equal(after.confidence, rounds < never)


@pytest.mark.parametrize("capacity", [1, 3, 6])
def test_evaluations_are_those_of_each_sequence(capacity):
    """Of each round as many as its positions need, none for a round without any."""
    z, rounds, times = random_schedule(5, seed=3)
    rounds[0] = NEVER
    keys, before = exact.keys_for(0, 64), np.arange(64)
    after = run(z, rounds, times, keys, capacity=capacity, before=before)
    expected = [
        sum(-(-np.sum(row == number) // capacity) for number in set(row) - {NEVER})
        for row in rounds
    ]
    np.testing.assert_array_equal(after.evaluations, before + expected)
    assert expected[0] == 0 and max(expected) > min(expected[1:])


def test_a_sequence_does_not_wait_for_its_neighbours():
    """One, two and six rounds and none at all: tokens as when each sequence runs alone."""
    rounds = [[0] * 6, [0, 9, 0, 9, 0, 9], [5, 4, 3, 2, 1, 0], [NEVER] * 6]
    rounds, z = np.array(16 * rounds, np.int32), np.full((64, L), MASK, np.int32)
    times = np.where(rounds == 9, 0.2, 0.7).astype(np.float32)
    keys = exact.keys_for(5, 64)
    whole = run(z, rounds, times, keys, capacity=3)
    np.testing.assert_array_equal(whole.evaluations[:4], [2, 2, 6, 0])
    for row in range(8):
        one = slice(row, row + 1)
        alone = run(z[one], rounds[one], times[one], keys[one], capacity=3)
        np.testing.assert_array_equal(alone.z, whole.z[one])
        np.testing.assert_array_equal(alone.evaluations, whole.evaluations[one])


def test_draw_where_draws_the_chosen_positions_alone():
    """37, 3 and 0 of 40 positions, and then 0, 3 and 0; with none chosen there is no evaluation."""
    z = jnp.full((3, 40), 20).at[:, 7].set(4)
    chosen = np.zeros((3, 40), bool)
    chosen[0, 3:] = chosen[1, 11:14] = True
    chosen[:, 7] = False
    arguments = COUNTING, Transform(), exact.chain_of(z)
    options = dict(t=jnp.float32(0.3), keys=exact.keys_for(0, 3))
    draw = jax.jit(lambda chosen: reveal.draw_where(*arguments, chosen, **options))
    for count in (37, 0):
        chosen[0] &= count > 0
        after = draw(chosen)
        np.testing.assert_array_equal(after.z, jnp.where(chosen, 4, z))
        np.testing.assert_array_equal(after.evaluations, chosen.any(axis=1))


def rounds_by_chance(chances, z, seed=0):
    """(rounds, times) of sequences that start at z, with these chances step by step."""
    grid = uniform(len(chances))
    probability = lambda process, s, t: jnp.asarray(chances)  # noqa: E731
    keys = exact.keys_for(seed, len(z))
    schedule = reveal.independent_schedule(Masking(3), exact.chain_of(z), grid, keys, probability)
    reached = np.asarray(schedule.round) < NEVER
    at = grid[::-1][np.minimum(schedule.round, len(chances) - 1)]
    np.testing.assert_array_equal(np.asarray(schedule.time)[reached], at[reached])
    return np.asarray(schedule.round)


@pytest.mark.parametrize(
    "chances, law",
    [
        ([0.3, 0.5, 0.2], [0.3, 0.35, 0.07, 0.28]),
        ([0.0, 0.4, 0.0], [0.0, 0.4, 0.0, 0.6]),
        ([0.25, 0.5, 1.0], [0.25, 0.375, 0.375, 0.0]),
        ([1.0, 0.5, 1.0], [1.0, 0.0, 0.0, 0.0]),
        ([0.5, 0.2, 1.7], [0.5, 0.1, 0.4, 0.0]),
    ],
)
def test_the_step_at_which_a_mask_is_revealed(chances, law):
    """chance_i prod_{j<i} (1 - chance_j) and NEVER: chi-squared, n = 40,000, p > 1e-4.

    The two positions are independent; where there is a token nothing is revealed.
    """
    rounds = rounds_by_chance(chances, jnp.tile(jnp.array([[3, 3, 1]]), (N, 1)))
    assert (rounds[:, 2] == NEVER).all()
    steps, law = np.where(rounds == NEVER, 3, rounds)[:, :2], np.array(law)
    counts = np.bincount(steps.ravel(), minlength=4)
    assert (counts[law == 0] == 0).all()
    both = np.bincount(steps @ np.array([4, 1]), minlength=16)
    pairs = np.outer(law, law).ravel()
    if (law > 0).sum() > 1:
        assert stats.chisquare(counts[law > 0], 2 * N * law[law > 0]).pvalue > 1e-4
        assert stats.chisquare(both[pairs > 0], N * pairs[pairs > 0]).pvalue > 1e-4


@pytest.mark.parametrize("length", [1, 24, 1024])
@pytest.mark.parametrize("grid", [uniform(1), uniform(16), cosine(9)], ids=["1", "16", "cosine"])
@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Geometric(1e-3, 9.0)])
def test_the_capacity_for_a_step(length, grid, schedule):
    """At least the mean number of reveals of the largest step, at most L and 5 errors and 8."""
    process = Masking(3, schedule)
    noise = np.asarray(schedule.one_minus_alpha(jnp.asarray(grid)), np.float64)
    share = np.diff(noise).max() / noise[-1]
    capacity = reveal.independent_capacity(process, grid, length, Ancestral().reveal_probability)
    spread = np.sqrt(length * share * (1.0 - share))
    assert min(length, length * share) <= capacity + 1e-3
    assert capacity <= min(length, length * share + 5 * spread + 9)


def test_the_capacity_is_hardly_ever_too_small():
    """256 tokens in 16 steps: less than 1 step in 1,000 of 400 sequences needs more."""
    process, grid = Masking(3), cosine(16)
    capacity = reveal.independent_capacity(process, grid, 256, Ancestral().reveal_probability)
    chain = exact.chain_of(jnp.full((400, 256), 3))
    keys = exact.keys_for(0, 400)
    schedule = reveal.independent_schedule(
        process, chain, grid, keys, Ancestral().reveal_probability
    )
    rounds = np.asarray(schedule.round)
    counts = np.stack([np.sum(rounds == step, axis=1) for step in range(16)])
    assert (
        (counts.sum(axis=0) == 256).all() and (counts > capacity).mean() < 1e-3 and capacity < 100
    )


def noise_like(shapes):
    """Random leaves: at initialisation zeros hide most of the network."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape), x.dtype), shapes)


@pytest.mark.parametrize("time_conditioning", [True, False], ids=["time", ""])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", ""])
@pytest.mark.parametrize("local_width", [0, 3])
@pytest.mark.cases(2)
def test_features_of_some_positions_are_those_of_all(causal, local_width, time_conditioning):
    """Unsorted and repeated positions, to 2e-5 of the features of all; blocks scanned and not."""
    options = dict(causal=causal, local_width=local_width, time_conditioning=time_conditioning)
    sizes = dict(vocab_size=5, size=16, depth=2, heads=2, hidden=24, qk_norm=causal)
    scan_blocks = (causal + bool(local_width) + time_conditioning) % 2 == 0  # each pair once
    network = Transformer(scan_blocks=scan_blocks, **sizes, **options).build()
    params = noise_like(jax.eval_shape(network.init, jax.random.key(0)))
    z = jnp.asarray([[0, 5, 2, 3, 5, 1], [4, 4, 5, 5, 0, 2]])
    index = jnp.asarray([[3, 0, 5, 3], [1, 4, 2, 0]])

    @jax.jit
    def both(params, z, t, index):
        denoiser = network.bind(params)
        return denoiser.features(z, t), denoiser.features_at(z, t, index)

    whole, some = (np.asarray(h) for h in both(params, z, jnp.array([0.2, 0.9]), index))
    expected = whole[np.arange(2)[:, None], index]
    assert np.abs(expected).max() > 0.5 and np.ptp(whole, axis=1).max() > 0.5
    np.testing.assert_allclose(some, expected, atol=2e-5)
