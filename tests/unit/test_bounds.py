"""The bounds by enumeration, against the numbers of identities M05 to M12, M17 and M18."""

import dataclasses
import math

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.d3pm import D3PM
from md4_jax.objectives.draws import at_early_times
from md4_jax.objectives.md4 import MD4, DiscreteMD4
from md4_jax.objectives.noising import SMALLEST_TIME
from md4_jax.objectives.radd import TDCE
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Clipped, Cosine, Geometric, Linear, Polynomial
from md4_jax.protocols import Denoiser

pytestmark = pytest.mark.usefixtures("x64")

X_V3L2 = exact.sequences(3, 2)
X_V2L3 = exact.sequences(2, 3)
TABLE_V3L2 = exact.denoiser_of(exact.table_logits(3, 2))
TABLE_V2L3 = exact.denoiser_of(exact.table_logits(2, 3))
PERFECT = exact.denoiser_of(exact.perfect_logits(exact.P_V3L2))
X_011 = np.array([[0, 1, 1]])
X_12 = np.array([[1, 2]])
ENTROPY = 1.9934181681  # of P_V3L2


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


@pytest.mark.parametrize("bound", [exact.continuous, exact.any_order])
def test_m05_the_perfect_denoiser_makes_the_bound_tight(bound):
    values = bound(PERFECT, Masking(3), X_V3L2)
    close(values, -np.log(exact.P_V3L2.ravel()))
    close(values[0], 1.6094379124)
    close(values[5], 2.5257286443)
    close(exact.P_V3L2.ravel() @ values, ENTROPY)


@pytest.mark.parametrize("bound", [exact.continuous, exact.any_order])
@pytest.mark.parametrize(
    "p, first, last, mean",
    [
        (exact.P_V3L2, 2.3487522955, 2.260325825, 2.5537893656),
        (exact.P_V2L3, 1.8263484685, 2.6368421674, 2.2885332526),
    ],
)
def test_m06_continuous_time_equals_any_order(bound, p, first, last, mean):
    denoiser = exact.denoiser_of(exact.table_logits(p.shape[0], p.ndim))
    values = bound(denoiser, Masking(p.shape[0]), exact.sequences(p.shape[0], p.ndim))
    close([values[0], values[-1], p.ravel() @ values], [first, last, mean])


@pytest.mark.parametrize(
    "schedule, rule",
    [
        (Linear(), {}),
        (Polynomial(2.0), {}),
        (Polynomial(0.5), {"power": 4}),
        (Cosine(), {}),
    ],
)
def test_m07_every_complete_schedule_gives_the_same_bound(schedule, rule):
    close(exact.continuous(TABLE_V2L3, Masking(2, schedule), X_011, **rule), 3.0076040293)
    assert MD4().is_bound(Masking(2, schedule))


def test_m07_a_schedule_that_stops_short_gives_a_part_of_the_bound():
    process = Masking(2, Geometric(0.01, 20.0))
    close(exact.continuous(TABLE_V2L3, process, X_011, nodes=400), 2.970900637)
    assert not MD4().is_bound(process)


FULL = {
    1: 2.3087007431,
    2: 2.6595337487,
    4: 2.8339142296,
    8: 2.9208454646,
    64: 2.9967686516,
    1024: 3.0069268972,
}
PAPER = {
    2: 2.1940711424,
    4: 2.5150287079,
    8: 2.7400584032,
    64: 2.9718490152,
    1024: 3.0053500486,
}


@pytest.mark.parametrize("steps", FULL)
def test_m08_discrete_time_with_the_model_as_decoder(steps):
    close(exact.discrete(DiscreteMD4(steps, "model"), TABLE_V2L3, Masking(2), X_011), FULL[steps])


@pytest.mark.parametrize("steps", PAPER)
def test_m08_discrete_time_with_the_uniform_decoder(steps):
    objective = DiscreteMD4(steps, "uniform")
    close(exact.discrete(objective, TABLE_V2L3, Masking(2), X_011), PAPER[steps])


def test_m08_one_step_with_the_uniform_decoder_is_the_uniform_model():
    """No step is left to draw: the call itself returns L log V, whatever the network says."""
    x = np.repeat(X_011, 4, axis=0)
    u = jnp.linspace(0.0, 0.99, 4)
    arguments = TABLE_V2L3, Masking(2), exact.batch_of(x), u, exact.keys_for(0, 4)
    for power in (1, 2):  # early times do not weigh what needs no draw
        nats, told = at_early_times(DiscreteMD4(1, "uniform"), power)(*arguments)
        close(nats, 2.0794415417)
        close(told["reconstruction"], nats)


@pytest.mark.parametrize(
    "steps, expected",
    [
        (1, 2.1878088024),
        (2, 2.0906134852),
        (4, 2.0420158267),
        (8, 2.0177169974),
        (16, 2.0055675827),
        (32, 1.9994928754),
        (64, 1.9964555218),
    ],
)
def test_m09_the_perfect_denoiser_gains_from_steps(steps, expected):
    mean = exact.P_V3L2.ravel() @ exact.discrete(DiscreteMD4(steps), PERFECT, Masking(3), X_V3L2)
    close(mean, expected)
    close(mean, ENTROPY + 0.19439063428 / steps)  # the mutual information, shared by the steps


