"""The information profile: predicted losses against brute force, and the best schedules."""

import itertools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.evals.information_profile import make_profile_step, predicted
from md4_jax.objectives.any_order import AnyOrder as AnyOrderBound
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine, Geometric, Linear, Polynomial
from md4_jax.protocols import Network, UserError
from md4_jax.runtime.paths import place
from md4_jax.samplers import profile
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.orders import AnyOrder
from md4_jax.samplers.reveal import schedule_of

pytestmark = pytest.mark.slow

LENGTH = 4
P = (((7 * np.arange(16) + 3) % 16 + 1) / 136).reshape(2, 2, 2, 2)
X = exact.sequences(2, LENGTH)
PERFECT = exact.denoiser_of(exact.perfect_logits(P))


def compositions(total):
    """All ways to reveal `total` tokens in steps."""
    for cuts in itertools.product([False, True], repeat=total - 1):
        places = [0, *(n + 1 for n, cut in enumerate(cuts) if cut), total]
        yield np.diff(places)


def exact_profile() -> np.ndarray:
    """Z(k) of P and its perfect denoiser, by enumeration of all patterns."""
    bound, masks = AnyOrderBound(), exact.patterns(LENGTH)
    loss_at = exact.bind(bound, PERFECT, Masking(2))
    found = []
    for count in range(LENGTH, 0, -1):
        some = masks[masks.sum(axis=1) == count]
        values = exact.over_patterns(loss_at, 2, X, np.zeros(1), some)[:, 0].mean(axis=1)
        found.append(P.ravel() @ values / LENGTH)
    return np.array(found)


def marginal(known: dict) -> float:
    return P[tuple(known.get(n, slice(None)) for n in range(LENGTH))].sum()


def divergence(order, counts) -> float:
    """KL(p || law of samples) for reveals in an order, `counts` tokens at once, from p itself."""
    total = 0.0
    for x in itertools.product(range(2), repeat=LENGTH):
        q, known, begin = 1.0, {}, 0
        for count in counts:
            here = order[begin : begin + count]
            for n in here:
                q *= marginal({**known, n: x[n]}) / marginal(known)
            known |= {n: x[n] for n in here}
            begin += count
        total += P[x] * np.log(P[x] / q)
    return total


def test_the_predicted_loss_is_the_divergence(x64):
    """Every schedule of four tokens, the mean over all 24 orders: to 1e-9."""
    found = exact_profile()
    orders = list(itertools.permutations(range(LENGTH)))
    for counts in compositions(LENGTH):
        mean = np.mean([divergence(order, counts) for order in orders])
        np.testing.assert_allclose(profile.loss(found, counts), mean, rtol=0, atol=1e-9)
    assert profile.loss(found, [4]) > 0.05


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 20])
def test_the_best_counts_are_the_best_of_all(steps):
    rng = np.random.default_rng(steps)
    found = np.sort(rng.exponential(size=7))[::-1]
    best = profile.best_counts(found, steps)
    assert best.sum() == 7 and len(best) == min(steps, 7) and best.min() >= 1
    each = [profile.loss(found, c) for c in compositions(7) if len(c) == len(best)]
    np.testing.assert_allclose(profile.loss(found, best), min(each), atol=1e-12)


def test_steps_are_spent_where_the_profile_falls():
    found = np.concatenate([np.linspace(4.0, 1.0, 8), np.ones(24)])
    assert profile.best_counts(found, 9).tolist() == [1] * 7 + [24, 1] or (
        profile.loss(found, profile.best_counts(found, 8)) < 1e-12
    )
    losses = predicted(found, Masking(2))
    for name in ("cosine", "uniform"):
        assert (np.array(losses["optimal"]) <= np.array(losses[name]) + 1e-12).all()
    np.testing.assert_allclose(losses["optimal"][0], losses["uniform"][0])


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Polynomial(2.0)])
@pytest.mark.parametrize("counts", [[1, 2, 5, 8], [7, 1, 1, 1, 6], [16], [1] * 16])
@pytest.mark.cases(2)
def test_samplers_of_given_numbers_reveal_these(schedule, counts):
    process, grid = Masking(2, schedule), profile.grid_of(np.array(counts), schedule)
    assert grid[0] == 0.0 and grid[-1] == 1.0 and len(grid) == len(counts) + 1
    chain = exact.chain_of(np.full((2, 16), 2))
    made = schedule_of(AnyOrder(per_step=0), process, chain, grid, exact.keys_for(0, 2))
    for rounds in np.asarray(made.round):
        assert np.bincount(rounds).tolist() == counts
    np.testing.assert_allclose(np.sort(np.unique(made.time))[::-1], grid[:0:-1], rtol=1e-6)
    step, denoiser = Confidence("margin"), exact.of_outputs(lambda z, t: jnp.zeros((*z.shape, 2)))
    keys = exact.keys_for(1, 2)
    call = jax.jit(lambda chain, s, t: step(denoiser, process, chain, s, t, keys))
    for s, t, count in zip(grid[-2::-1], grid[:0:-1], counts, strict=True):
        before = np.asarray(process.is_noise(chain.z)).sum(axis=1)
        chain = call(chain, jnp.float32(s), jnp.float32(t))
        assert (before - np.asarray(process.is_noise(chain.z)).sum(axis=1) == count).all()


