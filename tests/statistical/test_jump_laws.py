"""Leaps and GenMD4's steps have their exact laws; n and the tolerance are in each test."""

import itertools

import exact
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from scipy import stats

from md4_jax.processes.rates import Rates
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.jumps import Euler, TauLeaping
from md4_jax.samplers.tweedie import Tweedie

pytestmark = pytest.mark.slow

P = exact.P_V3L2


def leaps(each: np.ndarray, steps: int, leave) -> np.ndarray:
    """The law [S, S] after that many steps with the exact rates at the start of each."""
    grid = uniform(steps).astype(np.float64)
    law = np.full((3, 3), 1 / 9)
    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        alpha, beta = max(1.0 - t, 1e-30), 1.0 / max(1.0 - t, 1e-30)
        reverse = beta * laws.generators(laws.noised(P, alpha, each), each)[1]
        law = laws.moved_by(law, reverse, lambda rate: leave((t - s) * rate))  # noqa: B023
    return law


CASES = [
    (Uniform(3), 128, 0.02),
    (Uniform(3), 5, 0.2),
    (Uniform(3, parametrisation="mixture"), 5, 0.2),
    (Rates(3), 5, 0.2),
]
LEAPS = {
    "euler": (Euler(), lambda jumps: np.minimum(jumps, 1.0)),
    "first": (TauLeaping(), lambda jumps: -np.expm1(-jumps)),
    "reject": (TauLeaping("reject"), lambda jumps: jumps * np.exp(-jumps)),
}


@pytest.mark.parametrize("step, leave", LEAPS.values(), ids=LEAPS)
@pytest.mark.parametrize(
    "process, steps, near",
    [CASES[1], *(pytest.param(*c, marks=pytest.mark.campaign) for c in (CASES[0], *CASES[2:]))],
)
@pytest.mark.cases(2)
def test_t08_leaps_have_their_law_and_many_reach_the_data(process, steps, near, step, leave):
    """Uniform noise, 5 and 128 steps: enumerated, n = 20,000, p > 1e-4; 128 are within 0.02."""
    denoiser, keys = exact.uniform_outputs(process, P), exact.keys_for(2, laws.N)
    law = leaps(laws.UNIFORM, steps, leave)
    z, _ = exact.drawn(denoiser, process, step, uniform(steps), keys)
    assert laws.accepted(laws.counted(np.asarray(z), 3), law)
    assert 0.5 * np.abs(law - P).sum() < near


@pytest.mark.parametrize("t, h", [(0.5, 0.2), (0.8, 0.7)])
@pytest.mark.cases(1)
def test_the_sum_of_all_jumps(t, h):
    """Ordered symbols, V = 4, from z = 1: the law of 1 + sum_y (y - 1) Poisson(h rate_y), cut off.

    Enumerated up to 24 jumps to each symbol; chi-squared, n = 20,000, p > 1e-4.
    """
    process, mu = (
        Rates(4, kernel="gaussian_symmetric", rate_width=1.0),
        np.array([0.1, 0.2, 0.3, 0.4]),
    )
    z, when = jnp.ones((laws.N, 1), jnp.int32), jnp.full(1, t)
    rates = process.reverse_rates(jnp.log(jnp.asarray(mu))[None, None], z[:1], when)[0, 0]
    counts = np.arange(25)
    law = np.zeros(4)
    for jumps in itertools.product(counts, repeat=3):
        chance = stats.poisson.pmf(jumps, h * np.asarray(rates, np.float64)[[0, 2, 3]]).prod()
        law[np.clip(1 + np.dot(jumps, [-1, 1, 2]), 0, 3)] += chance
    after = laws.after_step(TauLeaping("sum"), laws.fixed(np.log(mu)), process, z, t - h, t)
    assert law.sum() > 1 - 1e-6 and laws.accepted(laws.counted(after, 4), law)


def test_the_sum_of_very_many_jumps_is_at_the_ends():
    """From t = 1, where alpha is 0 and rates point to the middle: 1e9 jumps end beyond it.

    V = 256: from z = 100 at 255, from z = 155 at 0, as sums that do not wrap around do.
    """
    process = Rates(256, kernel="gaussian_symmetric")
    for z, end in ((100, 255), (155, 0)):
        start, denoiser = jnp.full((64, 1), z), laws.fixed(np.zeros(256))
        after = laws.after_step(TauLeaping("sum"), denoiser, process, start, 0.5, 1.0)
        assert (after == end).all()


