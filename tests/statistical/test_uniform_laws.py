"""Uniform noise: draws and samples have the enumerated laws; n and the p-value are in each test."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.processes.schedules import Geometric, Linear, LogLinear
from md4_jax.processes.uniform import Uniform
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import uniform

pytestmark = pytest.mark.slow

N = 20_000
P, CODE = exact.P_V3L2, np.array([3, 1])
every_parametrisation = pytest.mark.parametrize("parametrisation", ["joint", "mixture", "score"])


@pytest.mark.parametrize("t", [0.02, 0.5, 1.0])
def test_corrupted_tokens_have_the_law_of_the_process(t):
    """Both positions together, 16 states, V = 4: chi-squared, n = 20,000, p > 1e-4."""
    process, x = Uniform(4, LogLinear(0.1)), np.tile([[2, 0]], (N, 1))
    z = jax.jit(process.corrupt)(exact.keys_for(1, N), x, jnp.full(N, t))
    law = exact.noise_law(process, x[:1], np.array([t]))[0, 0]
    counts = np.bincount(np.asarray(z) @ np.array([4, 1]), minlength=16)
    assert stats.chisquare(counts, N * law / law.sum()).pvalue > 1e-4


def counts_of(process, steps: int, seed: int) -> np.ndarray:
    """How often each of the nine sequences comes out of N runs with exact outputs."""
    denoiser = exact.uniform_outputs(process, P)

    keys = exact.keys_for(seed, N)
    z, evaluations = exact.drawn(denoiser, process, Ancestral(), uniform(steps), keys)
    left = float(process.schedule.one_minus_alpha(jnp.float32(0.0))) > 0.0
    assert (evaluations == steps + left).all()
    return np.bincount(np.asarray(z) @ CODE, minlength=9)


def levels(process, steps: int) -> list[float]:
    """1 - alpha at each time of the grid, from the end, and none where the schedule keeps some."""
    times = jnp.asarray(uniform(steps), jnp.float32)[::-1]
    found = [float(noise) for noise in process.schedule.one_minus_alpha(times)]
    return found if found[-1] == 0.0 else [*found, 0.0]


@every_parametrisation
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.cases(2)
def test_t05_few_steps_have_the_product_of_exact_marginals(parametrisation, steps):
    """Enumerated step by step over all states; chi-squared over 9 sequences, p > 1e-4.

    Linear, and for a score 1 - alpha from 0 to 0.9, whose prior is then not z_1's law.
    """
    schedule = LogLinear(0.1) if parametrisation == "score" else Linear()
    process = Uniform(3, schedule, parametrisation)
    law = exact.uniform_law(P, levels(process, steps))
    counts = counts_of(process, steps, seed=steps)
    assert stats.chisquare(counts, N * law).pvalue > 1e-4
    if steps == 1:
        assert stats.chisquare(counts, N * P.ravel()).pvalue < 1e-12


@every_parametrisation
@pytest.mark.cases(1)
def test_noise_that_is_left_is_removed_by_the_exact_posterior(parametrisation):
    """Geometric, 1 - alpha from 0.45 to 0.95: chi-squared over 9 sequences, p > 1e-4."""
    process = Uniform(3, Geometric(0.6, 3.0), parametrisation)
    law = exact.uniform_law(P, levels(process, 3))
    assert stats.chisquare(counts_of(process, 3, seed=9), N * law).pvalue > 1e-4


@pytest.mark.parametrize(
    "parametrisation",
    ["joint", *(pytest.param(p, marks=pytest.mark.campaign) for p in ("score", "mixture"))],
)
@pytest.mark.campaign
def test_many_steps_sample_the_data(parametrisation):
    """128 steps down from 1 - alpha = 0.999: chi-squared with the data's own law, p > 1e-4.

    The enumerated law is then 0.005 from it in total variation; at n = 20,000 the draws are 0.008.
    """
    process = Uniform(3, LogLinear(), parametrisation)
    law = exact.uniform_law(P, levels(process, 128))
    assert 0.5 * np.abs(law - P.ravel()).sum() < 0.006
    counts = counts_of(process, 128, seed=3)
    assert stats.chisquare(counts, N * P.ravel()).pvalue > 1e-4


@pytest.mark.parametrize("objective", [ScoreEntropy(), UniformELBO()])
@pytest.mark.cases(1)
def test_the_estimate_has_the_enumerated_mean(objective):
    """n = 20,000 draws of u and z on one sequence, within 5 standard errors of the bound."""
    process, x = Uniform(3, Geometric(0.05, 4.0), "mixture"), np.array([[1, 2]])
    denoiser = exact.uniform_outputs(Uniform(3, Geometric(0.05, 4.0), "joint"), P)
    u = (0.5 + jnp.arange(N)) / N
    call = jax.jit(
        lambda u, keys: objective(denoiser, process, exact.batch_of(x.repeat(N, 0)), u, keys)
    )
    nats, parts = call(u, exact.keys_for(5, N))
    ends = float(parts["prior"][0] + parts["reconstruction"][0])
    mean = exact.uniform_integral(objective, denoiser, process, x)[0] + ends
    error = float(jnp.std(nats)) / np.sqrt(N)
    assert abs(float(nats.mean()) - mean) < 5 * error < 0.1 * mean
