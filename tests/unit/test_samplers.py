"""Grids, token transforms, the ancestral law by enumeration, and the loop for every sampler."""

import functools

import ends
import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.processes.draws import fold_keys
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine, Geometric
from md4_jax.protocols import Denoiser, UserError
from md4_jax.samplers import GRIDS
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.draw import draw_token
from md4_jax.samplers.grids import cosine, log_linear, uniform
from md4_jax.samplers.loop import no_prompt, sample
from md4_jax.samplers.orders import AnyOrder
from md4_jax.samplers.predictor_corrector import PredictorCorrector
from md4_jax.samplers.remask import Remask
from md4_jax.samplers.transforms import Transform, check_transform

OF_MASKS = exact.samplers_for(Masking(3))
every_sampler = pytest.mark.parametrize("make", OF_MASKS.values(), ids=OF_MASKS)
every_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
TABLE = exact.denoiser_of(exact.table_logits(3, 2), time=0.3)
PERFECT = exact.denoiser_of(exact.perfect_logits(exact.P_V3L2))


def run(make, process, grid, keys, denoiser=TABLE):
    return exact.drawn(denoiser, process, make(), grid, keys)


@every_grid
@pytest.mark.parametrize("steps", [1, 3, 1000, 6433, 6434, 10_000, 100_000])
def test_a_grid_runs_from_exactly_zero_to_exactly_one(grid, steps):
    t = grid(steps)
    assert t.shape == (steps + 1,) and t.dtype == np.float32
    assert t[0] == 0.0 and t[-1] == 1.0 and (np.diff(t) > 0).all()


def test_m13_the_cosine_grid_is_the_cosine_schedule():
    t = cosine(4)
    np.testing.assert_allclose(
        t, [0.0, 0.38268343237, 0.70710678119, 0.92387953251, 1.0], rtol=1e-7
    )
    expected = [1.0, 0.45880389985, 0.23463313527, 0.076120467489]
    for grid, process in ((t, Masking(3)), (uniform(4), Masking(3, Cosine()))):
        reveal = process.reveal_probability(jnp.asarray(grid[:-1]), jnp.asarray(grid[1:]))
        np.testing.assert_allclose(reveal, expected, rtol=2e-6)


def test_fine_cosine_grids_stay_near_the_cosine():
    """Times below the first that float32 could not tell apart are not moved."""
    for steps, far in ((1000, 1e-16), (6433, 1e-16), (10_000, 2.0**-23), (100_000, 1e-5)):
        wanted = np.cos(0.5 * np.pi * (1.0 - np.arange(steps + 1) / steps)).astype(np.float32)
        away = np.abs(cosine(steps).astype(np.float64) - wanted)
        assert away.max() <= far and (away[: int(0.99 * steps)] <= 2.0**-24).all()


def most_evaluations(step, steps: int) -> int:
    """Each step is one; with a corrector two, but for the last; two if it may draw rows again."""
    if hasattr(step, "resample"):
        return 2 * steps
    return 2 * steps - 1 if hasattr(step, "corrections") else steps


@pytest.mark.parametrize(
    "make, grid",
    [(make, cosine) for make in OF_MASKS.values()]
    + [(Ancestral, uniform), (Ancestral, log_linear)],
)
@pytest.mark.cases(3)
def test_the_loop_leaves_no_mask_and_counts_evaluations(make, grid):
    keys = exact.keys_for(1, 64)
    z, evaluations = run(make, Masking(3), grid(3), keys)
    assert z.shape == (64, 2) and z.dtype == jnp.int32
    assert ((z >= 0) & (z < 3)).all()
    assert ((evaluations >= 1) & (evaluations <= most_evaluations(make(), 3))).all()
    assert len(np.unique(z, axis=0)) > 3


@pytest.mark.slow
@every_sampler
@pytest.mark.cases(2)
def test_masks_that_a_schedule_leaves_are_filled_and_counted(make):
    """alpha_0 = exp(-2): every position has a fair chance of being left; two runs are the same."""
    process, keys = Masking(3, Geometric(2.0, 9.0)), exact.keys_for(1, 8)
    call = jax.jit(lambda *a: exact.drawn(TABLE, process, make(), uniform(3), *a))
    z, evaluations = call(keys)
    assert ((z >= 0) & (z < 3)).all()
    assert ((evaluations >= 1) & (evaluations <= most_evaluations(make(), 3) + 1)).all()
    np.testing.assert_array_equal(call(keys)[0], z)
    np.testing.assert_array_equal(call(keys[::-1])[0], z[::-1])


