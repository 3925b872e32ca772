"""Remasking and corrector steps have their exact laws; n and the tolerance are in each test."""

import exact
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from scipy import stats

from md4_jax.processes.masking import Masking
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import Cosine
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.predictor_corrector import PredictorCorrector
from md4_jax.samplers.remask import Remask

pytestmark = pytest.mark.slow

P = exact.P_V3L2


STRATEGIES = [("cap", 0.0), ("cap", 0.3), ("cap", 1.0), ("rescale", 0.3), ("rescale", 1.0)]


@pytest.mark.parametrize("strategy, eta", STRATEGIES)
@pytest.mark.parametrize("s, t", [(0.5, 0.7), (0.1, 0.15), (0.85, 0.9)])
@pytest.mark.cases(2)
def test_remasking_keeps_the_law_of_the_process(strategy, eta, s, t):
    """z_s given x = 1, from z_t ~ q: masked with probability 1 - alpha_s, else x.

    n = 80,000 positions, within 4 standard errors. sigma is 0, eta, or as large as can be.
    """
    process, x = Masking(3, Cosine()), jnp.ones((laws.N, 4), jnp.int32)
    z = process.corrupt(exact.keys_for(1, laws.N), x, jnp.full(laws.N, t))
    step = Remask(strategy, eta)
    after = laws.after_step(step, laws.fixed([-1e9, 0.0, -1e9]), process, z, s, t)
    assert ((after == 1) | (after == 3)).all()
    taken = (np.asarray(z) == 1) & (after == 3)
    assert taken.any() == (eta > 0)
    noise = np.sin(0.5 * np.pi * s)
    assert abs((after == 3).mean() - noise) < 4 * np.sqrt(noise * (1 - noise) / (4 * laws.N))
    most = min(1.0, noise / (1.0 - np.sin(0.5 * np.pi * t)))
    sigma = min(eta, most) if strategy == "cap" else eta * most
    clean = (np.asarray(z) == 1).sum()
    assert abs(taken.sum() - sigma * clean) <= 4 * np.sqrt(clean * sigma * (1 - sigma)) + 1e-9


@pytest.mark.parametrize("strategy, eta", [("cap", 0.3), ("rescale", 1.0)])
def test_remasking_of_one_token_is_exact(strategy, eta):
    """V = 3, L = 1, from the law at t = 0.7 to 0.4: chi-squared, n = 20,000, p > 1e-4."""
    start, end = (np.append((1 - t) * exact.P_V3L1, t) for t in (0.7, 0.4))
    denoiser, z = laws.fixed(np.log(exact.P_V3L1)), laws.drawn_from(start, 3)
    after = laws.after_step(Remask(strategy, eta), denoiser, Masking(3), z, 0.4, 0.7)
    assert laws.accepted(laws.counted(after, 4), end) and not laws.accepted(
        laws.counted(after, 4), start
    )


def test_the_least_sure_tokens_are_taken_back_and_the_masks_keep_their_mean():
    """12 tokens and 12 masks, 0.6 -> 0.5: 10 masks are left on average; half the tokens have
    confidence 0 and are e times as often taken back as the others, with 1; n = 20,000, 4 errors."""
    z = jnp.tile(jnp.array([1, 3]), (laws.N, 12))
    confidence = np.tile(np.repeat([1.0, 0.0], 12), (laws.N, 1))
    step = Remask("confidence", 0.8)
    after = laws.after_step(
        step, laws.fixed(np.zeros(3)), Masking(3), z, 0.5, 0.6, confidence=confidence
    )
    left = (after == 3).sum(axis=1)
    assert abs(left.mean() - 10.0) < 4 * left.std() / np.sqrt(laws.N)
    taken = ((np.asarray(z) == 1) & (after == 3)).reshape(laws.N, 2, 12).sum(axis=(0, 2))
    # 0.8 sigma_max = 0.8 tokens per sequence, sigma_max = min(1, 0.5 / 0.4).
    expected = 0.8 * laws.N * np.array([1.0, np.e]) / (1.0 + np.e)
    assert (np.abs(taken - expected) < 4 * np.sqrt(expected)).all()


