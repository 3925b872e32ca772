"""RADD's losses against identities S03 and M06, and near the ends of the unit interval."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.radd import TDCE, LambdaDCE, constant, offset
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Clipped, Cosine, Geometric, Linear, LogLinear, Polynomial

X_12 = np.array([[1, 2]])
# From alpha = 1 to exp(-1.5): sigma_bar stops at 1.5.
SHORT = Masking(3, LogLinear(float(np.exp(-1.5))))
TABLE = exact.denoiser_of(exact.table_logits(3, 2))
SCHEDULES = [Linear(), Cosine(), Polynomial(2.0), Polynomial(0.5)]


def normalised(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def integral(objective, denoiser, process, x, **rule) -> np.ndarray:
    """The mean of loss_at over t ~ U(0, 1) and the masks, by quadrature and enumeration."""
    t, weight = exact.quadrature(**rule)
    masked = process.schedule.one_minus_alpha(jnp.asarray(t))
    loss_at = exact.bind(objective, denoiser, process)
    return exact.expected(loss_at, process.mask_id, x, t, masked) @ weight


def test_s03_the_integral_of_t_dce_and_its_offset_from_the_score_entropy(x64):
    """k log k is singular at t = 0, so the points crowd there."""
    found = integral(TDCE(), TABLE, SHORT, X_12, nodes=400, power=6)
    np.testing.assert_allclose(found, 1.1026934008, rtol=1e-9)
    np.testing.assert_allclose(2 * offset(SHORT), 1.0616824953, rtol=1e-9)
    scores = exact.denoiser_of(normalised(exact.table_logits(3, 2)) + np.log(3))
    entropy = integral(ScoreEntropy(), scores, SHORT, X_12, nodes=60)
    np.testing.assert_allclose(entropy, 2.1643758961, rtol=1e-9)
    np.testing.assert_allclose(found + 2 * offset(SHORT), entropy, rtol=1e-9)
    assert not TDCE().is_bound(SHORT)


def called(objective, process):
    """What a call returns, as loss_at: the z that it draws is replaced by the given one."""

    def loss_at(batch, z, t):
        fixed = Fixed(process.vocab_size, process.schedule, z)
        return objective(TABLE, fixed, batch, t, exact.keys_for(0, len(z)))[0]

    return loss_at


class Fixed(Masking):
    """Masking whose draws are all the given z."""

    def __init__(self, vocab_size, schedule, z):
        super().__init__(vocab_size, schedule)
        object.__setattr__(self, "given", z)

    def corrupt(self, keys, x, t):
        return self.given


@pytest.mark.parametrize("drawn", [False, True])
def test_s03_a_call_has_the_score_entropy_as_its_mean(x64, drawn):
    """With the constant as it is drawn and with its exact mean."""
    t, weight = exact.quadrature(nodes=400, power=6)
    masked = SHORT.schedule.one_minus_alpha(jnp.asarray(t))
    loss_at = called(TDCE(drawn_constant=drawn), SHORT)
    found = exact.expected(loss_at, 3, X_12, t, masked) @ weight
    np.testing.assert_allclose(found, 2.1643758961, rtol=1e-6)  # no t below 2^-24


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_s03_without_an_end_to_the_noise_t_dce_is_the_bound(x64, schedule):
    """The number is M06's, for x = (0, 0); log k is singular at both ends."""
    process, rule = Masking(3, schedule), dict(high=0.5, nodes=100, power=8)
    low, high = (
        integral(TDCE(), TABLE, process, np.array([[0, 0]]), low=end, **rule) for end in (0.0, 1.0)
    )
    np.testing.assert_allclose(low - high, 2.3487522955, rtol=1e-7)
    assert TDCE().is_bound(process) and TDCE(True).is_bound(process)
    assert abs(float(offset(process))) < 1e-15


