"""The sampler with an exact denoiser has the exact law; n and the p-value are in each test."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from md4_jax.processes.masking import Masking
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.draw import draw_token
from md4_jax.samplers.grids import cosine, uniform
from md4_jax.samplers.transforms import Transform
from md4_jax.schedules import Geometric

N = 20_000
OF_MASKS = exact.samplers_for(Masking(3))
PERFECT = exact.denoiser_of(exact.perfect_logits(exact.P_V3L2))


def counts_of(denoiser, process, step, grid, seed=0) -> np.ndarray:
    """How often each of the nine sequences comes out of N runs."""

    z = np.asarray(exact.drawn(denoiser, process, step, grid, exact.keys_for(seed, N))[0])
    assert (z < 3).all()
    return np.bincount(z @ np.array([3, 1]), minlength=9)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("make", OF_MASKS.values(), ids=OF_MASKS)
def test_m15_the_law_of_t_steps(make, steps):
    """(1 - 1/T) p + (1/T) p_1 x p_2: chi-squared over 9 sequences, n = 20,000, p > 1e-4."""
    p = exact.P_V3L2
    law = (1 - 1 / steps) * p + np.outer(p.sum(axis=1), p.sum(axis=0)) / steps
    counts = counts_of(PERFECT, Masking(3), make(), uniform(steps), seed=steps)
    assert stats.chisquare(counts, N * law.ravel()).pvalue > 1e-4


def test_one_step_is_visibly_not_the_data():
    """The test above has power: at T = 1 the data's own law is refused at once."""
    counts = counts_of(PERFECT, Masking(3), Ancestral(), uniform(1))
    assert stats.chisquare(counts, N * exact.P_V3L2.ravel()).pvalue < 1e-12


@pytest.mark.parametrize("steps", [2, 5])
def test_a_wrong_denoiser_and_the_cosine_grid_have_the_enumerated_law(steps):
    """Chi-squared over 9 sequences, n = 20,000, p > 1e-4."""
    denoiser = exact.denoiser_of(exact.table_logits(3, 2), time=1.0)
    law = exact.ancestral_law(denoiser, Masking(3), cosine(steps), 2)
    clean = law[(exact.sequences(4, 2) < 3).all(axis=1)]
    counts = counts_of(denoiser, Masking(3), Ancestral(), cosine(steps), seed=steps)
    assert stats.chisquare(counts, N * clean / clean.sum()).pvalue > 1e-4


def test_masks_that_are_left_are_drawn_and_not_maximised():
    """sigma_bar from 2 to 9: at t = 0 a position is masked with probability 0.865.

    The law of what is left, filled from mu(z, 0), by enumeration; chi-squared, n = 20,000.
    """
    process = Masking(3, Geometric(2.0, 9.0))
    denoiser = exact.denoiser_of(exact.table_logits(3, 2), time=1.0)
    states, grid = exact.sequences(4, 2), uniform(2)
    law = exact.ancestral_law(denoiser, process, grid, 2)
    mu = np.asarray(jax.nn.softmax(denoiser(states, jnp.zeros(16))))
    filled = np.where((states == 3)[:, :, None], mu, np.eye(4)[states][:, :, :3])
    expected = np.einsum("s,si,sj->ij", law, filled[:, 0], filled[:, 1]).ravel()
    counts = counts_of(denoiser, process, Ancestral(), grid)
    assert stats.chisquare(counts, N * expected / expected.sum()).pvalue > 1e-4


@pytest.mark.parametrize(
    "transform, law",
    [
        (Transform(), [0.05, 0.4, 0.15, 0.3, 0.1]),
        (Transform(temperature=0.5), [0.00877193, 0.56140351, 0.07894737, 0.31578947, 0.03508772]),
        (Transform(top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (Transform(top_p=0.8), [0, 8 / 17, 3 / 17, 6 / 17, 0]),
        (Transform(temperature=0.5, top_k=3, top_p=0.9), [0, 0.64, 0, 0.36, 0]),
    ],
)
def test_the_law_of_a_drawn_token(transform, law):
    """p^(1/temperature) over the kept symbols; chi-squared, n = 40,000, p > 1e-4."""
    logits = jnp.log(jnp.asarray([0.05, 0.4, 0.15, 0.3, 0.1]))
    rows = jnp.broadcast_to(transform(logits), (N, 2, 5))
    tokens = jax.jit(draw_token)(exact.keys_for(3, N), rows)
    counts, law = np.bincount(np.ravel(tokens), minlength=5), np.asarray(law)
    assert (counts[law == 0] == 0).all()
    assert stats.chisquare(counts[law > 0], 2 * N * law[law > 0] / law.sum()).pvalue > 1e-4
    # The two positions of a row share a key and yet are independent.
    pairs = np.bincount(np.asarray(tokens) @ np.array([5, 1]), minlength=25)
    both = np.outer(law, law).ravel() / law.sum() ** 2
    assert stats.chisquare(pairs[both > 0], N * both[both > 0]).pvalue > 1e-4


def test_a_transform_does_not_change_when_tokens_appear():
    """One step from t = 1 to s = 0.6 with temperature 0: 0.4 of n = 20,000, within 5 errors."""
    step, process = Ancestral(Transform(temperature=0.0)), Masking(3)
    chain = exact.chain_of(jnp.full((N, 2), 3))
    after = jax.jit(lambda k: step(PERFECT, process, chain, jnp.float32(0.6), jnp.float32(1.0), k))
    revealed = np.asarray(after(exact.keys_for(4, N)).z < 3)
    error = 5 * np.sqrt(0.4 * 0.6 / N)
    assert (np.abs(revealed.mean(axis=0) - 0.4) < error).all()
    both = revealed.all(axis=1).mean()
    assert abs(both - 0.16) < 5 * np.sqrt(0.16 * 0.84 / N)