@every_sampler
@pytest.mark.cases(3)
def test_a_step_never_touches_what_is_given_nor_tokens_unless_it_revises(make):
    """All 16 states of two tokens, five times, of which some are given."""
    process, z = Masking(3), np.tile(exact.sequences(4, 2), (5, 1))
    given = (np.random.default_rng(0).random(z.shape) < 0.5) & (z < 3)
    chain, times = exact.chain_of(z, given), (jnp.float32(0.2), jnp.float32(0.9))
    step = jax.jit(lambda keys: make()(TABLE, process, chain, *times, keys))
    after = step(exact.keys_for(0, len(z)))
    changed = np.asarray(after.z) != z
    assert not changed[given].any() and changed.any()
    np.testing.assert_array_equal(after.prompt_mask, given)
    tokens = changed[(z < 3) & ~given]
    assert tokens.any() if make is PredictorCorrector else make is Remask or not tokens.any()
    assert ((after.evaluations >= 0) & (after.evaluations <= 2)).all()


def test_a_correction_runs_for_a_multiple_of_the_step():
    """Masks made of 40,000 tokens: (1 - alpha) e of them, within 5 standard errors.

    e = 1 - exp(-h (-alpha') / (alpha (1 - alpha))) at alpha = 0.5, h = 3 (0.6 - 0.5).
    """
    n = 20_000
    chain = exact.chain_of(np.random.default_rng(0).integers(0, 3, (n, 2)))
    step = jax.jit(functools.partial(PredictorCorrector(size=3.0), TABLE, Masking(3), chain))
    z = step(jnp.float32(0.5), jnp.float32(0.6), exact.keys_for(0, n)).z
    expected = 0.5 * -np.expm1(-0.3 / 0.25)
    found, error = np.mean(np.asarray(z) == 3), np.sqrt(expected * (1.0 - expected) / (2 * n))
    assert abs(found - expected) < 5 * error


def test_two_corrections_have_draws_of_their_own():
    """Those of keys 1 and 2, after the predictor's of key 0."""
    process, keys = Masking(3), exact.keys_for(0, 320)
    chain = exact.chain_of(np.tile(exact.sequences(4, 2), (20, 1)))
    s, t = jnp.float32(0.5), jnp.float32(0.6)
    step = PredictorCorrector(corrections=2)
    expected = Ancestral()(TABLE, process, chain, s, t, fold_keys(keys, 0))
    for number in (1, 2):
        own = fold_keys(keys, number)
        expected = step.correct(TABLE, process, expected, s, t - s, own)
    found = step(TABLE, process, chain, s, t, keys)
    np.testing.assert_array_equal(found.z, expected.z)


def test_the_count_of_the_grid_is_of_what_is_not_given():
    """At s = 0.5 two of four masks are left beside four given tokens, and four of eight alone."""
    z = np.full((2, 8), 3)
    z[0, :4] = 1
    chain = exact.chain_of(z, z == 1)
    mu = Denoiser(lambda z, t: jnp.zeros((*z.shape, 3)), lambda h: h)
    times = jnp.float32(0.5), jnp.float32(1.0)
    step = jax.jit(lambda keys: Confidence()(mu, Masking(3), chain, *times, keys).z)
    left = np.sum(np.asarray(step(exact.keys_for(0, 2))) == 3, axis=1)
    np.testing.assert_array_equal(left, [2, 4])


# The first has the largest margin, the second the least entropy, the third the largest ratio of
# the best two.
MARGIN = [0.50, 0.25, 0.13, 0.12, 0, 0, 0, 0]
ENTROPY = [0.48, 0.47, 0.03, 0.02, 0, 0, 0, 0]
RATIO = [0.30, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10]


def revealed(step, t: float, rows: int = 64) -> np.ndarray:
    """Which of three masks each of the rows reveals first, at time t."""
    law = jnp.log(jnp.asarray([MARGIN, ENTROPY, RATIO]))
    mu = Denoiser(lambda z, t: jnp.broadcast_to(law, (*z.shape, 8)), lambda h: h)
    chain, times = exact.chain_of(np.full((rows, 3), 8)), (jnp.float32(0.0), jnp.float32(t))
    call = jax.jit(lambda keys: step(mu, Masking(8), chain, *times, keys).z)
    new = np.asarray(call(exact.keys_for(0, rows))) != 8
    assert (new.sum(axis=1) == 1).all()
    return new.argmax(axis=1)


@pytest.mark.parametrize("score, place", [("margin", 0), ("entropy", 1)])
def test_the_surest_by_margin_or_entropy_is_first(score, place):
    assert (revealed(Confidence(score, per_step=1), 0.5) == place).all()


