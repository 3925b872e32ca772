"""Samples of CANDI's process by the exact denoiser."""

import candi
import exact
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.processes.gaussian_masking import GaussianMasking
from md4_jax.processes.schedules import Geometric
from md4_jax.protocols import Denoiser
from md4_jax.samplers.loop import no_prompt, sample


def test_the_start_of_sampling():
    """Mean 1 / V and the deviation at t = 1, of 100,000 entries, within 5 standard errors."""
    process, n = GaussianMasking(4), 25_000
    y = np.asarray(process.prior_observed(exact.keys_for(0, n), 1), np.float64).ravel()
    sigma = candi.sigma_of(process, 1.0)
    assert abs(y.mean() - 0.25) < 5 * sigma / np.sqrt(4 * n)
    assert abs(y.std() - sigma) < 5 * sigma / np.sqrt(8 * n)
    # 1 / V is 14 such errors away from 0.
    assert (process.prior(exact.keys_for(0, 3), 2) == 4).all()


@pytest.mark.parametrize("steps, parametrisation", [(1, "mixture"), (4, "mixture"), (4, "joint")])
@pytest.mark.cases(2)
def test_samples_of_one_token_have_the_law_of_the_model(steps, parametrisation):
    """However few the steps. 40,000 samples, each frequency within 4.5 standard errors."""
    p, n = candi.P_V3L1, 40_000
    process = GaussianMasking(3, confusion_end=0.2, parametrisation=parametrisation)
    law, found = candi.model_law(process, p), frequencies(process, p, steps, n)
    assert (np.abs(found - law) < 4.5 * np.sqrt(law * (1 - law) / n)).all(), (found, law)
    # Which differs from the law of the data: the start does not know how frequent symbols are.
    assert np.abs(law - p).max() > 0.02


@pytest.mark.campaign
def test_samples_of_two_tokens_have_the_law_of_the_data_in_many_steps():
    p, n = candi.P_V2L2, 20_000
    process = GaussianMasking(2)
    found = frequencies(process, p, 64, n)
    assert 0.5 * np.abs(found - p.ravel()).sum() < 0.015
    # Two tokens that are drawn at once are independent.
    assert 0.5 * np.abs(frequencies(process, p, 1, n) - p.ravel()).sum() > 0.1


def frequencies(process, p, steps: int, n: int) -> np.ndarray:
    step = exact.SAMPLERS["ancestral"]()
    grid = np.linspace(0.0, 1.0, steps + 1, dtype=np.float32)
    keys = exact.keys_for(0, n)
    denoiser = candi.posterior(process, p)
    z, evaluations = exact.drawn(denoiser, process, step, grid, keys, length=p.ndim)
    assert (np.asarray(evaluations) == steps).all()
    code = np.asarray(z) @ p.shape[0] ** np.arange(p.ndim)[::-1]
    return np.bincount(code, minlength=p.size) / n


def test_a_token_that_is_shown_stays():
    """Also where the network, which knows nothing here, would draw another one."""
    flat = Denoiser(lambda seen, t: jnp.zeros((*seen.weights.shape[:2], 3)), lambda h: h)
    chain, frames = sample(
        flat, GaussianMasking(3), exact.SAMPLERS["ancestral"](), keys=exact.keys_for(0, 40),
        grid=np.linspace(0.0, 1.0, 5, dtype=np.float32), prompt=no_prompt(40, 3), trace=40,
    )  # fmt: skip
    z = np.asarray(frames.z)
    assert chain.observed is None and (z[-1] < 3).all() and (z[0] == 3).all()
    assert ((z[1:] == z[:-1]) | (z[:-1] == 3)).all()
    np.testing.assert_allclose(frames.confidence[-1], 1 / 3, rtol=1e-5)


def test_masks_that_the_schedule_leaves_are_drawn_at_the_end():
    """alpha_0 = 0.6: one more evaluation for those that have masks."""
    process = GaussianMasking(2, Geometric(0.5, 9.0))
    step, grid = exact.SAMPLERS["ancestral"](), np.array([0.0, 1.0], np.float32)
    denoiser = candi.posterior(process, candi.P_V2L2)
    z, evaluations = exact.drawn(denoiser, process, step, grid, exact.keys_for(0, 200))
    assert (np.asarray(z) < 2).all() and set(np.asarray(evaluations).tolist()) == {1, 2}
