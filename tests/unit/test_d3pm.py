"""D3PM's bound against identities D02, D03, D05 and D06, by enumeration of steps and states."""

import dataclasses
import math
import re

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives import head
from md4_jax.objectives.d3pm import D3PM
from md4_jax.objectives.token_nats import divergence_nats
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Clipped, Cosine, Geometric, Linear
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, UserError

pytestmark = pytest.mark.slow

BETAS = dict(beta_start=0.6, beta_end=0.6)


@dataclasses.dataclass(frozen=True)
class Exponential:
    """alpha = exp(-(slope t + offset))."""

    slope: float
    offset: float = 0.0

    def alpha(self, t):
        return jnp.exp(-(self.slope * t + self.offset))

    def one_minus_alpha(self, t):
        return -jnp.expm1(-(self.slope * t + self.offset))


@dataclasses.dataclass(frozen=True)
class Levels:
    """A schedule that is given at i / T alone."""

    levels: tuple[float, ...]

    def alpha(self, t):
        return jnp.asarray(self.levels)[jnp.round(t * (len(self.levels) - 1)).astype(int)]


def uniform_law(alpha: float, size: int) -> np.ndarray:
    return alpha * np.eye(size) + (1.0 - alpha) / size


def masked_law(alpha: float, size: int) -> np.ndarray:
    return np.concatenate([alpha * np.eye(size), np.full((size, 1), 1.0 - alpha)], axis=1)


def terms(objective, denoiser, process, x: np.ndarray, laws: list[np.ndarray]) -> np.ndarray:
    """Each step's term by enumeration of z_i: x [X, L], laws[i - 1] = q(z_i | x), to [T, X]."""
    states = exact.sequences(laws[0].shape[1], x.shape[1])
    step, row, code = np.indices((len(laws), len(x), len(states))).reshape(3, -1)
    tokens, z = x[row], states[code]
    chance = np.stack(laws)[step[:, None], tokens, z].prod(axis=1)
    value, possible = np.zeros(len(step)), chance > 0
    loss_at = jax.jit(lambda batch, z, i: objective.loss_at(denoiser, process, batch, z, i))
    batch = exact.batch_of(tokens[possible])
    value[possible] = loss_at(batch, z[possible], step[possible] + 1)
    return (chance * value).reshape(len(laws), len(x), -1).sum(axis=-1) / len(laws)


def bound(objective, denoiser, process, x, laws) -> np.ndarray:
    prior = np.asarray(objective.prior(process, exact.batch_of(x)))
    return terms(objective, denoiser, process, x, laws).sum(axis=0) + prior


def posterior(p: np.ndarray, laws: list[np.ndarray]) -> Denoiser:
    """log P(x | z_i) of one token, for each step i = t T."""
    reach = jnp.log(jnp.asarray(np.stack([p[:, None] * law for law in laws]) + 1e-300))

    def features(z, t):
        step = jnp.round(t * len(laws)).astype(int) - 1
        return jnp.moveaxis(reach, 1, 2)[step[:, None], z]

    return Denoiser(features, lambda h: h)


@pytest.mark.parametrize(
    "process",
    [
        Masking(3),
        Transition(3, Linear(), 4, "absorbing"),
        Transition(3, Linear(), 4, "absorbing", parametrisation="mixture"),
    ],
    ids=["masking", "joint", "mixture"],
)
def test_d02_masks_cost_what_md4_says(process, x64):
    laws = [masked_law(1 - i / 4, 3) for i in range(1, 5)]
    table = exact.denoiser_of(exact.table_logits(3, 2))
    value = bound(D3PM(4), table, process, np.array([[1, 2]]), laws)
    np.testing.assert_allclose(value, 2.4011125918, rtol=1e-10)


def test_d03_mass_on_the_mask_in_the_joint_form(x64):
    """alpha_s = 0.7, alpha_t = 0.45, x = 1."""
    schedule = Levels((1.0, 0.7, 0.45, 0.0))
    process = Transition(3, schedule, 3, "absorbing")
    x, z, t = jnp.array([[1]]), jnp.array([[3]]), jnp.full(1, 2 / 3)
    q = process.posterior_logits(x, z, jnp.full(1, 1 / 3), t)
    p = process.step_back(jnp.log(jnp.array([[[0.2, 0.5, 0.2, 0.1]]])), z, t)
    assert float(divergence_nats(p, q)[0, 0]) == pytest.approx(0.27931701067, rel=1e-10)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("closed", [True, False], ids=["closed form", "matrices"])