def test_the_noise_of_the_order_fades_with_time():
    """Noise of 1000 leaves each of three to chance at t = 1 (64 rows), and none at t = 1e-7."""
    step = Confidence("margin", per_step=1, noise=1000.0)
    counts = np.bincount(revealed(step, 1.0), minlength=3)
    # Within 4 standard errors of a third.
    assert (abs(counts - 64 / 3) < 4 * np.sqrt(64 * 2 / 9)).all()
    assert (revealed(step, 1e-7) == 0).all()


@pytest.mark.quick(20)
@pytest.mark.parametrize("make, of", ends.PAIRS.values(), ids=ends.PAIRS)
@pytest.mark.cases(30)
def test_every_sampler_runs_with_64_bits(make, of, x64):
    """A whole run is traced: what the loops carry keeps its types, those of a chain."""
    process, keys = exact.PROCESS_CASES[of](3).init(), exact.keys_for(0, 4)
    chain = jax.eval_shape(
        lambda keys, prompt: sample(
            TABLE, process, make(), grid=uniform(5), keys=keys, prompt=prompt
        )[0],
        keys,
        no_prompt(4, 2),
    )
    types = [x.dtype for x in (chain.z, chain.confidence, chain.evaluations)]
    assert types == [jnp.int32, jnp.float32, jnp.int32]


