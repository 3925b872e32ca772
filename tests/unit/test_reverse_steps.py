"""Reverse steps against identities T03 to T13 and G01, from what the steps themselves compute."""

import dataclasses

import chains
import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from md4_jax.processes.masking import Masking
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import Cosine, Geometric, Linear, Polynomial
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.uniform import Uniform
from md4_jax.samplers import jumps, orders, predictor_corrector, reveal
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.chain import NEVER
from md4_jax.samplers.jumps import Euler, TauLeaping
from md4_jax.samplers.orders import FirstHitting
from md4_jax.samplers.predictor_corrector import PredictorCorrector
from md4_jax.samplers.remask import Remask
from md4_jax.samplers.transforms import Transform
from md4_jax.samplers.tweedie import Tweedie

N = 20_000
FORMS = ("joint", "mixture", "score")
PERFECT = exact.denoiser_of(exact.perfect_logits(exact.P_V3L2))
every_form = pytest.mark.parametrize("form", FORMS)


@dataclasses.dataclass(frozen=True)
class NoiseIsTime:
    """sigma_bar_t = t, so that beta = 1."""

    def alpha(self, t):
        return jnp.exp(-t)

    def one_minus_alpha(self, t):
        return -jnp.expm1(-t)

    def dalpha(self, t):
        return -jnp.exp(-t)

    def inverse(self, one_minus_alpha):
        return -jnp.log1p(-one_minus_alpha)


def recorded(monkeypatch, module) -> dict:
    """What a step of the module hands to `moves`: its rates and the chances to jump."""
    seen = {}

    def moves(rates, probability, z, keys):
        seen.update(rates=np.asarray(rates), leaves=np.asarray(probability))
        return z, probability

    monkeypatch.setattr(module, "moves", moves)
    return seen


def scalars(*times):
    return tuple(jnp.asarray(t, float) for t in times)


NOISES = {f"uniform {form}": Uniform(3, NoiseIsTime(), form) for form in FORMS} | {
    f"rates {form}": Rates(3, NoiseIsTime(), parametrisation=form) for form in FORMS[:2]
}


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["uniform joint", "uniform score", "rates mixture"])
@pytest.mark.parametrize(
    "step, distances",
    [
        (TauLeaping("reject"), [0.0032713029402, 0.00083631955504, 0.00021145105586]),
        (Euler(), [0.0034839830602, 0.00088792857039, 0.00022413269476]),
    ],
)
def test_t08_one_step_is_exact_to_second_order(noise, step, distances, monkeypatch, x64):
    """V = 3, L = 1, from t = 1: total variation from the exact law, by Bayes over z_s."""
    z, seen, process = jnp.arange(3)[:, None], recorded(monkeypatch, jumps), NOISES[noise]
    denoiser = exact.uniform_outputs(process, exact.P_V3L1)
    for h, distance in zip((0.1, 0.05, 0.025), distances, strict=True):
        step(denoiser, process, exact.chain_of(z), *scalars(1.0 - h, 1.0), exact.keys_for(0, 3))
        rates, leaves = seen["rates"][:, 0], seen["leaves"]
        law = leaves * rates / rates.sum(axis=1, keepdims=True) + np.diag(1.0 - leaves[:, 0])
        levels = -np.expm1(-(1.0 - h)), -np.expm1(-1.0)
        away = np.abs(law - exact.uniform_marginals(exact.P_V3L1, *levels)[:, 0])
        assert 0.5 * away.sum(axis=1).max() == pytest.approx(distance, abs=1e-8)


@pytest.mark.parametrize(
    "schedule, exactly, euler, leaping",
    [
        (Linear(), 0.2, 0.2, 0.18126924692),
        (Cosine(), 0.16874612445, 0.15707963268, 0.14536400085),
        (Polynomial(2.0), 0.36, 0.4, 0.32967995396),
    ],
)
def test_t09_the_chance_that_a_mask_is_revealed(schedule, exactly, euler, leaping, x64):
    """From t = 0.5 to s = 0.4; exactly one jump has h rate times the chance of none."""
    process, times = Masking(3, schedule), scalars(0.4, 0.5)
    steps = Ancestral(), Tweedie(), Euler(), TauLeaping(), TauLeaping("reject")
    found = [step.reveal_probability(process, *times) for step in steps]
    expected = [exactly, exactly, euler, leaping, euler * (1.0 - leaping)]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_t09_no_chance_is_above_one(x64):
    """h rate = 2 at the last step of a polynomial schedule: Euler is cut off."""
    process, times = Masking(3, Polynomial(2.0)), scalars(0.0, 0.5)
    assert Euler().reveal_probability(process, *times) == 1.0
    np.testing.assert_allclose(
        TauLeaping().reveal_probability(process, *times), 0.864664716763, rtol=1e-9
    )