@pytest.mark.cases(3)
def test_d05_the_perfect_denoiser_reaches_the_entropy_at_every_T(steps, closed, x64):
    """With alpha_T = 0 for every x; with alpha_i = 0.8^i once z_T is coded by its own law."""
    for schedule in (Linear(), Exponential(-steps * math.log(0.8))):
        alphas = [float(schedule.alpha(jnp.float64(i / steps))) for i in range(1, steps + 1)]
        laws = [uniform_law(alpha, 3) for alpha in alphas]
        process = Transition(3, schedule, steps, "uniform", parametrisation="mixture")
        if closed:
            process = Uniform(3, schedule, "mixture")
        objective = D3PM(steps)
        x = exact.sequences(3, 1)
        value = bound(objective, posterior(exact.P_V3L1, laws), process, x, laws)
        last = exact.P_V3L1 @ laws[-1]
        value -= laws[-1] @ np.log(3 * last)
        np.testing.assert_allclose(value, -np.log(exact.P_V3L1), rtol=1e-9)
        assert exact.P_V3L1 @ value == pytest.approx(1.0296530141, rel=1e-10)


@pytest.mark.parametrize(
    "steps, value", [(100, 1.5865008913), (200, 1.5965009674), (400, 1.6014922219)]
)
def test_d06_many_steps_approach_the_score_entropy(steps, value, x64):
    """sigma_bar from 0.05 at the first step to 1 at the last; the steps between them."""
    slope = 0.95 * (steps + 1) / steps
    schedule = Exponential(slope, 1.0 - slope)
    process = Uniform(3, schedule, "mixture")
    sigma = 0.05 + 0.95 * np.arange(steps + 1) / steps
    laws = [uniform_law(math.exp(-s), 3) for s in sigma]
    table = exact.denoiser_of(exact.table_logits(3, 1))
    found = terms(D3PM(steps + 1), table, process, np.array([[1]]), laws)
    assert found[1:].sum() == pytest.approx(value, rel=1e-10)
    assert abs(found[1:].sum() - 1.6064733627) < 2.1 / steps


@pytest.mark.parametrize("parametrisation", ["joint", "mixture"])
@pytest.mark.parametrize("schedule", [Cosine(), Geometric(0.1, 4.0), Clipped(eps=0.05)])
@pytest.mark.cases(3)
def test_uniform_and_its_matrices_have_the_same_bound(schedule, parametrisation, x64):
    """Also for a schedule that starts below alpha = 1, where the last step goes to no noise."""
    steps, x = 3, exact.sequences(3, 1)
    alphas = [float(schedule.alpha(jnp.float64(i / steps))) for i in range(1, steps + 1)]
    laws = [uniform_law(alpha, 3) for alpha in alphas]
    table = exact.denoiser_of(exact.table_logits(3, 1))
    closed, tables = (
        bound(D3PM(steps), table, process, x, laws)
        for process in (
            Uniform(3, schedule, parametrisation),
            Transition(3, schedule, steps, "uniform", parametrisation=parametrisation),
        )
    )
    np.testing.assert_allclose(closed, tables, rtol=1e-9)


@pytest.mark.parametrize("parametrisation", ["joint", "mixture"])
def test_masks_and_their_matrices_have_the_same_bound(parametrisation, x64):
    """For a schedule that goes neither from 1 nor to 0: the last step masks all."""
    schedule, x = Geometric(0.1, 4.0), exact.sequences(2, 2)
    alphas = [*(float(schedule.alpha(jnp.float64(i / 3))) for i in (1, 2)), 0.0]
    laws = [masked_law(alpha, 2) for alpha in alphas]
    table = exact.denoiser_of(exact.table_logits(2, 2))
    tables = Transition(2, schedule, 3, "absorbing", parametrisation=parametrisation)
    closed, tables = (
        bound(D3PM(3), table, process, x, laws) for process in (Masking(2, schedule), tables)
    )
    np.testing.assert_allclose(tables, closed, rtol=1e-9)


