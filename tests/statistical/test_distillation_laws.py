"""Laws of what distillations draw, beside enumerations of all paths; seeds are fixed."""

import itertools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from md4_jax.objectives.dcd import DCD
from md4_jax.objectives.distillation import DIVERGENCES
from md4_jax.objectives.sdtt import SDTT
from md4_jax.processes import duality
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser

N, V, L = 20_000, 2, 2
MASKS = (V,) * L
TEACHER, STUDENT = exact.table_logits(V, L), 0.7 * exact.table_logits(V, L)[::-1]
T = 0.8


def softmax_of(denoiser, z, t) -> np.ndarray:
    """The distributions at one state and time, float64 [L, V]."""
    found = denoiser(jnp.asarray([z]), jnp.full(1, t, jnp.float32))
    return special.softmax(np.asarray(found[0], np.float64), axis=-1)


def paths(teacher, process, z, times):
    """All ((probability, targets [L, V]), ...) of ancestral steps from z down these times.

    A mask is revealed with the probability of its step, as a token of the teacher there. Its
    target is what the teacher says then; in the last step it is that of all masks that are left.
    """
    t, *later = times
    said = softmax_of(teacher, z, t)
    if len(later) == 1:
        yield 1.0, said
        return
    level = process.schedule.one_minus_alpha
    at_s, at_t = (float(level(jnp.float32(time))) for time in (later[0], t))
    reveal = 1.0 - at_s / at_t
    choices = [[V, *list(range(V))] if symbol == V else [symbol] for symbol in z]
    for after in itertools.product(*choices):
        chance = 1.0
        for n in np.flatnonzero(np.array(z) == V):
            chance *= 1.0 - reveal if after[n] == V else reveal * said[n, after[n]]
        revealed = np.array(z) != np.array(after)
        for probability, rest in paths(teacher, process, after, later):
            yield chance * probability, np.where(revealed[:, None], said, rest)


def times_of(objective, round=0):
    step = float(objective.step_size(jnp.int32(round)))
    return [max(T - i * step, 0.0) for i in range(objective.per_step + 1)]


def drawn_targets(objective, teacher, process, z, round=0) -> np.ndarray:
    """The targets of N draws at z and T, as distributions [N, L, V]."""
    both = exact.taught(teacher, teacher, round)
    batch = exact.batch_of(np.zeros((N, L)))
    found = jax.jit(lambda keys: objective.targets(
        both, process, batch, jnp.full((N, L), jnp.asarray(z)), jnp.full(N, T), keys
    ))(exact.keys_for(4, N))  # fmt: skip
    return special.softmax(np.asarray(found, np.float64), axis=-1)


CASES = [(SDTT(steps=5, per_step=2), 0), (SDTT(steps=20, per_step=3), 1), (SDTT(steps=4), 1)]


@pytest.mark.parametrize("process", [Masking(V), Masking(V, Cosine())])
@pytest.mark.parametrize("objective, round", CASES)
@pytest.mark.cases(3)
def test_targets_have_the_law_of_the_paths_of_the_teacher(objective, round, process):
    """Of both positions together: chi-squared over all different targets, p > 1e-4."""
    teacher = exact.denoiser_of(TEACHER, time=0.5)
    law: dict[tuple, float] = {}
    for chance, said in paths(teacher, process, MASKS, times_of(objective, round)):
        key = tuple(np.round(said, 4).ravel())
        law[key] = law.get(key, 0.0) + chance
    assert len(law) > 4 and sum(law.values()) == pytest.approx(1.0)
    found = drawn_targets(objective, teacher, process, MASKS, round)
    known = np.array(list(law))
    nearest = np.abs(found.reshape(N, 1, -1) - known).max(axis=-1)
    assert nearest.min(axis=1).max() < 2e-4
    counts = np.bincount(nearest.argmin(axis=1), minlength=len(law))
    assert stats.chisquare(counts, N * np.array(list(law.values()))).pvalue > 1e-4


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.cases(2)
def test_the_loss_is_the_mean_over_all_paths(name):
    """At one z_t of masks: to 4 standard errors of 20,000 draws."""
    process, objective = Masking(V), SDTT(steps=5, per_step=3, divergence=name)
    teacher, student = exact.denoiser_of(TEACHER, time=0.5), exact.denoiser_of(STUDENT, time=0.3)
    own = jnp.log(softmax_of(student, MASKS, T))
    expected = sum(
        chance * float(DIVERGENCES[name](own, jnp.log(said)).sum())
        for chance, said in paths(teacher, process, MASKS, times_of(objective))
    )
    both, batch = exact.taught(student, teacher), exact.batch_of(np.zeros((N, L)))
    nats = jax.jit(lambda keys: objective.loss_at(
        both, process, batch, jnp.full((N, L), V), jnp.full(N, T), keys
    ))(exact.keys_for(5, N))  # fmt: skip
    error = float(nats.std()) / np.sqrt(N)
    assert abs(float(nats.mean()) - expected) < 4.0 * error < 0.05 * expected


P = np.array([[0.4, 0.1], [0.05, 0.45]])


