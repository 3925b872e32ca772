"""The sampled concrete score objective and the Metropolis-Hastings chain; n is in each test."""

import functools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from md4_jax.objectives.concrete_score import ConcreteScore
from md4_jax.processes.neighbours import random_move
from md4_jax.processes.schedules import LogLinear
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.metropolis import Metropolis

pytestmark = pytest.mark.slow

N, K = 40_000, 4.5
P, STATES = exact.P_V3L2, exact.sequences(3, 2)
PROCESS = Uniform(3, LogLinear(), "score")


def denoiser_of(table) -> Denoiser:
    return Denoiser(lambda z, t: jnp.asarray(table)[z @ jnp.array([3, 1])], lambda h: h)


def kernel_at(t: float) -> np.ndarray:
    alpha = 1.0 - 0.999 * t
    return alpha * np.eye(3) + (1.0 - alpha) / 3.0


def ratios(law: np.ndarray) -> np.ndarray:
    """law(z with y at n) / law(z): [9, L, V]."""
    both = np.stack([law[:, STATES[:, 1]].T, law[STATES[:, 0]]], axis=1)
    return both / law.ravel()[:, None, None]


def noised_law(t: float) -> np.ndarray:
    return np.einsum("ab,ai,bj->ij", P, kernel_at(t), kernel_at(t))


S = np.exp(0.7 * np.sin(1.0 + 2.1 * np.arange(9)[:, None, None] + np.arange(6).reshape(2, 3)))
S[np.eye(3, dtype=bool)[STATES]] = 1.0


def squared_error(t: float) -> tuple[float, float]:
    """(E |s - p_t's ratios|^2, E |p_t's ratios - 1|^2) by enumeration."""
    law = noised_law(t)
    truth = ratios(law)
    return tuple(law.ravel() @ (v**2).sum(axis=(1, 2)) for v in (S - truth, truth - 1.0))


def estimate(objective) -> np.ndarray:
    """N values with x ~ p."""
    x = STATES[np.random.default_rng(0).choice(9, N, p=P.ravel())]
    call = jax.jit(
        lambda u, keys: objective(denoiser_of(np.log(S)), PROCESS, exact.batch_of(x), u, keys)[0]
    )
    return np.asarray(call(jnp.linspace(0.0, 1.0, N, endpoint=False), exact.keys_for(4, N)))


def assert_mean(values, expected):
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() - expected) < K * error, (values.mean(), expected, error)
    assert error < 0.05 * abs(expected)  # so that the test says something


@pytest.mark.parametrize("t", [0.0, 0.5])
def test_c01_the_sampled_matching_objective(t):
    """Clean data and one level: n = 40,000, within 4.5 standard errors of error less constant."""
    error, constant = squared_error(t)
    assert_mean(estimate(ConcreteScore(time=t)), error - constant)


def test_the_sampled_denoising_objective():
    """n = 40,000, within 4.5 standard errors of rho^2 / V (squared error + E Var(r given z))."""
    t, law, kernel = 0.5, noised_law(0.5), kernel_at(0.5)
    joint = P.ravel()[:, None] * np.prod(kernel[STATES[:, None], STATES[None]], axis=2)
    r = kernel[STATES[:, None, :, None], np.arange(3)] / kernel[STATES[:, None], STATES][..., None]
    second = np.einsum("xz,xznv->", joint, r**2)
    scatter = second - law.ravel() @ (ratios(law) ** 2).sum(axis=(1, 2))
    rho = kernel[0, 1] / kernel[0, 0]
    expected = rho**2 / 3 * (squared_error(t)[0] + scatter)
    assert_mean(estimate(ConcreteScore("denoising", t)), expected)


def test_drawn_levels_are_weighted_over_the_whole_interval():
    """t from 40,000 strata: within 4.5 errors of int rho^2 (error - constant) dt."""
    t, weight = exact.quadrature(nodes=40)
    rho = np.array([kernel_at(a)[0, 1] / kernel_at(a)[0, 0] for a in t])
    values = np.array([np.subtract(*squared_error(a)) for a in t])
    assert_mean(estimate(ConcreteScore()), weight @ (rho**2 * values))


