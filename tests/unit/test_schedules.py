"""Every schedule of the registry: derivative, inverse, ends, precision, and its numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import (
    SCHEDULES,
    Clipped,
    Cosine,
    Exponential,
    Geometric,
    Linear,
    Polynomial,
    Power,
    ShiftedCosine,
)
from md4_jax.processes.schedules import covers_unit_interval as covers
from md4_jax.protocols import Schedule, UserError

CASES = {name: make() for name, make in SCHEDULES.items()} | {
    "polynomial, 1/2": Polynomial(0.5),
    "polynomial, 3": Polynomial(3.0),
    "power, 1/2": Power(0.5),
    "shifted_cosine, 0": ShiftedCosine(0.0),
    "geometric, short": Geometric(0.01, 20.0),
    "exponential, slow": Exponential(0.3, 10.0),
    "clipped cosine": Clipped(Cosine(), 0.05),
}
every_schedule = pytest.mark.parametrize("schedule", CASES.values(), ids=CASES)
INSIDE = np.linspace(0.01, 0.99, 50)


@every_schedule
def test_the_derivative_is_that_of_alpha(schedule, x64):
    t = jnp.asarray(INSIDE)
    expected = jax.vmap(jax.grad(schedule.alpha))(t)
    np.testing.assert_allclose(schedule.dalpha(t), expected, rtol=1e-9)


@every_schedule
def test_alpha_and_one_minus_alpha_are_complements_and_alpha_decreases(schedule, x64):
    t = jnp.linspace(0.0, 1.0, 201)
    alpha, masked = schedule.alpha(t), schedule.one_minus_alpha(t)
    np.testing.assert_allclose(alpha + masked, 1.0, atol=1e-14)
    assert (np.diff(alpha) < 0).all() and (np.diff(masked) > 0).all()
    assert (np.asarray(masked) >= 0).all() and (np.asarray(alpha) >= 0).all()
    assert isinstance(schedule, Schedule)


@every_schedule
def test_the_inverse_undoes_one_minus_alpha_and_is_clamped(schedule, x64):
    t = jnp.asarray(INSIDE)
    # Where almost nothing is left to mask, 1 - alpha no longer tells times apart.
    t = t[schedule.alpha(t) > 1e-6]
    np.testing.assert_allclose(schedule.inverse(schedule.one_minus_alpha(t)), t, atol=1e-8)
    np.testing.assert_allclose(schedule.inverse(jnp.asarray([0.0, 1.0])), [0.0, 1.0], atol=1e-12)


@every_schedule
def test_one_minus_alpha_keeps_its_digits_near_zero_in_float32(schedule):
    t = np.float32(2.0) ** -np.arange(1, 25, dtype=np.float32)
    narrow = np.asarray(schedule.one_minus_alpha(jnp.asarray(t)), np.float64)
    with jax.enable_x64(True):
        wide = np.asarray(schedule.one_minus_alpha(jnp.asarray(t, jnp.float64)))
    np.testing.assert_allclose(narrow, wide, rtol=3e-6)


@every_schedule
@pytest.mark.cases(8)
def test_dtype_and_shape_follow_t(schedule):
    for t in (jnp.float32(0.3), jnp.full((2, 3), 0.3)):
        for f in (schedule.alpha, schedule.one_minus_alpha, schedule.dalpha, schedule.inverse):
            out = jax.jit(f)(t)
            assert out.shape == t.shape and out.dtype == jnp.float32
            assert jnp.isfinite(out).all()


@every_schedule
def test_whether_the_interval_is_covered_is_told_by_the_ends(schedule):
    ends = float(schedule.one_minus_alpha(0.0)), float(schedule.alpha(1.0))
    assert covers(schedule) == (ends == (0.0, 0.0))
    assert Masking(2, schedule).is_complete == covers(schedule)


def test_which_schedules_cover_the_interval():
    complete = {"linear", "polynomial", "cosine", "polynomial, 1/2", "polynomial, 3"}
    complete |= {"power", "power, 1/2", "shifted_cosine", "shifted_cosine, 0"}
    assert {name for name, schedule in CASES.items() if covers(schedule)} == complete


@every_schedule
def test_the_first_and_last_times_of_a_bound_reach_the_ends(schedule):
    """Outside of them at most 2^-12 of the tokens are left, what a power of 1/2 leaves."""
    if covers(schedule):
        early, late = jnp.float32(2.0**-24), jnp.float32(1.0 - 2.0**-24)
        assert schedule.one_minus_alpha(early) < 1.001 * 2.0**-12
        assert schedule.alpha(late) < 1.001 * 2.0**-12


@pytest.mark.parametrize(
    "schedule, alpha, weight",
    [
        (Linear(), 0.7, -3.3333333333),
        (Polynomial(2.0), 0.91, -6.6666666667),
        (Polynomial(0.5), 0.45227744249, -1.6666666667),
        (Power(2.0), 0.49, -2.7450980392),
        (Cosine(), 0.54600950026, -3.082861373),
        (Geometric(0.01, 20.0), 0.90683634844, -7.2353005333),
    ],
)
def test_m03_values_at_three_tenths(schedule, alpha, weight, x64):
    t = jnp.asarray(0.3)
    np.testing.assert_allclose(schedule.alpha(t), alpha, rtol=1e-10)
    ratio = schedule.dalpha(t) / schedule.one_minus_alpha(t)
    np.testing.assert_allclose(ratio, weight, rtol=1e-10)


def test_the_shifted_cosine_is_the_product_of_d3pm_s_steps(x64):
    """beta(i) = 1 - f(i + 1) / f(i) with f(i) = cos((i/T + s) / (1 + s) pi/2): its equation 18."""
    steps, shift = 10, 0.008
    f = np.cos((np.arange(steps + 1) / steps + shift) / (1.0 + shift) * np.pi / 2.0)
    kept = np.cumprod(f[1:] / f[:-1])
    t = jnp.arange(1, steps + 1) / steps
    np.testing.assert_allclose(ShiftedCosine().alpha(t), kept, rtol=1e-12, atol=1e-15)


def test_m04_the_weight_is_alpha_times_the_slope_of_the_log_snr(x64):
    def log_snr(t):
        return jnp.log(Cosine().alpha(t) / Cosine().one_minus_alpha(t))

    t = jnp.asarray(0.3)
    np.testing.assert_allclose(Cosine().alpha(t) * jax.grad(log_snr)(t), -3.082861373, rtol=1e-10)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Polynomial(0.0), "power=0.0 must lie between 0.5 and 1000"),
        (lambda: Polynomial(0.49), "power=0.49 must lie between 0.5 .*, or bounds miss a part"),
        (lambda: Power(0.25), "exponent=0.25 must lie between 0.5 .*, or bounds miss a part"),
        (lambda: Polynomial(1e6), "power=1000000.0 must lie between 0.5 and 1000, or bounds miss"),
        (lambda: Power(1e4), "exponent=10000.0 must lie between 0.5 and 1000, or bounds miss"),
        (lambda: ShiftedCosine(-0.1), "shift must not be negative, not -0.1"),
        (lambda: Geometric(1.0, 0.5), "minimum=1.0 and maximum=0.5"),
        (lambda: Clipped(Linear(), 0.5), r"eps must lie in \[0, 0.5\), not 0.5"),
    ],
)
def test_impossible_schedules_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()