def slope_at_the_teacher(divergence, teacher):
    """(mean, standard error) of the gradient of two outputs at all masks, student = teacher."""
    process, objective = Masking(V), SDTT(steps=5, per_step=4, divergence=divergence)
    start = jnp.asarray(np.log(softmax_of(teacher, MASKS, T)), jnp.float32)

    def nats(own, key):
        student = exact.of_outputs(lambda z, t: jnp.broadcast_to(own, (*z.shape, V)))
        both, batch = exact.taught(student, teacher), exact.batch_of(np.zeros((1, L)))
        return objective.loss_at(
            both, process, batch, jnp.full((1, L), V), jnp.full(1, T), key[None]
        )[0]

    slopes = jax.jit(jax.vmap(jax.grad(nats), (None, 0)))(start, exact.keys_for(6, N))
    slopes = np.asarray(slopes, np.float64).reshape(N, -1)
    return slopes.mean(axis=0), slopes.std(axis=0) / np.sqrt(N)


def test_a_perfect_teacher_is_its_own_student_by_the_forward_divergence():
    """The mean target is the posterior, whatever is revealed meanwhile: no gradient, to 4
    standard errors. The reverse one has a gradient there, and so has a teacher that is wrong."""
    perfect = exact.denoiser_of(exact.perfect_logits(P))
    mean, error = slope_at_the_teacher("kl", perfect)
    assert (np.abs(mean) < 4.0 * error).all() and error.max() < 5e-3
    mean, error = slope_at_the_teacher("reverse_kl", perfect)
    assert (np.abs(mean) > 8.0 * error).any()
    mean, error = slope_at_the_teacher("kl", exact.denoiser_of(TEACHER))
    assert (np.abs(mean) > 8.0 * error).any()


# DCD

SYMBOLS, LOW, HIGH = 3, -1.0, 2.0


def law_of_a_pair(gamma_t, gamma_s, x) -> np.ndarray:
    """P(z_t, z_s | x): z_s is x wherever z_t is, and else x or the same other symbol."""
    kept_t, kept_s = (
        1.0 - float(duality.level(jnp.float32(g), SYMBOLS).noise) * (SYMBOLS - 1) / SYMBOLS
        for g in (gamma_t, gamma_s)
    )
    law = np.diag(np.full(SYMBOLS, (1.0 - kept_s) / (SYMBOLS - 1)))
    law[:, x] = (kept_s - kept_t) / (SYMBOLS - 1)
    law[x, x] = kept_t
    return law


def test_two_levels_of_a_trajectory_have_their_joint_law():
    """Chi-squared over all pairs that are possible, n = 20,000, p > 1e-4; the same from draws of
    all normal variables."""
    law = law_of_a_pair(1.2, -0.4, 1)
    assert law.sum() == pytest.approx(1.0) and (law > 0.01).sum() == 5
    levels = [jnp.full(N, 1.2), jnp.full(N, -0.4)]
    later, earlier = duality.trajectory(exact.keys_for(7, N), jnp.ones((N, 1), int), levels, 3)
    noise = np.random.default_rng(0).normal(size=(N, SYMBOLS))
    plain = [
        (np.exp(-0.5 * float(g[0])) * (np.arange(SYMBOLS) == 1) + noise).argmax(axis=-1)
        for g in levels
    ]
    for z, s in ((later[:, 0], earlier[:, 0]), plain):
        counts = np.bincount(np.asarray(z) * SYMBOLS + np.asarray(s), minlength=SYMBOLS**2)
        possible = law.ravel() > 0
        assert (counts[~possible] == 0).all()
        assert stats.chisquare(counts[possible], N * law.ravel()[possible]).pvalue > 1e-4


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.cases(1)
def test_the_loss_of_a_trajectory_is_the_mean_over_all_pairs(name):
    """Of two positions at one u: to 4 standard errors of 20,000 draws."""
    process, objective = Uniform(SYMBOLS), DCD(steps=4, low=LOW, high=HIGH, divergence=name)
    student = exact.uniform_outputs(process, exact.P_V3L2)
    teacher = exact.uniform_outputs(process, exact.P_V3L2.T**2)
    u, step, x = 0.3, 2 / 4, (0, 2)
    gammas = [LOW + (HIGH - LOW) * t for t in (u + step, u)]
    told = [
        process.schedule.inverse(duality.level(jnp.full(81, gamma), SYMBOLS).noise)
        for gamma in gammas
    ]
    states = exact.sequences(SYMBOLS, 4)  # z_t and then z_s
    said = student(states[:, :2], told[0]), teacher(states[:, 2:], told[1])
    each = np.asarray(DIVERGENCES[name](*said)).sum(axis=1)
    laws = [law_of_a_pair(*gammas, symbol) for symbol in x]
    chance = laws[0][states[:, 0], states[:, 2]] * laws[1][states[:, 1], states[:, 3]]
    both = exact.taught(student, Denoiser(teacher.features, teacher.unembed), round=1)
    call = jax.jit(lambda keys: objective(
        both, process, exact.batch_of(np.tile([x], (N, 1))), jnp.full(N, u), keys
    )[0])  # fmt: skip
    nats = call(exact.keys_for(8, N))
    error = float(nats.std()) / np.sqrt(N)
    assert abs(float(nats.mean()) - chance @ each) < 4.0 * error < 0.05 * float(nats.mean())