def test_t05_t06_tweedie_on_masks(x64):
    """sigma_bar 0.5 -> 0.405: a score that adds up to alpha/(1 - alpha) shares it; 0.9 -> 0.5."""
    process, times = Masking(2, Geometric(0.405, 0.5)), scalars(0.0, 1.0)
    chance = float(Tweedie().reveal_probability(process, *times))
    assert chance == pytest.approx(0.15362353545, rel=1e-9)
    whole = 1.0 / np.expm1(0.5)
    law = [0.25 / whole * chance, 0.375 / whole * chance, 1.0 - 0.625 / whole * chance]
    np.testing.assert_allclose(law, [0.024914713782, 0.037372070672, 0.93771321555], rtol=1e-9)
    chance = Tweedie().reveal_probability(Masking(3, NoiseIsTime()), *scalars(0.5, 0.9))
    assert 1.0 - float(chance) == pytest.approx(0.66304216956, rel=1e-9)


def analytic(process, outputs, z, s, t) -> np.ndarray:
    times = (jnp.full(len(z), time) for time in (s, t))
    return np.asarray(jax.nn.softmax(process.reverse_logits(outputs, z, *times), axis=-1))


@every_form
def test_t05_the_analytic_step_has_the_exact_marginals(form, x64):
    """From all z_t, by Bayes over all z_s; sigma_bar 0.9 -> 0.5 from (0, 1) has P(stay) of T05."""
    process, z = Uniform(3, NoiseIsTime(), form), jnp.asarray(exact.sequences(3, 2))
    for s, t in ((0.5, 0.9), (0.0, 2.0)):
        outputs = exact.uniform_outputs(process, exact.P_V3L2)(z, jnp.full(9, t))
        found = analytic(process, outputs, z, s, t)
        marginals = exact.uniform_marginals(exact.P_V3L2, -np.expm1(-s), -np.expm1(-t))
        np.testing.assert_allclose(found, marginals, rtol=1e-9)
        if s == 0.5:
            assert found[1, 0, 0] == pytest.approx(0.74439217607, rel=1e-9)


def outputs_of_score(form: str, score: np.ndarray, sigma: float) -> np.ndarray:
    """Outputs whose concrete score at z = V - 1 is this: mu solved from its linear equations."""
    size, alpha = len(score), np.exp(-sigma)
    if form == "score":
        return np.log(score)
    law = alpha * np.eye(size) + (1.0 - alpha) / size
    weight = np.linalg.solve(law, score)  # sum_x w(x) q(y | x) = s_y
    return np.log(weight * law[:, -1] if form == "mixture" else weight)


@every_form
def test_t07_the_analytic_step_of_a_score(form, x64):
    """d = 0.3: the staggered score times the way from y to z = 3, which has one token's law."""
    process, z = Uniform(4, NoiseIsTime(), form), jnp.array([[3]])
    score = np.array([0.25, 0.375, 0.9, 1.0])
    outputs = jnp.asarray(outputs_of_score(form, score, 0.4))[None, None]
    found = analytic(process, outputs, z, 0.1, 0.4)[0, 0]
    assert found[0] == pytest.approx(0.11661632961 * -np.expm1(-0.3) / 4, rel=1e-9)