@pytest.mark.parametrize(
    "p, first, last, mean",
    [
        (exact.P_V3L2, 2.3487522955, 2.260325825, 2.5537893656),
        (exact.P_V2L3, 1.8263484685, 2.6368421674, 2.2885332526),
    ],
)
@pytest.mark.parametrize("schedule", [*SCHEDULES, Geometric(), Clipped()])
def test_m06_lambda_dce(x64, p, first, last, mean, schedule):
    """For every schedule, complete or not."""
    vocab, length = p.shape[0], p.ndim
    denoiser = exact.denoiser_of(exact.table_logits(vocab, length))
    process = Masking(vocab, schedule)
    share, weight = exact.quadrature(nodes=12)
    loss_at = exact.bind(LambdaDCE(), denoiser, process)
    x = exact.sequences(vocab, length)
    values = exact.expected(loss_at, vocab, x, share, share) @ weight
    found = [values[0], values[-1], p.ravel() @ values]
    np.testing.assert_allclose(found, [first, last, mean], rtol=1e-9)
    assert LambdaDCE().is_bound(process)


@pytest.mark.parametrize("schedule", [Cosine(), Polynomial(2.0), Geometric(0.1, 3.0)])
def test_lambda_dce_gives_a_denoiser_of_time_the_time_of_its_noise(x64, schedule):
    """With time conditioning the value is that of the exact-k form, whose times are Beta draws."""
    process, x = Masking(2, schedule), np.array([[0, 1, 1]])
    denoiser = exact.denoiser_of(exact.table_logits(2, 3), time=0.8)
    share, weight = exact.quadrature(nodes=800)
    loss_at = exact.bind(LambdaDCE(), denoiser, process)
    found = exact.expected(loss_at, 2, x, share, share) @ weight
    np.testing.assert_allclose(
        found, exact.any_order(denoiser, process, x, AnyOrder(), nodes=800), rtol=1e-6
    )


def test_m06_the_mean_of_calls_of_lambda_dce():
    """n = 40,000 stratified draws for x = (0, 0), within 5 of their standard errors."""
    n = 40_000
    u = jnp.asarray((np.arange(n) + 0.5) / n, jnp.float32)
    batch = exact.batch_of(np.zeros((n, 2)))
    nats, _ = LambdaDCE()(TABLE, Masking(3), batch, u, exact.keys_for(5, n))
    error = float(jnp.std(nats)) / np.sqrt(n)
    assert abs(float(jnp.mean(nats)) - 2.3487522955) < 5 * error < 0.15


def test_the_constant_of_t_dce_is_drawn_only_if_asked_for():
    """One token, linear: -sigma k log k = (-1 / t) log((1 - t) / t) where it is masked."""
    process, t = Masking(3), jnp.asarray([0.2, 0.2, 0.9])
    z, batch = jnp.asarray([[3], [0], [3]]), exact.batch_of([[0], [0], [0]])
    expected = np.array([-5.0 * np.log(4.0), 0.0, np.log(9.0) / 0.9])
    np.testing.assert_allclose(constant(process, batch, z, t), expected, rtol=1e-5)
    single = exact.denoiser_of(exact.table_logits(3, 1))
    plain, drawn = (
        TDCE(choice)(single, process, batch, t, exact.keys_for(8, 3)) for choice in (False, True)
    )
    masked = plain[1]["masked"] > 0
    np.testing.assert_allclose(
        drawn[0] - plain[0], np.where(masked, np.where(t < 0.5, expected[0], expected[2]), 0.0),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("schedule", [*SCHEDULES, LogLinear(), Geometric(), Clipped()])
@pytest.mark.parametrize("u", [0.0, 2.0**-24, 1.0 - 2.0**-24])
@pytest.mark.cases(2)
def test_the_ends_are_finite_in_float32_for_every_schedule(schedule, u):
    """Values, and the gradient in the denoiser's outputs, also where they are bfloat16."""
    process, batch = Masking(3, schedule), exact.batch_of(np.zeros((4, 2)))
    times, keys = jnp.full(4, u, jnp.float32), exact.keys_for(0, 4)
    for objective in (TDCE(), TDCE(drawn_constant=True), LambdaDCE()):
        for dtype in (jnp.float32, jnp.bfloat16):

            def loss(table, objective=objective):
                denoiser = exact.Denoiser(
                    lambda z, t: jnp.broadcast_to(table, (*z.shape, 3)), lambda h: h
                )
                return objective(denoiser, process, batch, times, keys)[0].sum()

            value, slope = jax.value_and_grad(loss)(jnp.asarray([0.3, -0.2, 0.1], dtype))
            assert value.dtype == jnp.float32 and jnp.isfinite(value)
            assert jnp.isfinite(slope.astype(jnp.float32)).all()