def test_the_loop_holds_alpha_while_the_sequence_is_revised():
    """From all masks in 8 steps: 1 - alpha rises to 0.1, stays, and falls on; 4 errors each."""
    step = Remask("rescale", 0.5, since=0.75, until=0.25, loop=True, held=0.9)
    process, grid, z = Masking(3, Cosine()), uniform(8), jnp.full((laws.N, 2), 3)
    at = 2 / np.pi * np.arcsin(0.1)  # the time at which 1 - alpha is 0.1
    times = {0.875: (1.0 + at) / 2, 0.125: at / 2, 0.0: 0.0}
    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        before = np.asarray(z)
        z = laws.after_step(step, laws.fixed(np.zeros(3)), process, z, s, t, seed=int(8 * t))
        noise = np.sin(0.5 * np.pi * times.get(float(s), at))
        found = (z == 3).mean()
        assert abs(found - noise) <= 4 * np.sqrt(noise * (1.0 - noise) / (2 * laws.N))
        revised = ((before < 3) & (z == 3)).any()
        assert revised == (0.25 < t <= 0.75)


CORRECTED = {
    "masking": (Masking(3), laws.ABSORBING),
    "uniform": (Uniform(3, parametrisation="mixture"), laws.UNIFORM),
    "rates, uniform": (Rates(3), laws.UNIFORM),
    "rates, absorbing": (Rates(3, kernel="absorbing"), laws.ABSORBING),
}


def perfect_for(process) -> Denoiser:
    """Exact outputs; where there is a mask the joint form and the posterior are the same."""
    if not process.shows_clean:
        return exact.uniform_outputs(process, P)
    return exact.denoiser_of(exact.perfect_logits(P))


@pytest.mark.parametrize("process, each", CORRECTED.values(), ids=CORRECTED)
@pytest.mark.cases(2)
def test_t03_the_corrector_keeps_the_law(process, each):
    """Twenty corrections of h = 0.02 at s = 0.4 (linear, beta = 5/3) from p_s, drawn exactly.

    Chi-squared with p_s over all states, n = 20,000, p > 1e-4. By enumeration they are within
    0.008 of p_s, and the law with reverse rates alone is so far that the test refuses it.
    """
    law, beta, h = laws.noised(P, 0.6, each), 1.0 / 0.6, 0.02
    forward, reverse = (beta * rates for rates in laws.generators(law, each))
    both = one_sided = law
    for _ in range(20):
        both = laws.moved_by(both, forward + reverse, lambda rate: -np.expm1(-h * rate))
        one_sided = laws.moved_by(one_sided, reverse, lambda rate: -np.expm1(-h * rate))
    assert 0.5 * np.abs(both - law).sum() < 0.008
    step, denoiser = PredictorCorrector(), perfect_for(process)

    @jax.jit
    def corrected(keys, z):
        def once(index, chain):
            here = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
            times = jnp.float32(0.4), jnp.float32(h)
            return step.correct(denoiser, process, chain, *times, here)

        return jax.lax.fori_loop(0, 20, once, exact.chain_of(z))

    z = laws.drawn_from(law, 7)
    chain = corrected(exact.keys_for(4, laws.N), z)
    counts = laws.counted(np.asarray(chain.z), len(each))
    assert laws.accepted(counts, law) and (np.asarray(chain.z) != z).mean() > 0.2
    possible = one_sided > 1e-12
    refused = stats.chisquare(
        counts[possible.ravel()], counts[possible.ravel()].sum() * one_sided[possible]
    )
    assert refused.pvalue < 1e-12


def test_the_corrector_of_masks_is_exact_for_one_token():
    """One long correction, h = 1 at s = 0.4: chi-squared with p_s, n = 20,000, p > 1e-4."""
    law, step = np.append(0.6 * exact.P_V3L1, 0.4), PredictorCorrector()
    denoiser, z = laws.fixed(np.log(exact.P_V3L1)), laws.drawn_from(law, 8)
    keys, times = exact.keys_for(1, laws.N), (jnp.float32(0.4), jnp.float32(1.0))
    after = jax.jit(lambda z: step.correct(denoiser, Masking(3), exact.chain_of(z), *times, keys).z)
    found = np.asarray(after(z))
    assert laws.accepted(laws.counted(found, 4), law)
    assert ((z == 3) != (found == 3)).mean() > 0.3
    assert (found[z == 3] == 3).mean() == pytest.approx((found[z < 3] == 3).mean(), abs=0.05)
