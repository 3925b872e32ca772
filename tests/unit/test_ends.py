"""Scores and steps at both ends of every schedule, where alpha or 1 - alpha may be 0."""

import ends
import exact
import interpolating
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.processes.capabilities import HasReverse
from md4_jax.processes.gaussian_masking import GaussianMasking
from md4_jax.processes.hybrid import Hybrid
from md4_jax.processes.masking import Masking
from md4_jax.processes.metric_path import MetricPath
from md4_jax.processes.partial_masking import PartialMasking
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import LATEST, SCHEDULES, Linear
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser
from md4_jax.samplers import SAMPLERS, ancestral, jumps
from md4_jax.samplers.ancestral import reveal_by_symbol

P = exact.P_V3L1


def outputs_and_states(process) -> tuple[jax.Array, jax.Array]:
    """Every state beside ordinary outputs, none, sharp ones, and those that top-k leaves."""
    kinds = [np.sin(np.arange(3.0)), np.zeros(3), np.array([80.0, 0.0, -80.0])]
    kinds = np.stack([*kinds, np.array([0.0, -np.inf, -np.inf])])
    where, kind = np.indices((ends.states(process), len(kinds))).reshape(2, -1)
    return jnp.asarray(kinds[kind], jnp.float32)[:, None], jnp.asarray(where[:, None], jnp.int32)


def assert_laws(logits: np.ndarray) -> None:
    """Each row has a symbol to draw, and no number is none."""
    assert not np.isnan(logits).any() and np.isfinite(logits.max(axis=-1)).all()


def noise_at(process, t: float) -> float:
    if isinstance(process, Hybrid):
        return t
    return float(process.schedule.one_minus_alpha(jnp.float32(t)))


NOISY = [case for case in ends.cases() if isinstance(case.values[0], HasReverse)]


@pytest.mark.quick(25)
@pytest.mark.parametrize("process", NOISY)
@pytest.mark.cases(20)
def test_every_row_of_logits_is_a_law(process):
    outputs, z = outputs_and_states(process)
    each = [(s, t, jnp.full(len(z), s), jnp.full(len(z), t)) for s, t in ends.times_of(process)]
    for _, t, before, now in each:
        # Without noise there is no mask to be undone.
        possible = ~np.asarray(process.is_noise(z))[:, 0] | (noise_at(process, t) > 0)
        assert_laws(np.asarray(process.reverse_logits(outputs, z, before, now))[possible])
    for t in (0.0, 1.0):
        logits = np.asarray(process.clean_logits(outputs, z, jnp.full(len(z), t)))
        # With a mask there is nothing else at the end and none of it at the beginning.
        possible = (not ends.has_mask(process)) | (np.asarray(process.is_noise(z))[:, 0] == t)
        assert_laws(logits[possible])


def numbers(process) -> list:
    """What is made of t alone, and the scores and rates, at both ends."""
    outputs, z = outputs_and_states(process)
    found = []
    for t in (0.0, 1.0):
        now = jnp.full(len(z), t)
        found += [process.log_score(outputs, z, now)]
        found += [process.beta(now)] if hasattr(process, "beta") else []
        if isinstance(process, Uniform):
            found += [process.odds(now), process.ratio(now)]
    return [*found, process.reverse_rates(outputs, z, jnp.ones(len(z)))]


@pytest.mark.parametrize(
    "process", [case for case in NOISY if not isinstance(case.values[0], Transition)]
)
@pytest.mark.cases(34)
def test_scores_and_rates_are_numbers(process):
    for value in map(np.asarray, numbers(process)):
        assert not np.isnan(value).any() and (value < np.inf).all()


def test_the_rate_at_the_end_is_large_where_the_slope_is_zero_too():
    """alpha' / alpha of the cosine schedule grows as 2 / (1 - t)."""
    for make in (Uniform, Rates):
        found = float(make(3, SCHEDULES["cosine"]()).beta(jnp.ones(1))[0])
        assert found == pytest.approx(2.0 / (1.0 - LATEST), rel=1e-3)


def test_the_score_without_noise_is_the_ratio_of_mu():
    """Joint: s_y = mu_y / mu_z at t = 0, and 1 at t = 1."""
    outputs, z = jnp.log(jnp.asarray(P))[None, None], jnp.array([[1]])
    for t, score in ((0.0, P / P[1]), (1.0, np.ones(3))):
        found = jnp.exp(Uniform(3).log_score(outputs, z, jnp.array([t])))
        np.testing.assert_allclose(found[0, 0], score, rtol=1e-6)