@pytest.mark.parametrize("form", FORMS[:2])
def test_d04_one_step_from_the_posterior_of_uniform_noise(form, x64):
    """alpha_s = 0.6, alpha_t = 0.3, z_t = 0: the mixture is exact, the joint form is not."""
    posterior = exact.uniform_outputs(Uniform(3, parametrisation="mixture"), exact.P_V3L1)
    z, s, t = jnp.array([[0]]), jnp.array([0.4]), jnp.array([0.7])
    logits = Uniform(3, parametrisation=form).reverse_logits(posterior(z, t), z, s, t)
    expected = {"mixture": 0.75362318841, "joint": 0.8306010929}[form]
    assert float(jax.nn.softmax(logits)[0, 0, 0]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("process", NOISES.values(), ids=NOISES)
def test_t03_the_corrector_leaves_the_law_as_it_is(process, monkeypatch, x64):
    """sigma_bar = 0.6: p_s (R + Rhat) = 0, and the exit rate of (0, 0) with both rates."""
    z, seen = exact.sequences(3, 2), recorded(monkeypatch, predictor_corrector)
    denoiser = exact.uniform_outputs(process, exact.P_V3L2)
    arguments = exact.chain_of(z), *scalars(0.6, 0.1), exact.keys_for(0, 9)
    PredictorCorrector().correct(denoiser, process, *arguments)
    whole = chains.generator(Rates(3), 2, lambda z: seen["rates"])
    assert -whole[0, 0] == pytest.approx(2.2970368016, rel=2e-7)
    law = exact.P_V3L2.ravel() @ exact.noise_law(process, z, np.array([0.6]))[:, 0]
    np.testing.assert_allclose(law @ whole, 0.0, atol=1e-7)
    leaves = 1.0 - np.exp(-0.1 * seen["rates"].sum(axis=2))
    np.testing.assert_allclose(seen["leaves"], leaves, rtol=1e-9)


class Compared:
    """Stands for the uniforms of a step and keeps the chances that they are compared with."""

    def __init__(self):
        self.chances = []

    def __call__(self, keys, length):
        return self

    def __lt__(self, chance):
        self.chances.append(float(chance))
        return jnp.zeros((16, 2), bool)


def masked_law(p: np.ndarray, alpha: float) -> np.ndarray:
    """p_t over all noised states of two tokens [16]."""
    each = np.concatenate([alpha * np.eye(3), np.full((3, 1), 1.0 - alpha)], axis=1)
    return np.einsum("ij,ia,jb->ab", p, each, each).ravel()


def test_t03_the_corrector_of_masks(monkeypatch, x64):
    """sigma_bar = 0.6: its rates leave p_s, (0, 0) is left at rate 2, and one token's p_s stays
    exactly as it is in a long step too."""
    z, mu = exact.sequences(4, 2), np.exp(exact.perfect_logits(exact.P_V3L2))
    alpha, process, chances = np.exp(-0.6), Masking(3, NoiseIsTime()), {}
    for h in (1e-7, 0.5):
        monkeypatch.setattr(reveal, "uniforms", compared := Compared())
        arguments = exact.chain_of(z), *scalars(0.6, h), exact.keys_for(0, 16)
        PredictorCorrector().correct(PERFECT, process, *arguments)
        chances[h] = compared.chances
    taken, revealed = np.array(chances[1e-7]) / 1e-7
    rates = np.zeros((16, 2, 4))
    rates[..., :3] = revealed * mu * (z == 3)[..., None]
    rates[..., 3] = taken * (z < 3)
    whole = chains.generator(Rates(3, kernel="absorbing"), 2, lambda z: rates)
    assert -whole[0, 0] == pytest.approx(2.0, rel=1e-6)
    np.testing.assert_allclose(masked_law(exact.P_V3L2, alpha) @ whole, 0.0, atol=1e-6)
    taken, revealed = chances[0.5]
    assert alpha * taken == pytest.approx((1.0 - alpha) * revealed, rel=1e-12) and taken > 0.1


def schedule_of(process, length: int, since: float, until: float = 0.0):
    """Rounds and times of N sequences of masks alone, [N, length] each."""
    chain = exact.chain_of(jnp.full((N, length), process.mask_id))
    grid = np.array([until, since], np.float32)
    schedule = FirstHitting().schedule(process, chain, grid, exact.keys_for(11, N))
    return np.asarray(schedule.round), np.asarray(schedule.time, np.float64)


@pytest.mark.parametrize("until, none", [(0.2, 0.015625), (0.5, 0.244140625), (0.7, 0.669921875)])
def test_t11_how_often_nothing_is_revealed(until, none):
    """Three masks in (until, 0.8]: n = 20,000, within 4 standard errors."""
    rounds, _ = schedule_of(Masking(3), 3, 0.8, until)
    found = (rounds == NEVER).all(axis=1).mean()
    assert abs(found - none) < 4 * np.sqrt(none * (1 - none) / N)


@pytest.mark.parametrize(
    "length, since, means", [(4, 1.0, [0.8, 0.6, 0.4, 0.2]), (3, 0.8, [0.6, 0.4, 0.2])]
)
def test_t11_the_times_of_first_hitting(length, since, means):
    """Round by round, n = 20,000, within 4 standard errors; any mask may be first (p > 1e-4)."""
    rounds, times = schedule_of(Masking(3), length, since)
    np.testing.assert_array_equal(np.sort(rounds, axis=1), np.tile(np.arange(length), (N, 1)))
    ordered = np.take_along_axis(times, np.argsort(rounds, axis=1), axis=1)
    assert (np.diff(ordered, axis=1) <= 0).all()
    error = 4 * ordered.std(axis=0) / np.sqrt(N)
    assert (np.abs(ordered.mean(axis=0) - means) < error).all()
    assert stats.chisquare(np.bincount(rounds.argmin(axis=1), minlength=length)).pvalue > 1e-4


def test_t11_the_time_of_another_schedule(monkeypatch, x64):
    """Cosine, three masks at t = 0.8, U = 0.3: the largest of three uniforms is U^(1/3)."""
    draws = jnp.array([[0.1, 0.3 ** (1 / 3), 0.9, 0.2]])
    monkeypatch.setattr(orders, "uniforms", lambda keys, length: draws)
    chain = exact.chain_of([[3, 3, 0, 3]])
    schedule = FirstHitting().schedule(
        Masking(3, Cosine()), chain, scalars(0.0, 0.8), exact.keys_for(0, 1)
    )
    np.testing.assert_array_equal(schedule.round, [[2, 0, NEVER, 1]])
    assert float(schedule.time[0, 1]) == pytest.approx(0.43937610321, rel=1e-9)


W = np.array([0.8, 1.0, 1.5])


def test_g01_the_rates_are_those_of_the_exact_step(x64):
    """GenMD4 at t = 0.6: P(m -> k) in a step of 1e-6 by Bayes, p_k (t^w - s^w) / sum p t^w."""
    process = StateDependent(3, raw_power=jnp.log(jnp.expm1(jnp.asarray(W))))
    t, h, p = 0.6, 1e-6, exact.P_V3L1
    outputs = jnp.log(p * t**W)[None, None]
    found = process.reverse_rates(outputs, jnp.array([[3]]), jnp.array([t]))[0, 0]
    np.testing.assert_allclose(found, p * (t**W - (t - h) ** W) / (p @ t**W) / h, rtol=1e-5)
    assert (process.reverse_rates(outputs, jnp.array([[1]]), jnp.array([t])) == 0.0).all()


@pytest.mark.slow
@pytest.mark.parametrize("step", [Ancestral, Tweedie, Euler, TauLeaping, Remask])
@pytest.mark.cases(2)
def test_t13_temperature_zero_changes_tokens_but_not_when_they_appear(step):
    """One step from t = 0.9 to 0.3, all 16 states 8 times: the same positions, argmax at them."""
    z = jnp.asarray(np.tile(exact.sequences(4, 2), (8, 1)))
    arguments = Masking(3), exact.chain_of(z), jnp.float32(0.3), jnp.float32(0.9)
    keys = exact.keys_for(5, len(z))
    call = jax.jit(lambda make: make(PERFECT, *arguments, keys).z)
    warm, cold = (np.asarray(call(step(transform=Transform(heat)))) for heat in (1.0, 0.0))
    np.testing.assert_array_equal(warm == 3, cold == 3)
    new = (np.asarray(z) == 3) & (cold < 3)
    mu = np.asarray(jax.nn.softmax(PERFECT(z, jnp.zeros(len(z)))))
    best = mu > mu.max(axis=-1, keepdims=True) - 1e-6  # the first token has two at (m, m)
    assert (best[new, cold[new]]).all() and not best[new, warm[new]].all()
    assert 0 < new.sum() < (np.asarray(z) == 3).sum()