def test_m09_cosine():
    values = exact.discrete(DiscreteMD4(4), PERFECT, Masking(3, Cosine()), X_V3L2)
    close(exact.P_V3L2.ravel() @ values, 2.0526065919)


@pytest.mark.parametrize("schedule", [Cosine(), Geometric(0.1, 3.0), Clipped(Linear(), 0.05)])
@pytest.mark.parametrize("steps", [1, 3, 10])
def test_m10_one_token_is_exact_with_any_number_of_steps(steps, schedule):
    """Also where the schedule stops short: the last step masks all, the first none."""
    denoiser = exact.denoiser_of(exact.perfect_logits(exact.P_V3L1))
    values = exact.discrete(
        DiscreteMD4(steps), denoiser, Masking(3, schedule), exact.sequences(3, 1)
    )
    close(values, -np.log(exact.P_V3L1))
    close(values[2], 1.6094379124)


@pytest.mark.parametrize(
    "denoiser, x, limit, four_steps",
    [
        (TABLE_V3L2, X_V3L2, 0.84991548841, 0.86324911927),
        (TABLE_V2L3, X_V2L3, 0.96248303121, 0.96461436325),
    ],
)
def test_m11_the_bound_is_that_of_a_sub_normalised_model(denoiser, x, limit, four_steps):
    process = Masking(int(x.max()) + 1)
    close(np.exp(-exact.continuous(denoiser, process, x)).sum(), limit)
    close(np.exp(-exact.any_order(denoiser, process, x)).sum(), limit)
    close(np.exp(-exact.discrete(DiscreteMD4(4), denoiser, process, x)).sum(), four_steps)


def second_moment(schedule, **rule) -> float:
    """Of MD4's one-draw estimate for L = 1 and a token that costs one nat."""
    logits = jnp.asarray([0.0, math.log(math.e - 1.0)])
    one_nat = Denoiser(lambda z, t: jnp.broadcast_to(logits, (*z.shape, 2)), lambda h: h)
    process = Masking(2, schedule)

    def squared(batch, z, t):
        return MD4().loss_at(one_nat, process, batch, z, t) ** 2

    t, weight = exact.quadrature(**rule)
    masked = schedule.one_minus_alpha(jnp.asarray(t))
    return exact.expected(squared, 2, np.zeros((1, 1), np.int32), t, masked)[0] @ weight


@pytest.mark.parametrize("power, expected", [(1.5, 4.5), (2.0, 4.0), (3.0, 4.5)])
def test_m12_second_moment_of_the_estimate(power, expected):
    close(second_moment(Polynomial(power), power=8, nodes=200), expected)


@pytest.mark.parametrize("low, expected", [(1e-3, 6.9146699489), (1e-4, 9.2112614981)])
def test_m12_second_moment_of_the_linear_schedule_grows_with_the_log(low, expected):
    value = second_moment(Linear(), low=low, power=6, nodes=400) / (1.0 - low)
    close(value, expected)


CLIPPED = [Clipped(base, 1e-4) for base in (Linear(), Cosine(), Polynomial(2.0))]


@pytest.mark.parametrize("schedule", CLIPPED)
def test_m17_a_clipped_schedule_trains_on_a_part_of_the_bound(schedule):
    process = Masking(3, schedule)
    part = exact.continuous(TABLE_V3L2, process, X_12, power=3, nodes=300)
    close(part, 2.6039758287)
    # With the reconstruction term L eps log V it still falls short of the bound.
    np.testing.assert_allclose(part + 0.00021972245773 - 2.6044967281, -0.00030118, atol=3e-6)


@pytest.mark.parametrize("schedule", [*CLIPPED, Geometric()])
def test_m17_any_order_is_the_whole_bound_for_every_schedule(schedule):
    process = Masking(3, schedule)
    assert not MD4().is_bound(process)
    assert AnyOrder().is_bound(process)
    close(exact.any_order(TABLE_V3L2, process, X_12), 2.6044967281)


def test_m18_times_above_a_cut_without_its_factor_give_another_number():
    cut = exact.continuous(TABLE_V3L2, Masking(3), X_12, low=1e-3)
    close(cut / (1.0 - 1e-3), 2.6036831915)
    close(exact.continuous(TABLE_V3L2, Masking(3), X_12), 2.6044967281)


def test_m18_the_times_of_the_objective_have_no_cut():
    """The time is u itself, except that u = 0 stands for half of its float32 cell."""
    seen = []

    def features(z, t):
        seen.append(np.asarray(t))
        return jnp.zeros((*z.shape, 3))

    u = jnp.asarray([0.0, 2.0**-23, 1e-4, 0.5, 1.0 - 2.0**-24], jnp.float32)
    x = np.repeat(X_12, 5, axis=0)
    arguments = exact.batch_of(x), u, exact.keys_for(1, 5)
    nats, _ = MD4()(Denoiser(features, lambda h: h), Masking(3), *arguments)
    assert seen[0].tolist() == [SMALLEST_TIME, *np.asarray(u)[1:].tolist()]
    assert SMALLEST_TIME <= 2.0**-24 and jnp.isfinite(nats).all()