FIVE = np.array([0.40, 0.25, 0.20, 0.10, 0.05])


def test_four_steps_of_one_token_have_its_law():
    """Linear and joint: the first step is alpha_s mu + (1 - alpha_s) / V, the last law is mu."""
    process, z = Uniform(5, Linear(), "joint"), jnp.arange(5)[:, None]
    outputs, law = jnp.broadcast_to(jnp.log(jnp.asarray(FIVE)), (5, 1, 5)), np.full(5, 0.2)
    for t in (1.0, 0.75, 0.5, 0.25):
        now, then = jnp.full(5, t), jnp.full(5, t - 0.25)
        step = np.asarray(jax.nn.softmax(process.reverse_logits(outputs, z, then, now)))[:, 0]
        law = law @ step
        if t == 1.0:
            expected = np.tile(0.25 * FIVE + 0.75 / 5, (5, 1))
            np.testing.assert_allclose(step, expected, rtol=1e-6)
    np.testing.assert_allclose(law, FIVE, rtol=1e-5)


def forward(process, s: float | None, t: float) -> np.ndarray:
    """q(z_t | z_s) [S, S] from the generator or the matrices, float64; of x where s is None."""
    size = ends.states(process)
    if isinstance(process, Hybrid):
        return interpolating.step(process, s or 0.0, t)
    if isinstance(process, Transition):
        first, last = (round((time or 0.0) * process.timesteps) for time in (s, t))
        tables, whole = process._tables, np.eye(size)
        for i in range(first, last):
            distance = np.abs(np.arange(size)[:, None] - np.arange(size))
            matrix = tables.move[i][distance]
            if ends.has_mask(process):
                matrix[:, :3] = 0.0
            whole = whole @ np.where(distance == 0, tables.stay[i], matrix)
        return whole
    if isinstance(process, StateDependent):
        power = np.asarray(process.power)
        kept = (1.0 - t**power) / (1.0 - (s or 0.0) ** power)
        return np.block([[np.diag(kept), 1.0 - kept[:, None]], [np.zeros(3), np.ones(1)]])
    before, after = (
        1.0 if time is None else max(float(process.schedule.alpha(jnp.asarray(time, float))), 1e-99)
        for time in (s, t)
    )
    values, vectors = np.linalg.eig(generator(process))
    return np.real((vectors * np.exp(values * np.log(before / after))) @ np.linalg.inv(vectors))


def generator(process) -> np.ndarray:
    if isinstance(process, Rates):
        return process.parts.generator
    size = ends.states(process)
    target = np.eye(4)[3] if ends.has_mask(process) else np.full(3, 1 / 3)
    return target - np.eye(size)


def exact_outputs(process, law: np.ndarray) -> np.ndarray:
    """What the process's parametrisation asks for at each state [S, 3], by Bayes; law at t = 1."""
    clean = np.pad(P, (0, ends.states(process) - 3))
    form = getattr(process, "parametrisation", "joint")
    if form == "joint":
        return np.tile(np.log(P), (ends.states(process), 1))
    if form == "mixture":
        return np.log(law[:3].T * P)
    after = clean @ law
    return np.log(after / after[:, None])


def recorded(monkeypatch) -> dict:
    """What the steps hand to their draws."""
    seen = {}

    def draw_token(keys, logits):
        seen.update(logits=np.asarray(logits)[:, 0])
        return jnp.zeros(logits.shape[:-1], jnp.int32)

    def moves(rates, probability, z, keys):
        seen.update(rates=np.asarray(rates)[:, 0], leaves=np.asarray(probability))
        return z, probability

    monkeypatch.setattr(ancestral, "draw_token", draw_token)
    monkeypatch.setattr(jumps, "moves", moves)
    return seen