@pytest.mark.parametrize("step", [Ancestral(), Tweedie()])
@pytest.mark.parametrize("form, stays", [("mixture", 0.75362318841), ("joint", 0.8306010929)])
def test_d04_a_step_from_the_posterior_of_uniform_noise(step, form, stays):
    """alpha from 0.3 to 0.6, z_t = 0, V = 3, L = 1: P(z_s = 0), n = 20,000, 4 errors."""
    process = Uniform(3, parametrisation=form)
    posterior = exact.P_V3L1 * np.array([0.3 + 0.7 / 3, 0.7 / 3, 0.7 / 3])
    after = laws.after_step(
        step, laws.fixed(np.log(posterior)), process, np.zeros((laws.N, 1)), 0.4, 0.7
    )
    assert abs((after == 0).mean() - stays) < 4 * np.sqrt(stays * (1 - stays) / laws.N)


def generalised(power) -> StateDependent:
    return StateDependent(3, raw_power=jnp.log(jnp.expm1(jnp.asarray(power, jnp.float32))))


W = np.array([0.8, 1.0, 1.5])


def test_g01_a_reverse_step():
    """From m at 0.6 to 0.4, mu prop p t^w: chi-squared over 4 states, n = 20,000, p > 1e-4."""
    law = np.array([0.15208484113, 0.099137257474, 0.069982902981, 0.67879499841])
    denoiser, z = laws.fixed(np.log(exact.P_V3L1 * 0.6**W)), np.full((laws.N, 1), 3)
    assert laws.accepted(
        laws.counted(laws.after_step(Ancestral(), denoiser, generalised(W), z, 0.4, 0.6), 4), law
    )


@pytest.mark.parametrize(
    "step, near", [(Ancestral(), 0.0), pytest.param(Euler(), 0.01, marks=pytest.mark.campaign)]
)
@pytest.mark.campaign
def test_g07_when_symbols_are_revealed(step, near):
    """w = 0.5, 1, 2, data (0, 1, 2): P(still masked at s) = s^w, and the mean time w/(w + 1).

    n = 20,000, 4 standard errors; Euler's 64 steps are of first order, within 0.01 more.
    """
    power, grid, process = np.array([0.5, 1.0, 2.0]), uniform(64), generalised([0.5, 1.0, 2.0])
    denoiser = Denoiser(
        lambda z, t: jnp.broadcast_to(40.0 * jnp.eye(3), (*z.shape, 3)), lambda h: h
    )
    keys = exact.keys_for(9, laws.N)

    def body(chain, i):
        here = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
        times = jnp.asarray(grid)[i - 1], jnp.asarray(grid)[i]
        chain = step(denoiser, process, chain, *times, here)
        return chain, jnp.mean(chain.z == 3, axis=0)

    start = exact.chain_of(jnp.full((laws.N, 3), 3))
    chain, masked = jax.jit(lambda start: jax.lax.scan(body, start, jnp.arange(64, 0, -1)))(start)
    assert ((chain.z == jnp.arange(3)) | (chain.z == 3)).all()
    masked = np.concatenate([[1.0, 1.0, 1.0], np.ravel(masked)]).reshape(65, 3)[::-1]
    for s, revealed in ((0.25, [0.5, 0.75, 0.9375]), (0.5, [0.29289321881, 0.5, 0.75])):
        left = 1.0 - np.array(revealed)
        error = 4 * np.sqrt(left * (1 - left) / laws.N)
        assert (np.abs(masked[int(64 * s)] - left) < error + near).all()
    mean = 1.0 - 0.5 * np.sum(masked[1:] + masked[:-1], axis=0) / 64
    assert (np.abs(mean - power / (power + 1.0)) < 4 * 0.3 / np.sqrt(laws.N) + near).all()


def perfect_in_time(z, t):
    """log of sum p(x) prod over masked positions t^w[x_n], for each x_n: exact under GenMD4."""
    x, masked = exact.sequences(3, 2), z == 3
    agrees = jnp.all(masked[:, None] | (x[None] == z[:, None]), axis=2)
    kept = jnp.where(masked[:, None], t[:, None, None] ** jnp.asarray(W)[x], 1.0)
    mass = agrees * P.ravel() * jnp.prod(kept, axis=2)
    total = jnp.einsum("bs,snk->bnk", mass, np.eye(3)[x])
    return jnp.log(jnp.where(masked[..., None], total, 1.0))


@pytest.mark.parametrize(
    "step",
    [Euler(), *(pytest.param(s, marks=pytest.mark.campaign) for s in (Ancestral(), TauLeaping()))],
)
@pytest.mark.campaign
def test_many_steps_of_genmd4_reach_the_data(step):
    """128 steps, n = 20,000: within 0.02 of the data, of which 0.008 is noise of the draws."""
    denoiser = Denoiser(perfect_in_time, lambda h: h)
    z, _ = exact.drawn(denoiser, generalised(W), step, uniform(128), exact.keys_for(3, laws.N))
    counts = laws.counted(np.asarray(z), 3)
    assert 0.5 * np.abs(counts / laws.N - P.ravel()).sum() < 0.02
    assert not laws.accepted(counts, np.outer(P.sum(axis=1), P.sum(axis=0)))