TIMED = exact.denoiser_of(exact.table_logits(2, 3), time=0.8)


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Polynomial(2.0)])
def test_a_denoiser_of_time_has_the_same_bound_in_both_forms(schedule):
    process = Masking(2, schedule)
    integral = exact.continuous(TIMED, process, X_011)
    # The Beta law is polynomial in 1 - alpha, the inverse of the cosine is not at 1.
    close(exact.any_order(TIMED, process, X_011, nodes=400), integral)
    assert abs(integral[0] - 3.0076040293) > 1e-2


@pytest.mark.parametrize("schedule", [Geometric(0.1, 3.0), Clipped(Linear(), 0.05)])
def test_a_denoiser_of_time_and_a_schedule_that_stops_short(schedule):
    """Any order adds the ends, with the time held at 0 and at 1, to the schedule's own part."""
    process = Masking(2, schedule)

    def features(z, masked):
        return TIMED.features(z, schedule.inverse(masked))

    # With the linear schedule t is 1 - alpha itself: the same bound, cut in three.
    low, high = float(schedule.one_minus_alpha(0.0)), float(schedule.one_minus_alpha(1.0))
    by_masks = dataclasses.replace(process, schedule=Linear())
    renamed = TIMED._replace(features=features)
    parts = [
        exact.continuous(renamed, by_masks, X_011, low=a, high=b)
        for a, b in [(0.0, low), (low, high), (high, 1.0)]
    ]
    close(exact.continuous(TIMED, process, X_011, nodes=80), parts[1])
    whole = exact.any_order(TIMED, process, X_011, nodes=600)
    np.testing.assert_allclose(whole, sum(parts), rtol=1e-5)
    assert (whole > parts[1]).all()


@dataclasses.dataclass(frozen=True)
class Steps(Linear):
    """1 - alpha is 0.3 at t = 1/3 and 0.55 at t = 2/3."""

    def one_minus_alpha(self, t):
        return jnp.interp(t, jnp.asarray([0.0, 1 / 3, 2 / 3, 1.0]), jnp.asarray([0, 0.3, 0.55, 1]))


def test_m04_the_weight_of_a_discrete_step():
    """L = 1 and uniform logits: the value is 3 steps x weight x log 2."""
    uniform = Denoiser(lambda z, t: jnp.zeros((*z.shape, 2)), lambda h: h)
    value = DiscreteMD4(3).loss_at(
        uniform,
        Masking(2, Steps()),
        exact.batch_of([[0]]),
        jnp.asarray([[2]]),
        jnp.asarray([2]),
    )
    close(value, 3 * 0.45454545455 * math.log(2.0))


@pytest.mark.parametrize("decoder, first", [("model", 1), ("uniform", 2)])
def test_the_network_is_told_the_time_that_its_input_was_noised_to(decoder, first):
    """u in even parts draws each step i once: t = i / T, and at t = 1 all is masked."""
    steps, rows, seen = 4, 200, {}

    def features(z, t):
        seen.update(z=np.asarray(z), t=np.asarray(t).ravel())
        return jnp.zeros((*z.shape, 2))

    terms = steps - first + 1
    u = jnp.repeat((jnp.arange(terms) + 0.5) / terms, rows)
    batch = exact.batch_of(np.zeros((terms * rows, 3)))
    keys = exact.keys_for(0, terms * rows)
    objective, process = DiscreteMD4(steps, decoder), Masking(2)
    objective(Denoiser(features, lambda h: h), process, batch, u, keys)
    times = np.arange(first, steps + 1) / steps
    np.testing.assert_array_equal(seen["t"], np.repeat(times, rows))
    masked = (seen["z"] == 2).reshape(terms, -1).mean(axis=1)
    # Within 4 standard errors of 600 draws.
    np.testing.assert_array_less(abs(masked - times), 4 * np.sqrt(times * (1 - times) / 600) + 1e-9)


STEEP = [MD4(), ScoreEntropy(), ScoreEntropy(scaled=False), TDCE(), DiscreteMD4(), D3PM()]


@pytest.mark.parametrize("objective", STEEP)
def test_a_steep_schedule_has_a_finite_loss_at_all_times(objective):
    """t^40 is no float32 before t = 0.1: no token is masked then, and the loss is 0."""
    process, t = Masking(3, Polynomial(40.0)), np.array([1e-6, 0.05, 0.5, 0.99], np.float32)
    batch, keys = exact.batch_of(np.zeros((4, 5))), exact.keys_for(0, 4)
    denoiser = exact.of_outputs(lambda z, t: jnp.zeros((*z.shape, 3)))
    nats, _ = jax.jit(lambda u: objective(denoiser, process, batch, u, keys))(t)
    assert np.isfinite(nats).all()
    if not isinstance(objective, TDCE):  # whose constant is there without masks
        np.testing.assert_array_equal(nats[:2], 0.0)