def test_a_random_order_by_the_grid_leaves_prompts_alone():
    """Three of eight positions are given, and the uniform grid of five steps reveals the rest."""
    given = np.arange(8) < 3
    chain = exact.chain_of(np.where(given, 0, 2)[None], given[None])
    made = schedule_of(AnyOrder(per_step=0), Masking(2), chain, uniform(5), exact.keys_for(2, 1))
    assert sorted(np.asarray(made.round)[0, 3:].tolist()) == [0, 1, 2, 3, 4]


def test_a_schedule_that_stops_short_is_refused():
    with pytest.raises(UserError, match="does not reach one of them"):
        profile.grid_of(np.array([1] * 50), Geometric(0.1, 3.0))


def test_measurements_are_fitted_by_a_falling_profile():
    visible = np.array([0, 0, 2, 2, 4, 6])
    nats = np.array([3.0, 5.0, 1.0, 2.0, 2.5, 1.0])
    found = profile.fitted(visible, nats, np.ones(6), 8)
    # 1.5 of two values and 2.5 of one pool to 11/6.
    np.testing.assert_allclose(found, [4, (4 + 11 / 6) / 2, 11 / 6, 11 / 6, 11 / 6, 17 / 12, 1, 1])


def test_a_measurement_of_little_weight_moves_no_others():
    """A line with one number that is 2 too large, by a millionth of the weight of the others."""
    k = np.arange(64)
    line, weight = 3.0 - k / 64, np.where(k == 20, 1e-6, 1.0)
    found = profile.fitted(k, line + 2.0 * (k == 20), weight, 64)
    np.testing.assert_allclose(found, line, atol=1e-4)


def test_noise_is_not_taken_for_places_where_nothing_is_lost():
    """Seven measurements of each number, as of 2,000 texts of 256 tokens of text8.

    The loss that the fit predicts for its own best schedule is within 10% of the loss by the true
    profile. By averages made falling, without the spline, it is 22% and 74% too low.
    """
    k = np.arange(256)
    true = 0.7 + 2.2 * (1 - k / 256) ** 1.2
    visible = np.repeat(k, 7)
    rng = np.random.default_rng(0)
    nats = true[visible] + rng.normal(0, 0.1 + 0.8 / np.sqrt(256 - visible))
    found = profile.fitted(visible, nats, 256.0 - visible, 256)
    assert (np.diff(found) <= 0).all()
    for steps in (8, 32):
        counts = profile.best_counts(found, steps)
        predicted, lost = profile.loss(found, counts), profile.loss(true, counts)
        assert predicted == pytest.approx(lost, rel=0.1)
        assert lost < 1.1 * profile.loss(true, profile.best_counts(true, steps))


def test_the_measured_profile_is_the_exact_one():
    """6,400 texts of the law P: each of four numbers within 4 standard errors."""
    rng = np.random.default_rng(0)
    x = X[rng.choice(16, 6400, p=P.ravel())]
    network = Network(lambda key: {}, lambda params, context, keys: PERFECT, time_free=True)
    step = make_profile_step(network, 1, 0)
    params = {"network": {}, "process": Masking(2)}
    visible, nats, masks = (np.asarray(a)[0] for a in step(params, exact.batch_of(x), 0))
    np.testing.assert_array_equal(np.bincount(visible), [1600] * 4)
    np.testing.assert_array_equal(visible + masks, 4)
    for k, expected in enumerate(exact_profile()):
        some = nats[visible == k]
        assert abs(some.mean() - expected) < 4 * some.std() / np.sqrt(len(some))


def test_a_missing_profile_is_asked_for(tmp_path):
    workdir = place(str(tmp_path))
    with pytest.raises(UserError, match=f"--workdir {tmp_path} --mode eval --evals information_pr"):
        profile.stored(workdir, 4)
    profile.keep(workdir, {"nats": [3.0, 2.0, 1.0]})
    assert profile.stored(workdir, 3).tolist() == [3.0, 2.0, 1.0]
    with pytest.raises(UserError, match="a profile for the 4 tokens of a sample, but .* has 3"):
        profile.stored(workdir, 4)