def test_neighbours_are_drawn_uniformly():
    """12 neighbours of one sequence, L = 4 and V = 4: chi-squared, n = 40,000, p > 1e-4."""
    z = jnp.asarray(np.tile([[0, 3, 1, 1]], (N, 1)))
    every = jnp.ones(z.shape, bool)
    where, symbol = jax.jit(random_move, static_argnums=2)(exact.keys_for(0, N), z, 4, every)
    counts = np.bincount(4 * np.asarray(where) + np.asarray(symbol), minlength=16)
    own = [0, 7, 9, 13]
    assert (counts[own] == 0).all()
    assert stats.chisquare(np.delete(counts, own)).pvalue > 1e-4


@functools.partial(jax.jit, static_argnums=(0, 2))
def chains(step, law, steps):
    return exact.drawn(denoiser_of(law), PROCESS, step, uniform(steps), exact.keys_for(7, N))[0]


def counts_of(step, table, steps) -> np.ndarray:
    return np.bincount(np.asarray(chains(step, table, steps)) @ np.array([3, 1]), minlength=9)


def slowest(law: np.ndarray) -> float:
    """The second eigenvalue of the chain's kernel: how much of the start is left a proposal."""
    near = (STATES[:, None] != STATES[None]).sum(axis=2) == 1
    kernel = np.where(near, np.minimum(1.0, law.ravel()[None] / law.ravel()[:, None]) / 4.0, 0.0)
    kernel += np.diag(1.0 - kernel.sum(axis=1))
    return np.sort(np.abs(np.linalg.eigvals(kernel)))[-2]


@pytest.mark.campaign
@pytest.mark.parametrize(
    "proposals, steps", [(16, 8), pytest.param(128, 1, marks=pytest.mark.campaign)]
)
def test_the_law_of_the_chain_with_exact_ratios(proposals, steps):
    """p after 128 proposals: 9 sequences, one draw of each of n = 40,000 chains, p > 1e-4."""
    assert slowest(P) ** 128 < 1e-4  # the start is forgotten
    counts = counts_of(Metropolis(proposals), jnp.log(ratios(P)), steps)
    assert stats.chisquare(counts, N * P.ravel()).pvalue > 1e-4


def test_one_proposal_has_the_enumerated_law():
    """From the uniform prior; it is not yet p, which is refused at once. n = 40,000, p > 1e-4."""
    law = P.ravel()
    near = (STATES[:, None] != STATES[None]).sum(axis=2) == 1
    kernel = np.where(near, np.minimum(1.0, law[None] / law[:, None]) / 4.0, 0.0)
    kernel += np.diag(1.0 - kernel.sum(axis=1))
    counts = counts_of(Metropolis(1), jnp.log(ratios(P)), 1)
    assert stats.chisquare(counts, N * kernel.mean(axis=0)).pvalue > 1e-4
    assert stats.chisquare(counts, N * law).pvalue < 1e-12


@pytest.mark.campaign
def test_a_noised_level_is_sampled_and_then_denoised():
    """Level 0.5: p_t, then p(x | z) at each position alone; chi-squared, n = 40,000, p > 1e-4."""
    law, kernel = noised_law(0.5), kernel_at(0.5)
    assert slowest(law) ** 128 < 1e-4
    joint = P.ravel()[:, None] * np.prod(kernel[STATES[:, None], STATES[None]], axis=2)
    each = [[joint[STATES[:, n] == k].sum(axis=0) for k in range(3)] for n in range(2)]
    expected = np.einsum("iz,jz,z->ij", *np.array(each), 1.0 / law.ravel()).ravel()
    counts = counts_of(Metropolis(128, 0.5), jnp.log(ratios(law)), 1)
    assert stats.chisquare(counts, N * expected).pvalue > 1e-4
