"""Draws of hybrid noise, samples and estimates of GIDD's bound, against enumerated laws."""

import itertools

import exact
import interpolating
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from md4_jax.objectives.draws import evaluation_times
from md4_jax.objectives.gidd import GIDD
from md4_jax.processes.hybrid import Hybrid
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Prompt
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.jumps import TauLeaping
from md4_jax.samplers.loop import sample

pytestmark = pytest.mark.slow

P, X, Z = exact.P_V3L2, exact.sequences(3, 2), exact.sequences(4, 2)
CLEAN = (Z < 3).all(axis=1)
N = 20_000
TABLE = exact.denoiser_of(exact.table_logits(3, 2), time=0.3)
PROCESS = Hybrid(3, 0.3)


@pytest.mark.parametrize("t", [0.01, 0.4, 0.97])
@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_noise_has_its_law(t, gamma):
    """Chi-squared over the states of two tokens, n = 20,000, p > 1e-4; not that of masks."""
    process, x = Hybrid(3, 0.3, gamma), np.tile([[2, 0]], (N, 1))
    z = np.asarray(process.corrupt(exact.keys_for(0, N), jnp.asarray(x), jnp.full(N, t)))
    counts = laws.counted(z, 4)
    assert laws.accepted(counts, interpolating.laws(process, x[:1], [t])[0, 0])
    other = interpolating.laws(Hybrid(3, 0.2, gamma), x[:1], [t])[0, 0]
    assert not laws.accepted(counts, other)


def test_early_noise_is_drawn_as_often_as_its_law_says():
    """At t = 2^-30, 4 million tokens: changed with probability c = 2.6e-5, within 5 errors."""
    rows, length, t = 1000, 4000, 2.0**-30
    x = jnp.zeros((rows, length), jnp.int32)
    z = np.asarray(PROCESS.corrupt(exact.keys_for(1, rows), x, jnp.full(rows, t)))
    expected = interpolating.token_law(PROCESS, t)[0] * x.size
    for symbol in (1, 2):
        found = (z == symbol).sum()
        assert abs(found - expected[symbol]) < 5.0 * np.sqrt(expected[symbol]) and found > 10
    assert (z == 3).sum() <= 1  # masks have probability 1e-9


def model_law(denoiser, process, grid: np.ndarray) -> np.ndarray:
    """The law over the states of two tokens after the steps of the grid, from all masks."""
    law = np.zeros(16)
    law[-1] = 1.0
    for t, s in itertools.pairwise(grid[::-1].tolist()):
        reached = jnp.asarray(Z[law > 0])
        times = jnp.full(len(reached), s), jnp.full(len(reached), t)
        logits = process.reverse_logits(denoiser(reached, times[1]), reached, *times)
        each = np.asarray(jax.nn.softmax(logits), np.float64)
        law = law[law > 0] @ (each[:, 0][:, Z[:, 0]] * each[:, 1][:, Z[:, 1]])
    return law


def test_with_more_steps_the_law_of_the_samples_tends_to_that_of_the_data(x64):
    """By enumeration, the perfect denoiser: the distance halves with each doubling of T.

    The grid t = (i / T)^2 is fine where uniform noise begins as sqrt(t).
    """
    perfect, apart = interpolating.perfect(PROCESS, P), []
    for steps in (1, 32, 64):
        law = model_law(perfect, PROCESS, uniform(steps).astype(np.float64) ** 2)
        np.testing.assert_allclose(law[~CLEAN], 0.0, atol=1e-12)
        apart.append(0.5 * np.abs(law[CLEAN] - P.ravel()).sum())
    assert apart[0] == pytest.approx(0.255, rel=1e-6)  # that of the product of the marginals
    assert apart[1] < 0.01 and apart[2] == pytest.approx(apart[1] / 2, rel=0.05)