def law_of(step, process, outputs: np.ndarray, s: float, t: float, seen: dict) -> np.ndarray:
    """The law of z_s at each z_t [S, S], from what a step draws with."""
    size, outputs = ends.states(process), jnp.asarray(outputs)
    if isinstance(process, Masking):
        chance = float(step.reveal_probability(process, jnp.asarray(s), jnp.asarray(t)))
        return np.vstack([np.eye(4)[:3], [*(chance * P), 1.0 - chance]])
    seen.clear()
    chain = exact.chain_of(np.arange(size)[:, None])
    denoiser = Denoiser(lambda z, t: outputs[z], lambda h: h)
    step(denoiser, process, chain, jnp.asarray(s), jnp.asarray(t), exact.keys_for(0, size))
    if "rates" in seen:
        rates, leaves = seen["rates"], seen["leaves"]
        rates = np.pad(rates, ((0, 0), (0, size - rates.shape[1])))
        total = rates.sum(axis=1, keepdims=True)
        return leaves * rates / np.where(total > 0, total, 1.0) + np.diag(1.0 - leaves[:, 0])
    law = np.asarray(jax.nn.softmax(seen["logits"]))
    if isinstance(process, StateDependent):
        each = process.reveal_probabilities(jnp.asarray(s), jnp.asarray(t))
        chance = float(reveal_by_symbol(outputs, each)[1][3])
        return np.vstack([np.eye(4)[:3], [*(chance * law[3]), 1.0 - chance]])
    return law


def exact_law(process, s: float) -> np.ndarray:
    """p(z_s | z_1) by Bayes over all z_s: [S of z_1, S of z_s]."""
    at_s = np.pad(P, (0, ends.states(process) - 3)) @ forward(process, None, s)
    joint = at_s[:, None] * forward(process, s, 1.0)
    total = joint.sum(axis=0)
    return (joint / np.where(total > 0, total, 1.0)).T


def leapt_law(step, process, s: float) -> np.ndarray:
    """One jump at the reverse rates of t = 1, or of a float32 cell before it, by Bayes."""
    size, t = ends.states(process), LATEST
    if isinstance(process, Masking | StateDependent):
        if isinstance(process, StateDependent):
            leaving = np.asarray(process.power)
        else:
            levels = process.schedule.dalpha, process.schedule.one_minus_alpha
            slope, noise = (float(level(jnp.ones(()))) for level in levels)
            leaving = -slope / noise
        rates = np.pad((P * leaving)[None], ((3, 0), (0, 1)))
    elif isinstance(process, Hybrid):
        law = np.pad(P, (0, 1)) @ forward(process, None, t)
        to_each, to_mask = map(float, process.jump_rates(jnp.asarray(t, float)))
        onto = np.array([to_each] * 3 + [to_mask])
        rates = onto[:, None] * law / np.where(law > 0, law, 1.0)[:, None] * (1.0 - np.eye(4))
    else:
        law = np.pad(P, (0, size - 3)) @ forward(process, None, t)
        now = jnp.asarray(t, float)
        beta = -float(process.schedule.dalpha(now)) / float(process.schedule.alpha(now))
        rates = beta * generator(process).T * law / np.where(law > 0, law, 1.0)[:, None]
        rates *= 1.0 - np.eye(size)
    total = rates.sum(axis=1, keepdims=True)
    leaves = np.asarray(step.jump_probability(jnp.asarray((1.0 - s) * total)))
    return leaves * rates / np.where(total > 0, total, 1.0) + np.diag(1.0 - leaves[:, 0])


# The states of Gaussian noise are real numbers (test_candi.py), noise by distances has no forward
# steps (test_metric_path.py), and parts of tokens are revealed each by itself (test_prime.py).
ELSEWHERE = GaussianMasking | MetricPath | PartialMasking
FINITE = [case for case in ends.cases() if not isinstance(case.values[0], ELSEWHERE)]


@pytest.mark.quick(36)
@pytest.mark.parametrize("process", FINITE)
@pytest.mark.cases(30)
def test_one_step_from_the_end_has_the_right_law(process, monkeypatch, x64):
    """One token, exact outputs: by Bayes over all states, at every z_1 that can be."""
    seen = recorded(monkeypatch)
    s = ends.times_of(process)[0][0]
    last = forward(process, None, 1.0)
    possible = np.pad(P, (0, ends.states(process) - 3)) @ last > 1e-12
    with np.errstate(divide="ignore", invalid="ignore"):
        outputs = exact_outputs(process, last)
    for name in ("ancestral", "tweedie", "euler", "tau_leaping"):
        if not exact.fits(SAMPLERS[name](), process):
            continue
        step = SAMPLERS[name](transform=lambda outputs: outputs)
        leaps = name in ("euler", "tau_leaping")
        expected = leapt_law(step, process, s) if leaps else exact_law(process, s)
        found = law_of(step, process, outputs, s, 1.0, seen)
        np.testing.assert_allclose(found[possible], expected[possible], atol=1e-6, err_msg=name)