@pytest.mark.parametrize("per_step, left", [(1, [6, 5, 4, 3, 2, 1]), (2, [6, 6, 4, 4, 2, 2])])
def test_any_order_is_told_the_time_of_the_masks_that_are_left(per_step, left):
    """A network that says 6 t, with the linear schedule: six masks, from left to right."""
    six_t = Denoiser(
        lambda z, t: 1e4 * jax.nn.one_hot(jnp.broadcast_to(jnp.round(6 * t)[:, None], z.shape), 7),
        lambda h: h,
    )
    step, keys = AnyOrder("left_to_right", per_step), exact.keys_for(0, 2)
    z, evaluations = exact.drawn(six_t, Masking(7), step, uniform(3), keys, length=6)
    np.testing.assert_array_equal(z, [left, left])
    np.testing.assert_array_equal(evaluations, 6 // per_step)


def law_of(steps: int, denoiser=PERFECT) -> np.ndarray:
    law = exact.ancestral_law(denoiser, Masking(3), uniform(steps).astype(np.float64), 2)
    masked = (exact.sequences(4, 2) == 3).any(axis=1)
    np.testing.assert_allclose(law[masked], 0.0, atol=1e-15)
    return law[~masked].reshape(3, 3)


@pytest.mark.parametrize(
    "steps, distance, divergence",
    [
        (1, 0.255, 0.19439063428),
        (2, 0.1275, 0.058531691713),
        (4, 0.06375, 0.017974783175),
        (8, 0.031875, 0.0052901613469),
        (32, 0.00796875, 0.00039436037913),
    ],
)
def test_m15_the_law_of_the_ancestral_sampler(steps, distance, divergence, x64):
    p, law = exact.P_V3L2, law_of(steps)
    np.testing.assert_allclose(0.5 * np.abs(p - law).sum(), distance, rtol=1e-6)
    np.testing.assert_allclose((p * np.log(p / law)).sum(), divergence, rtol=1e-5)


def test_m16_many_steps_reach_the_law_of_any_order(x64):
    """Distance 2.6e-4 at 400 steps from p(0,0) and p(1,2) of the one-at-a-time sampler."""
    table = exact.denoiser_of(exact.table_logits(3, 2))
    coarse, fine = law_of(200, table), law_of(400, table)
    limit = {(0, 0): 0.09552560043, (1, 2): 0.090936707774}
    for x, expected in limit.items():
        np.testing.assert_allclose(2.0 * fine[x] - coarse[x], expected, rtol=1e-6)
        assert abs(fine[x] - expected) <= 0.00025971285746
        assert abs(coarse[x] - expected) <= 0.0005194257149


def test_m16_the_bound_is_above_the_model_that_is_sampled(x64):
    """-log p_theta(x) <= bound(x) for every x, p_theta being the sampler's law at many steps."""
    table = exact.denoiser_of(exact.table_logits(3, 2))
    bound = exact.any_order(table, Masking(3), exact.sequences(3, 2))
    limit = 2.0 * law_of(200, table) - law_of(100, table)
    assert (-np.log(limit).ravel() <= bound + 1e-6).all()


LOGITS = jnp.log(jnp.asarray([0.05, 0.4, 0.15, 0.3, 0.1]))


def kept(**settings) -> list[int]:
    return np.flatnonzero(np.isfinite(Transform(**settings)(LOGITS))).tolist()


@pytest.mark.parametrize(
    "top_p, symbols",
    [
        (1e-9, [1]),
        (0.399, [1]),
        (0.401, [1, 3]),
        (0.699, [1, 3]),
        (0.701, [1, 2, 3]),
        (0.849, [1, 2, 3]),
        (0.96, [0, 1, 2, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, symbols):
    assert kept(top_p=top_p) == symbols


@pytest.mark.parametrize("top_p", [1e-6, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_nucleus_of_a_large_vocabulary_by_sorting(scale, top_p):
    """Random logits of either sign, some of them excluded, against float64 sums in order."""
    rng = np.random.default_rng(round(1000 * scale))
    logits = (scale * rng.normal(size=(8, 2000))).astype(np.float32)
    logits[:, rng.choice(2000, 300, replace=False)] = -np.inf
    kept = np.isfinite(jax.jit(Transform(top_p=top_p))(logits))
    for row, found in zip(logits.astype(np.float64), kept, strict=True):
        order = np.argsort(-row)
        mass = np.exp(row[order] - row.max())
        before = (np.cumsum(mass) - mass) / mass.sum()
        # What lies within rounding of the edge may fall on either side.
        assert not found[order[before >= top_p + 1e-5]].any()
        assert found[order[before < top_p - 1e-5]].all() and found[order[0]]


@pytest.mark.parametrize(
    "top_k, symbols",
    [(0, [0, 1, 2, 3, 4]), (1, [1]), (2, [1, 3]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])],
)
def test_top_k(top_k, symbols):
    assert kept(top_k=top_k) == symbols


def test_temperature_and_top_k_come_before_the_nucleus():
    """p^2 gives 0.16, 0.09 and 0.0225 of 0.285: two symbols reach 0.85 instead of three."""
    assert kept(temperature=0.5, top_p=0.85) == [1, 3]
    # Of the two best, 0.4 / 0.7 = 0.571 is enough for 0.57.
    assert kept(top_k=2, top_p=0.57) == [1]


def test_kept_logits_are_only_divided_by_the_temperature():
    np.testing.assert_allclose(Transform(0.5)(LOGITS), 2.0 * LOGITS, rtol=1e-6)
    out = Transform(0.5, top_p=0.85, top_k=4)(LOGITS)
    np.testing.assert_allclose(
        out[jnp.asarray([1, 3])], 2.0 * LOGITS[jnp.asarray([1, 3])], rtol=1e-6
    )


def test_ties_at_the_edge_of_the_nucleus_are_kept_together():
    out = Transform(top_p=0.3)(jnp.zeros((2, 4)))
    assert jnp.isfinite(out).all()
    assert jnp.isfinite(Transform(top_k=2)(jnp.zeros(4))).all()


def test_temperature_zero_is_the_most_likely_symbol():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, 9, 5)), jnp.float32)
    tokens = draw_token(exact.keys_for(0, 64), Transform(temperature=0.0)(logits))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))
    assert tokens.dtype == jnp.int32
    near = jnp.broadcast_to(jnp.array([10.0 - 1e-6, 10.0, -1e4]), (64, 9, 3))  # one float apart
    tokens = draw_token(exact.keys_for(1, 64), Transform(temperature=0.0)(near))
    np.testing.assert_array_equal(tokens, 1)


def test_settings_are_traced_and_do_not_recompile():
    count = 0

    @jax.jit
    def apply(transform, logits):
        nonlocal count
        count += 1
        return transform(logits)

    for temperature, top_p in ((1.0, 1.0), (0.5, 0.9), (0.0, 0.3)):
        out = apply(Transform(temperature, top_p), LOGITS)
        np.testing.assert_allclose(out, Transform(temperature, top_p)(LOGITS), rtol=1e-6)
    assert count == 1


@pytest.mark.parametrize(
    "settings, words",
    [
        ((-0.1, 0, 1.0), "temperature must not be negative, not -0.1"),
        ((1.0, -1, 1.0), "top_k must not be negative, not -1"),
        ((1.0, 0, 0.0), r"top_p must lie in \(0, 1\], not 0.0"),
        ((1.0, 0, 1.1), r"top_p must lie in \(0, 1\], not 1.1"),
    ],
)
def test_settings_that_make_no_distribution(settings, words):
    with pytest.raises(UserError, match=words):
        check_transform(*settings)