def gaussian_laws(size: int, steps: int) -> list[np.ndarray]:
    one = Transition(size, timesteps=1, **BETAS)
    z = jnp.arange(size)[None]
    matrix = np.exp(one.clean_logits(jnp.zeros((1, size, size)), z, jnp.ones(1)))[0].T
    return [np.linalg.matrix_power(matrix, i) for i in range(1, steps + 1)]


def test_the_perfect_denoiser_reaches_the_entropy_with_gaussian_matrices(x64):
    """The perfect mixture reaches -log p(x) for every x once z_T is coded by its own law."""
    for steps in (1, 2, 4):
        process = Transition(3, timesteps=steps, parametrisation="mixture", **BETAS)
        laws = gaussian_laws(3, steps)
        value = bound(D3PM(), posterior(exact.P_V3L1, laws), process, exact.sequences(3, 1), laws)
        value -= laws[-1] @ np.log(3 * (exact.P_V3L1 @ laws[-1]))
        np.testing.assert_allclose(value, -np.log(exact.P_V3L1), rtol=1e-9)


def decoded(process, laws, x) -> list[float]:
    """The terms of p(x | z_1) of one token by `decoder`: reverse_step, then denoiser."""
    table = exact.denoiser_of(exact.table_logits(3, 1))
    return [
        terms(D3PM(len(laws), decoder=name), table, process, np.array([[x]]), laws)[0, 0]
        for name in ("reverse_step", "denoiser")
    ]


def mu_of(states: int) -> np.ndarray:
    """mu(x | z) of the table, [z, x]."""
    table = exact.denoiser_of(exact.table_logits(3, 1))
    return np.asarray(jax.nn.softmax(table(jnp.arange(states)[:, None], jnp.zeros(states))))[:, 0]


def test_the_two_decoders_of_the_joint_form_by_hand(x64):
    """E_z of -log mu(x | z), and of -log(mu(x | z) q(z | x) / sum_y mu(y | z) q(z | y))."""
    process, laws, mu = Transition(3, timesteps=2, **BETAS), gaussian_laws(3, 2), mu_of(3)
    law = laws[0]
    for x in range(3):
        joint = mu * law.T
        posterior = joint[:, x] / joint.sum(axis=1)
        expected = [-law[x] @ np.log(posterior), -law[x] @ np.log(mu[:, x])]
        np.testing.assert_allclose(decoded(process, laws, x), expected, rtol=1e-10)
    # In the mixture form the reverse step to no noise is the denoiser's distribution.
    mixture = dataclasses.replace(process, parametrisation="mixture")
    step, denoiser = decoded(mixture, laws, 1)
    assert step == pytest.approx(denoiser, rel=1e-10)
    assert denoiser == pytest.approx(-law[1] @ np.log(mu[:, 1]), rel=1e-10)


@pytest.mark.parametrize("process", [Masking(3), Transition(3, Linear(), 4, "absorbing")])
def test_the_denoiser_decodes_tokens_that_a_mask_left_alone(process, x64):
    """alpha_1 = 3/4, x = 1: a quarter of the mask's cost, and three quarters of z = x's besides."""
    laws, mu = [masked_law(1 - i / 4, 3) for i in range(1, 5)], mu_of(4)
    at_mask, at_x = -np.log(mu[[3, 1], 1])
    expected = [at_mask / 4, at_mask / 4 + 3 * at_x / 4]
    np.testing.assert_allclose(decoded(process, laws, 1), expected, rtol=1e-10)


@pytest.mark.parametrize("decoder", ["reverse_step", "denoiser"])
def test_either_decoder_makes_a_bound_of_its_own_model(decoder, x64):
    """One step, one token: p(x) = mean over z of p(x | z), and -log p(x) is below the bound."""
    process, laws, mu = Transition(3, timesteps=1, **BETAS), gaussian_laws(3, 1), mu_of(3)
    table, x = exact.denoiser_of(exact.table_logits(3, 1)), exact.sequences(3, 1)
    decode = mu if decoder == "denoiser" else mu * laws[0].T
    p = (decode / decode.sum(axis=1, keepdims=True)).mean(axis=0)
    gap = bound(D3PM(decoder=decoder), table, process, x, laws) + np.log(p)
    assert (gap > 0).all() and (gap < 1).all()


