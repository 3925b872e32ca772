"""Steps of `psi` have the law of the process at their end; n and the tolerance are in each test."""

import exact
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from md4_jax.processes.schedules import Linear, LogLinear
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.psi import Psi
from md4_jax.samplers.transforms import Transform

pytestmark = pytest.mark.slow

P = exact.P_V3L1
NOISE = np.full((3, 3), 1 / 3)


def at(time: float) -> np.ndarray:
    """The law of one token at this time of the linear schedule."""
    return (1 - time) * P + time / 3


@pytest.mark.parametrize("parametrisation", ["joint", "mixture"])
@pytest.mark.parametrize("kappa", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("s, t", [(0.3, 0.8), (0.0, 0.5)])
@pytest.mark.cases(2)
def test_a_step_of_one_token_is_exact(s, t, kappa, parametrisation):
    """V = 3, from the law at t to that at s: chi-squared, n = 20,000, p > 1e-4."""
    process = Uniform(3, Linear(), parametrisation)
    denoiser = exact.uniform_outputs(process, P)
    z = laws.drawn_from(at(t), 3)
    after = laws.after_step(Psi(kappa), denoiser, process, z, s, t)
    assert laws.accepted(laws.counted(after, 3), at(s))
    assert not laws.accepted(laws.counted(after, 3), at(t))


@pytest.mark.parametrize("kappa", [0.0, 0.4, 1.0])
def test_how_often_a_token_is_drawn_anew(kappa):
    """The law of z_s given z_t = 0 by Bayes' rule over x: chi-squared, n = 20,000, p > 1e-4.

    kappa sum_x p(x | z_t) q(z_s | z_t, x) + (1 - kappa) sum_x p(x | z_t) q(z_s | x).
    """
    s, t, eye = 0.3, 0.8, np.eye(3)
    kernel = {time: (1 - time) * eye + time * NOISE for time in (s, t)}
    kept = (1 - t) / (1 - s)
    step = kept * eye + (1 - kept) * NOISE
    clean = P * kernel[t][:, 0] / (P @ kernel[t][:, 0])
    reverse = kernel[s] * step[:, 0] / kernel[t][:, :1]
    law = clean @ (kappa * reverse + (1 - kappa) * kernel[s])
    process = Uniform(3, Linear(), "joint")
    z = np.zeros((laws.N, 1), np.int32)
    after = laws.after_step(Psi(kappa), exact.uniform_outputs(process, P), process, z, s, t)
    counts = laws.counted(after, 3)
    assert laws.accepted(counts, law)
    for other in {0.0, 0.4, 1.0} - {kappa}:
        wrong = clean @ (other * reverse + (1 - other) * kernel[s])
        assert not laws.accepted(counts, wrong)


@pytest.mark.campaign
def test_kappa_counts_between_since_and_until():
    """Outside of (0.2, 0.6] a step is that of kappa 1: the same draws."""
    process = Uniform(3, Linear(), "joint")
    denoiser, z = exact.uniform_outputs(process, P), laws.drawn_from(at(0.5), 4)
    part, whole, none = Psi(0.0, 0.6, 0.2), Psi(0.0), Psi(1.0)
    for t, like in ((0.7, none), (0.6, whole), (0.5, whole), (0.2, none)):
        found = [laws.after_step(step, denoiser, process, z, 0.1, t) for step in (part, like)]
        np.testing.assert_array_equal(*found)
    both = [laws.after_step(step, denoiser, process, z, 0.1, 0.5) for step in (whole, none)]
    assert (both[0] != both[1]).any()


@pytest.mark.parametrize("kappa", [0.5, 1.0])
@pytest.mark.cases(1)
def test_the_last_step_takes_the_likeliest(kappa):
    """With the same outputs at every position; the step before still draws."""
    process, z = Uniform(3, Linear(), "joint"), laws.drawn_from(at(0.5), 5)
    denoiser = laws.fixed(jnp.log(jnp.asarray([0.2, 0.45, 0.35])))
    step = Psi(kappa, greedy_tail=True)
    assert (laws.after_step(step, denoiser, process, z, 0.0, 0.1) == 1).all()
    assert len(np.unique(laws.after_step(step, denoiser, process, z, 0.05, 0.1))) == 3
    warm = Psi(kappa, transform=Transform(1.0))
    assert len(np.unique(laws.after_step(warm, denoiser, process, z, 0.0, 0.1))) == 3


@pytest.mark.parametrize("kappa", [0.0, 1.0])
@pytest.mark.cases(1)
def test_the_last_step_takes_the_likeliest_that_ratios_tell(kappa):
    """The largest p(x | z_t): z itself while little noise is left, and else the largest p(x)."""
    process, z = Uniform(3, LogLinear(), "score"), laws.drawn_from(at(0.5), 5)
    denoiser, step = exact.uniform_outputs(process, P), Psi(kappa, greedy_tail=True)
    after = laws.after_step(step, denoiser, process, z, 0.0, 0.1)
    np.testing.assert_array_equal(after, z)
    assert (laws.after_step(step, denoiser, process, z, 0.0, 0.95) == P.argmax()).all()
    assert len(np.unique(laws.after_step(step, denoiser, process, z, 0.05, 0.95))) == 3


@pytest.mark.parametrize("kappa", [0.0, 0.5])
@pytest.mark.cases(1)
def test_a_matrix_for_each_step_will_do(kappa):
    """D3PM's process with T = 4, one token, all steps: chi-squared, n = 20,000, p > 1e-4."""
    schedule = Linear()
    process = Transition(
        3, timesteps=4, kernel="uniform", schedule=schedule, parametrisation="joint"
    ).init()
    keys, denoiser = exact.keys_for(6, laws.N), laws.fixed(np.log(P))
    z, _ = exact.drawn(denoiser, process, Psi(kappa), uniform(4), keys, length=1)
    assert laws.accepted(laws.counted(np.asarray(z), 3), P)