@pytest.mark.campaign
@pytest.mark.parametrize("steps", [3, pytest.param(64, marks=pytest.mark.campaign)])
def test_samples_have_the_law_of_the_model(steps):
    """Chi-squared, n = 20,000, p > 1e-4: three steps of a wrong denoiser, and the data's law.

    Of a perfect denoiser with 64 steps, whose error is below what so many samples show.
    """
    denoiser = TABLE if steps == 3 else interpolating.perfect(PROCESS, P)
    grid, keys = uniform(steps) ** (1 if steps == 3 else 2), exact.keys_for(3, N)
    z, evaluations = exact.drawn(denoiser, PROCESS, Ancestral(), grid, keys)
    assert (np.asarray(evaluations) == steps).all() and (np.asarray(z) < 3).all()
    counts = laws.counted(np.asarray(z), 3)
    expected = model_law(TABLE, PROCESS, grid)[CLEAN] if steps == 3 else P
    assert laws.accepted(counts, expected)
    if steps == 3:
        masked = exact.ancestral_law(TABLE, Masking(3), grid, 2)[CLEAN]
        assert not laws.accepted(counts, masked)


@pytest.mark.campaign
def test_tau_leaping_tends_to_the_data():
    """100 steps of a perfect denoiser: no frequency of 4,000 is off by more than 0.03."""
    perfect, grid = interpolating.perfect(PROCESS, P), uniform(100) ** 2
    z, _ = exact.drawn(perfect, PROCESS, TauLeaping(), grid, exact.keys_for(4, 4000))
    z = np.asarray(z)
    assert (z < 3).all()
    assert np.abs(laws.counted(z, 3) / 4000 - P.ravel()).max() < 0.03


def test_a_prompt_is_shown_with_the_noise_of_the_time():
    """The token beside it has the enumerated law, n = 20,000, p > 1e-4; a clean prompt's not."""
    grid, token = uniform(3), 1
    prompt = Prompt(np.full((N, 2), token, np.int32), np.tile([True, False], (N, 1)))
    run = jax.jit(
        lambda keys: sample(TABLE, PROCESS, Ancestral(), grid=grid, keys=keys, prompt=prompt)[0]
    )
    z = np.asarray(run(exact.keys_for(5, N)).z)
    assert (z[:, 0] == token).all()

    def law_beside(shown) -> np.ndarray:
        law = np.eye(4)[3]
        for t, s in itertools.pairwise(grid[::-1].tolist()):
            times = jnp.full(16, s), jnp.full(16, t)
            logits = PROCESS.reverse_logits(TABLE(Z, times[1]), jnp.asarray(Z), *times)
            each = np.asarray(jax.nn.softmax(logits), np.float64)[:, 1].reshape(4, 4, 4)
            law = law @ np.einsum("a,aby->by", shown(t), each)
        return law

    counts = np.bincount(z[:, 1], minlength=4)
    assert laws.accepted(counts, law_beside(lambda t: interpolating.token_law(PROCESS, t)[token]))
    assert not laws.accepted(counts, law_beside(lambda t: np.eye(4)[token]))


@pytest.mark.parametrize("uniform_share", [0.1, 0.4])
@pytest.mark.parametrize("early", [True, False], ids=["evaluation", "training"])
@pytest.mark.cases(1)
def test_the_mean_of_the_draws_is_the_bound(early, uniform_share):
    """n = 200,000 strata of the times of an evaluation and of training, within 4.5 errors."""
    process, n = Hybrid(3, uniform_share), 200_000
    with jax.enable_x64(True):
        expected = interpolating.integral(GIDD(), TABLE, process, X[5:6])[0]
    v, weight = (jnp.arange(n) + 0.5) / n, 1.0
    u, weight = evaluation_times(GIDD(), process, v) if early else (v, 1.0)
    batch = exact.batch_of(np.tile(X[5:6], (n, 1)))
    call = jax.jit(lambda keys: GIDD()(TABLE, process, batch, u, keys)[0])
    nats = np.asarray(weight * call(exact.keys_for(6, n)), np.float64)
    error = nats.std() / np.sqrt(n)
    assert abs(nats.mean() - expected) < 4.5 * error, (nats.mean(), expected, error)
    assert error < (0.02 if early else 0.1) * expected  # so that the test says something