CASES = {
    "masking": (Masking(3), 4),
    "uniform": (Uniform(3), 4),
    "gaussian": (Transition(3, timesteps=4, **BETAS), None),
}


@pytest.mark.parametrize("process, steps", CASES.values(), ids=CASES)
@pytest.mark.cases(1)
def test_the_sum_over_all_steps_is_the_mean_over_u(process, steps):
    """u in quarters takes the steps 1 to 4; with the same z both ways give the same number."""
    objective, table = D3PM(steps), exact.denoiser_of(exact.table_logits(3, 2), time=0.5)
    batch, keys = exact.batch_of([[0, 2], [1, 1], [2, 0]]), exact.keys_for(2, 3)
    total = jax.jit(lambda keys: objective.all_steps(table, process, batch, keys))(keys)
    times, values = [], []
    for i in range(1, 5):
        seen = Denoiser(lambda z, t: (times.append(t[0]), table.features(z, t))[1], table.unembed)
        each = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
        nats, extra = objective(seen, process, batch, jnp.full(3, (i - 0.5) / 4), each)
        values.append(nats - extra["prior"])
    np.testing.assert_allclose(times, [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(total, np.mean(values, axis=0) + extra["prior"], rtol=1e-5)
    assert ((extra["prior"] > 0.01) == ("gaussian" in str(process))).all()


@pytest.mark.parametrize("process, steps", CASES.values(), ids=CASES)
@pytest.mark.cases(2)
def test_the_cross_entropy_is_added_for_every_step(process, steps):
    """Flat outputs: log 3 for each token that the network predicts, times T lambda."""
    if isinstance(process, Uniform):
        process = dataclasses.replace(process, parametrisation="mixture")
    flat = Denoiser(lambda z, t: jnp.zeros((*z.shape, 3)), lambda h: h)
    z = jnp.array([[3, 2]] if process.shows_clean else [[0, 2]])
    arguments = (flat, process, exact.batch_of([[0, 2]]), z, jnp.array([2]))
    plain, more = D3PM(steps), D3PM(steps, cross_entropy=0.1)
    predicted = 1 if process.shows_clean else 2
    np.testing.assert_allclose(
        more.loss_at(*arguments) - plain.loss_at(*arguments), 0.4 * predicted * np.log(3), rtol=1e-5
    )
    assert plain.is_bound(process) and not more.is_bound(process)


@pytest.mark.parametrize("parametrisation", ["joint", "mixture"])
@pytest.mark.cases(1)
def test_a_large_vocabulary_keeps_its_digits_in_float32(parametrisation):
    """V = 50257, T = 1000, at z = x, beside x and at both ends: float32 against float64."""
    size = 50257
    outputs = 2.0 * np.sin(np.arange(size) * 1.7)[None, None] + np.zeros((4, 2, 1))
    outputs[:, :, 7] += 14.0
    z, x = jnp.array([[7, 7], [7, 9], [9, 7], [9, 11]]), np.full((4, 2), 7)

    def nats(dtype):
        denoiser = Denoiser(lambda z, t: jnp.asarray(outputs, dtype), lambda h: h)
        process = Uniform(size, Linear(), parametrisation)
        loss_at = jax.jit(
            lambda step: D3PM().loss_at(denoiser, process, exact.batch_of(x), z, step)
        )
        return np.array([loss_at(jnp.full(4, i)) for i in (2, 30, 600, 1000)])

    single = nats(jnp.float32)
    with jax.enable_x64(True):
        double = nats(jnp.float64)
    assert single.dtype == np.float32 and double.dtype == np.float64 and (double > 0).all()
    np.testing.assert_allclose(single, double, rtol=3e-4)


@pytest.mark.parametrize("kernel", ["gaussian", "absorbing"])
def test_a_thousand_matrices_keep_their_digits_in_float32(kernel):
    """The sum over a few of T = 1000 steps with V = 32, float32 against float64."""
    process = Transition(32, Linear(), 1000, kernel)
    outputs = 2.0 * np.sin(np.arange(32) * 1.7)[None, None] + np.zeros((3, 1, 1))
    x, step = np.array([[5], [6], [20]]), jnp.array([30, 500, 1000])

    def nats(dtype):
        denoiser = Denoiser(lambda z, t: jnp.asarray(outputs, dtype), lambda h: h)
        z = jnp.asarray(np.full((3, 1), 32) if process.shows_clean else x)
        loss_at = jax.jit(lambda z: D3PM().loss_at(denoiser, process, exact.batch_of(x), z, step))
        return np.asarray(loss_at(z))

    single = nats(jnp.float32)
    with jax.enable_x64(True):
        double = nats(jnp.float64)
    np.testing.assert_allclose(single, double, rtol=1e-3)


@pytest.mark.parametrize("process, steps", CASES.values(), ids=CASES)
@pytest.mark.cases(1)
def test_a_bfloat16_network_at_both_ends(process, steps):
    batch, keys = exact.batch_of([[0, 2], [1, 1]]), exact.keys_for(2, 2)

    def loss(table, u):
        denoiser = Denoiser(lambda z, t: jnp.broadcast_to(table, (*z.shape, 3)), lambda h: h)
        nats, _ = D3PM(steps)(denoiser, process, batch, jnp.full(2, u, jnp.float32), keys)
        assert nats.dtype == jnp.float32
        return nats.sum()

    for u in (0.0, 1.0 - 2.0**-24):
        value, gradient = jax.value_and_grad(loss)(jnp.array([30.0, 0.0, -30.0], jnp.bfloat16), u)
        assert jnp.isfinite(value) and jnp.isfinite(gradient).all()


def test_the_divergence_of_laws_with_zeros():
    """KL((1/2, 1/2, 0) || (1/4, 1/2, 1/4)) = log(2) / 2; infinite where p alone is zero."""
    q, p = jnp.log(jnp.array([0.5, 0.5, 0.0])), jnp.log(jnp.array([0.25, 0.5, 0.25]))
    np.testing.assert_allclose(divergence_nats(p, q), 0.5 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(divergence_nats(q, q), 0.0, atol=1e-7)
    assert divergence_nats(q, p) == np.inf


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: D3PM(0), "objective.timesteps must be at least 1, not 0"),
        (
            lambda: D3PM(decoder="joint"),
            "objective.decoder must be one of reverse_step, denoiser, not 'joint'",
        ),
        (lambda: D3PM(cross_entropy=-1.0), "objective.cross_entropy must not be negative, not -1"),
        (
            lambda: D3PM(20).check(Transition(3, timesteps=10)),
            "objective.timesteps=20 must be process.timesteps=10",
        ),
        (lambda: D3PM(cross_entropy=0.1).check(Uniform(3)), "'mixture', not 'joint'"),
        (
            lambda: D3PM(cross_entropy=0.1).check(Transition(3, kernel="uniform")),
            "'mixture', not 'joint'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_what_goes_together_is_not_refused():
    D3PM(10).check(Transition(3, timesteps=10))
    D3PM(cross_entropy=0.001).check(Transition(3))
    D3PM(cross_entropy=0.1).check(Uniform(3, parametrisation="mixture"))
    D3PM(cross_entropy=0.1).check(Masking(3))


@pytest.mark.parametrize("decoder", ["reverse_step", "denoiser"])
def test_masks_never_take_the_logits_of_all_tokens_at_once(decoder, monkeypatch):
    """Of 4 x 16 tokens and 2048 symbols, with chunks of 4 tokens."""
    monkeypatch.setattr(head, "LOGITS", head.Logits(4 * 2048, kept=4 * 2048))
    kernel = jnp.ones((2, 2048))
    denoiser = Denoiser(lambda z, t: jnp.ones((*z.shape, 2)), lambda h: h @ kernel)
    objective, process = D3PM(8, cross_entropy=0.01, decoder=decoder), Masking(2048)
    batch = exact.batch_of(np.zeros((4, 16), np.int32))
    u, keys = jnp.linspace(0.1, 0.9, 4), jax.random.split(jax.random.key(0), 4)

    def loss(kernel):
        own = denoiser._replace(unembed=lambda h: h @ kernel)
        return jnp.sum(objective(own, process, batch, u, keys)[0])

    program = str(jax.make_jaxpr(jax.grad(loss))(kernel))
    shapes = re.findall(r"f32\[([\d,]+)\]", program)
    sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
    assert 4 * 2048 in sizes and max(sizes) <= 4 * 2048
