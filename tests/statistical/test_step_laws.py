"""Single steps have their exact laws: remasking, correctors, leaps, GenMD4; n in each test."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from md4_jax.processes.masking import Masking
from md4_jax.processes.rates import Rates
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.jumps import Euler, TauLeaping
from md4_jax.samplers.predictor_corrector import PredictorCorrector
from md4_jax.samplers.remask import Remask
from md4_jax.samplers.tweedie import Tweedie
from md4_jax.schedules import Cosine, Linear

pytestmark = pytest.mark.slow

N = 20_000
P, CODE = exact.P_V3L2, np.array([3, 1])


def fixed(logits) -> Denoiser:
    """A denoiser that puts out the same numbers at every state."""
    logits = jnp.asarray(logits)
    return Denoiser(lambda z, t: jnp.broadcast_to(logits, (*z.shape, logits.shape[-1])), lambda h: h)


def after_step(step, denoiser, process, z, s, t, *, seed=0, sure=1.0):
    """z [B, L] after one step from t to s, compiled."""
    keys, times = exact.keys_for(seed, len(z)), (jnp.float32(s), jnp.float32(t))
    chain = exact.chain_of(z)._replace(sure=jnp.full(np.shape(z), sure, jnp.float32))
    call = jax.jit(lambda keys, chain: step(denoiser, process, chain, *times, keys).z)
    return np.asarray(call(keys, chain))


def accepted(counts, law) -> bool:
    """Chi-squared over what has a chance, p > 1e-4, and nothing else was drawn."""
    counts, law = np.ravel(counts), np.ravel(law) / np.sum(law)
    possible = law > 1e-12
    assert (counts[~possible] == 0).all()
    return stats.chisquare(counts[possible], counts.sum() * law[possible]).pvalue > 1e-4


def drawn_from(law: np.ndarray, seed: int) -> np.ndarray:
    """N states of a law over [S, ..., S], int32 [N, L]."""
    rng = np.random.default_rng(seed)
    flat = rng.choice(law.size, N, p=law.ravel() / law.sum())
    return np.stack(np.unravel_index(flat, law.shape), axis=1).astype(np.int32)


def counted(z: np.ndarray, symbols: int) -> np.ndarray:
    return np.bincount(z @ symbols ** np.arange(z.shape[1])[::-1], minlength=symbols ** z.shape[1])


STRATEGIES = [("cap", 0.0), ("cap", 0.3), ("cap", 1.0), ("rescale", 0.3), ("rescale", 1.0)]


@pytest.mark.parametrize("strategy, eta", STRATEGIES)
@pytest.mark.parametrize("s, t", [(0.5, 0.7), (0.1, 0.15), (0.85, 0.9)])
def test_remasking_keeps_the_law_of_the_process(strategy, eta, s, t):
    """z_s given x = 1, from z_t ~ q: masked with probability 1 - alpha_s, else x.

    n = 80,000 positions, within 4 standard errors. sigma is 0, eta, or as large as can be.
    """
    process, x = Masking(3, Cosine()), jnp.ones((N, 4), jnp.int32)
    z = process.corrupt(exact.keys_for(1, N), x, jnp.full(N, t))
    step = Remask(strategy, eta)
    after = after_step(step, fixed([-1e9, 0.0, -1e9]), process, z, s, t)
    assert ((after == 1) | (after == 3)).all()
    taken = (np.asarray(z) == 1) & (after == 3)
    assert taken.any() == (eta > 0)
    noise = np.sin(0.5 * np.pi * s)
    assert abs((after == 3).mean() - noise) < 4 * np.sqrt(noise * (1 - noise) / (4 * N))
    most = min(1.0, noise / (1.0 - np.sin(0.5 * np.pi * t)))
    sigma = min(eta, most) if strategy == "cap" else eta * most
    clean = (np.asarray(z) == 1).sum()
    assert abs(taken.sum() - sigma * clean) <= 4 * np.sqrt(clean * sigma * (1 - sigma)) + 1e-9


@pytest.mark.parametrize("strategy, eta", [("cap", 0.3), ("rescale", 1.0)])
def test_remasking_of_one_token_is_exact(strategy, eta):
    """V = 3, L = 1, from the law at t = 0.7 to 0.4: chi-squared, n = 20,000, p > 1e-4."""
    start, end = (np.append((1 - t) * exact.P_V3L1, t) for t in (0.7, 0.4))
    denoiser, z = fixed(np.log(exact.P_V3L1)), drawn_from(start, 3)
    after = after_step(Remask(strategy, eta), denoiser, Masking(3), z, 0.4, 0.7)
    assert accepted(counted(after, 4), end) and not accepted(counted(after, 4), start)


def test_the_least_sure_tokens_are_taken_back_and_the_masks_keep_their_mean():
    """12 tokens and 12 masks, 0.6 -> 0.5: 10 masks are left on average; half the tokens have
    sure 0 and are e times as often taken back as those with sure 1; n = 20,000, 4 errors."""
    z = jnp.tile(jnp.array([1, 3]), (N, 12))
    sure = np.tile(np.repeat([1.0, 0.0], 12), (N, 1))
    step = Remask("confidence", 0.8)
    after = after_step(step, fixed(np.zeros(3)), Masking(3), z, 0.5, 0.6, sure=sure)
    left = (after == 3).sum(axis=1)
    assert abs(left.mean() - 10.0) < 4 * left.std() / np.sqrt(N)
    taken = ((np.asarray(z) == 1) & (after == 3)).reshape(N, 2, 12).sum(axis=(0, 2))
    # 0.8 sigma_max = 0.8 tokens a sequence, sigma_max = min(1, 0.5 / 0.4).
    expected = 0.8 * N * np.array([1.0, np.e]) / (1.0 + np.e)
    assert (np.abs(taken - expected) < 4 * np.sqrt(expected)).all()


def test_the_loop_holds_alpha_while_the_sequence_is_revised():
    """From all masks in 8 steps: 1 - alpha rises to 0.1, stays, and falls on; 4 errors each."""
    step = Remask("rescale", 0.5, since=0.75, until=0.25, loop=True, held=0.9)
    process, grid, z = Masking(3, Cosine()), uniform(8), jnp.full((N, 2), 3)
    at = 2 / np.pi * np.arcsin(0.1)  # the time at which 1 - alpha is 0.1
    times = {0.875: (1.0 + at) / 2, 0.125: at / 2, 0.0: 0.0}
    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        before = np.asarray(z)
        z = after_step(step, fixed(np.zeros(3)), process, z, s, t, seed=int(8 * t))
        noise = np.sin(0.5 * np.pi * times.get(float(s), at))
        found = (z == 3).mean()
        assert abs(found - noise) <= 4 * np.sqrt(noise * (1.0 - noise) / (2 * N))
        revised = ((before < 3) & (z == 3)).any()
        assert revised == (0.25 < t <= 0.75)


def generators(law: np.ndarray, each: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(forward, reverse) rates of single tokens to each symbol [Z, L, S] for p_s = law [S, S]."""
    size = len(each)
    z = exact.sequences(size, 2)
    off = np.where(np.eye(size, dtype=bool), 0.0, each)
    moved = np.stack([law[:, z[:, 1]].T, law[z[:, 0]]], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        score = moved / law[z[:, 0], z[:, 1]][:, None, None]
    reverse = off.T[z] * np.where(law[z[:, 0], z[:, 1]][:, None, None] > 0, score, 0.0)
    return off[z], reverse


def moved_by(law: np.ndarray, rates: np.ndarray, leave) -> np.ndarray:
    """The law [S, S] after each token jumps with probability leave(its rate)."""
    z = exact.sequences(len(law), 2)
    total = rates.sum(axis=2, keepdims=True)
    stay = 1.0 - leave(total)
    kernel = leave(total) * rates / np.where(total > 0, total, 1.0)
    kernel = kernel + stay * np.eye(len(law))[z]
    whole = kernel[:, 0][:, z[:, 0]] * kernel[:, 1][:, z[:, 1]]
    return (law.ravel() @ whole).reshape(law.shape)


def noised(p: np.ndarray, alpha: float, each: np.ndarray) -> np.ndarray:
    """p_t over [S, S], of noise with the generator `each` whose gap is 1."""
    size = len(each)
    clean = np.zeros((size, size))
    clean[:3, :3] = p
    law = np.eye(size) + (1.0 - alpha) * each
    return law.T @ clean @ law


UNIFORM = np.full((3, 3), 1 / 3) - np.eye(3)
ABSORBING = np.eye(4)[[3] * 4] - np.eye(4)
CORRECTED = {
    "masking": (Masking(3), ABSORBING),
    "uniform": (Uniform(3, parametrisation="mixture"), UNIFORM),
    "rates, uniform": (Rates(3), UNIFORM),
    "rates, absorbing": (Rates(3, kernel="absorbing"), ABSORBING),
}


def perfect_for(process) -> Denoiser:
    """Exact outputs; where there is a mask the joint form and the posterior are the same."""
    if process.mask_id is None:
        return exact.uniform_outputs(process, P)
    return exact.denoiser_of(exact.perfect_logits(P))


@pytest.mark.parametrize("process, each", CORRECTED.values(), ids=CORRECTED)
def test_t03_the_corrector_keeps_the_law(process, each):
    """Ten corrections of h = 0.05 at s = 0.4 (linear, beta = 5/3) from p_s, drawn exactly.

    Chi-squared with p_s over all states, n = 20,000, p > 1e-4. By enumeration they are within
    0.008 of p_s, and the law with reverse rates alone is so far that the test refuses it.
    """
    law, beta, h = noised(P, 0.6, each), 1.0 / 0.6, 0.05
    forward, reverse = (beta * rates for rates in generators(law, each))
    both = one_sided = law
    for _ in range(10):
        both = moved_by(both, forward + reverse, lambda rate: -np.expm1(-h * rate))
        one_sided = moved_by(one_sided, reverse, lambda rate: -np.expm1(-h * rate))
    assert 0.5 * np.abs(both - law).sum() < 0.008
    step, denoiser = PredictorCorrector(), perfect_for(process)

    @jax.jit
    def corrected(keys, z):
        def once(index, chain):
            here = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
            times = jnp.float32(0.4), jnp.float32(h)
            return step.correct(denoiser, process, chain, *times, here)

        return jax.lax.fori_loop(0, 10, once, exact.chain_of(z))

    z = drawn_from(law, 7)
    chain = corrected(exact.keys_for(4, N), z)
    counts = counted(np.asarray(chain.z), len(each))
    assert accepted(counts, law) and (np.asarray(chain.z) != z).mean() > 0.2
    possible = one_sided > 1e-12
    refused = stats.chisquare(
        counts[possible.ravel()], counts[possible.ravel()].sum() * one_sided[possible]
    )
    assert refused.pvalue < 1e-12


def test_the_corrector_of_masks_is_exact_for_one_token():
    """One long correction, h = 1 at s = 0.4: chi-squared with p_s, n = 20,000, p > 1e-4."""
    law, step = np.append(0.6 * exact.P_V3L1, 0.4), PredictorCorrector()
    denoiser, z = fixed(np.log(exact.P_V3L1)), drawn_from(law, 8)
    keys, times = exact.keys_for(1, N), (jnp.float32(0.4), jnp.float32(1.0))
    after = jax.jit(lambda z: step.correct(denoiser, Masking(3), exact.chain_of(z), *times, keys).z)
    found = np.asarray(after(z))
    assert accepted(counted(found, 4), law)
    assert ((z == 3) != (found == 3)).mean() > 0.3
    assert (found[z == 3] == 3).mean() == pytest.approx((found[z < 3] == 3).mean(), abs=0.05)


def leaps(process, each: np.ndarray, steps: int, leave) -> np.ndarray:
    """The law [S, S] after that many steps with the exact rates at the start of each."""
    grid = uniform(steps).astype(np.float64)
    law = np.full((3, 3), 1 / 9)
    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        alpha, beta = max(1.0 - t, 1e-30), 1.0 / max(1.0 - t, 1e-30)
        reverse = beta * generators(noised(P, alpha, each), each)[1]
        law = moved_by(law, reverse, lambda rate: leave((t - s) * rate))  # noqa: B023
    return law


LEAPS = {
    "euler": (Euler(), lambda jumps: np.minimum(jumps, 1.0)),
    "first": (TauLeaping(), lambda jumps: -np.expm1(-jumps)),
    "reject": (TauLeaping("reject"), lambda jumps: jumps * np.exp(-jumps)),
}
