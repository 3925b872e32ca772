"""Samplers of masks have their exact laws by enumeration; n and the p-value are in each test."""

import itertools

import exact
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from scipy import stats

from md4_jax.processes.masking import Masking
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import Cosine, Geometric
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.draw import draw_token
from md4_jax.samplers.grids import cosine, uniform
from md4_jax.samplers.jumps import Euler, TauLeaping
from md4_jax.samplers.orders import AnyOrder, FirstHitting
from md4_jax.samplers.transforms import Transform
from md4_jax.samplers.tweedie import Tweedie

pytestmark = pytest.mark.slow

TABLE = exact.denoiser_of(exact.table_logits(3, 2))
MU = np.asarray(jax.nn.softmax(exact.table_logits(3, 2)), np.float64)  # [16, 2, 3], z in base 4
PERFECT = exact.denoiser_of(exact.perfect_logits(exact.P_V3L2))


def counts_of(denoiser, process, step, grid, seed=0) -> np.ndarray:
    """How often each of the nine sequences comes out of N runs."""

    z = np.asarray(exact.drawn(denoiser, process, step, grid, exact.keys_for(seed, laws.N))[0])
    assert (z < 3).all()
    return np.bincount(z @ np.array([3, 1]), minlength=9)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("make", [Ancestral, Tweedie, Euler])
@pytest.mark.cases(2)
def test_m15_the_law_of_t_steps(make, steps):
    """(1 - 1/T) p + (1/T) p_1 x p_2: chi-squared over 9 sequences, n = 20,000, p > 1e-4.

    Euler too, whose chances are those of ancestral sampling with a linear schedule (T09).
    """
    p = exact.P_V3L2
    law = (1 - 1 / steps) * p + np.outer(p.sum(axis=1), p.sum(axis=0)) / steps
    counts = counts_of(PERFECT, Masking(3), make(), uniform(steps), seed=steps)
    assert laws.accepted(counts, law)


def test_one_step_is_visibly_not_the_data():
    """The test above has power: at T = 1 the data's own law is refused at once."""
    counts = counts_of(PERFECT, Masking(3), Ancestral(), uniform(1))
    assert stats.chisquare(counts, laws.N * exact.P_V3L2.ravel()).pvalue < 1e-12


def along(orders, mu=MU, together=1) -> np.ndarray:
    """The law [3, 3] of `together` tokens at a time from mu, the mean over these orders."""
    law = np.zeros((3, 3))
    for order in orders:
        for x in itertools.product(range(3), repeat=2):
            z, chance = [3, 3], 1.0
            for i, n in enumerate(order):
                chance *= mu[4 * z[0] + z[1], n, x[n]]
                if (i + 1) % together == 0:
                    z = [x[m] if m in order[: i + 1] else 3 for m in range(2)]
            law[x] += chance / len(orders)
    return law


BOTH = [(0, 1), (1, 0)]
ONE_BY_ONE = {
    "first_hitting": (FirstHitting(), along(BOTH)),
    "any_order": (AnyOrder(), along(BOTH)),
    "left_to_right": (AnyOrder("left_to_right"), along(BOTH[:1])),
    "right_to_left": (AnyOrder("right_to_left"), along(BOTH[1:])),
    "two at a time": (AnyOrder(per_step=2), along(BOTH, together=2)),
    "three at a time": (AnyOrder("right_to_left", per_step=3), along(BOTH, together=2)),
}


@pytest.mark.parametrize("step, law", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
@pytest.mark.cases(3)
def test_m16_tokens_one_after_another(step, law):
    """A wrong denoiser's law by enumeration of orders: 9 sequences, n = 20,000, p > 1e-4."""
    np.testing.assert_allclose(along(BOTH)[0, 0], 0.09552560043, rtol=1e-6)
    np.testing.assert_allclose(along(BOTH)[1, 2], 0.090936707774, rtol=1e-6)
    counts = counts_of(TABLE, Masking(3), step, uniform(3), seed=8)
    assert laws.accepted(counts, law)
    others = [other for _, other in ONE_BY_ONE.values() if np.abs(other - law).max() > 1e-9]
    assert len(others) >= 4 and not any(laws.accepted(counts, other) for other in others)


@pytest.mark.parametrize("step", [FirstHitting(), AnyOrder(), AnyOrder("left_to_right")])
def test_m16_one_after_another_from_the_perfect_denoiser_is_the_data(step):
    """Chi-squared over 9 sequences, n = 20,000, p > 1e-4."""
    assert laws.accepted(counts_of(PERFECT, Masking(3), step, uniform(1), seed=2), exact.P_V3L2)


def test_first_hitting_asks_the_network_at_the_times_of_the_exact_process():
    """A denoiser of time, cosine schedule: the limit of many ancestral steps, n = 20,000."""
    denoiser = exact.denoiser_of(exact.table_logits(3, 2), time=1.0)
    process, clean = Masking(3, Cosine()), (exact.sequences(4, 2) < 3).all(axis=1)
    coarse, fine = (
        exact.ancestral_law(denoiser, process, uniform(steps), 2)[clean] for steps in (100, 200)
    )
    law = 2.0 * fine - coarse
    assert np.abs(law - fine).max() < 1e-3
    assert laws.accepted(counts_of(denoiser, process, FirstHitting(), uniform(1), seed=5), law)
    assert not laws.accepted(counts_of(denoiser, process, AnyOrder(), uniform(1), seed=5), law)


def by_chances(denoiser, grid, chances) -> np.ndarray:
    """The law [3, 3] of revealing each mask with these chances, and then all that are left."""
    z = exact.sequences(4, 2)
    law = np.eye(16)[-1]
    for t, chance in [*zip(grid[:0:-1], chances, strict=True), (0.0, 1.0)]:
        mu = np.asarray(jax.nn.softmax(denoiser(z, jnp.full(16, t))), np.float64)
        move = np.concatenate([chance * mu, np.full((16, 2, 1), 1.0 - chance)], axis=-1)
        kernel = np.where((z == 3)[..., None], move, np.eye(4)[z])
        law = law @ (kernel[:, 0][:, z[:, 0]] * kernel[:, 1][:, z[:, 1]])
    return law.reshape(4, 4)[:3, :3]


@pytest.mark.parametrize(
    "several, chances",
    [
        ("first", [0.28346868942, 0.39346934029, 0.63212055883]),
        ("reject", [0.23884377019, 0.30326532986, 0.36787944117]),
    ],
)
@pytest.mark.parametrize(
    "process", [Masking(3), Rates(3, kernel="absorbing")], ids=["masks", "rates"]
)
@pytest.mark.cases(2)
def test_t09_the_law_of_tau_leaping(process, several, chances):
    """h rate = 1/3, 1/2 and 1: 1 - exp(-1/3), ... or exp(-1/3)/3, ...; then what is left at 0.

    Enumerated, for a wrong denoiser of time; chi-squared over 9 sequences, n = 20,000, p > 1e-4.
    """
    denoiser = exact.denoiser_of(exact.table_logits(3, 2), time=1.0)
    counts = counts_of(denoiser, process, TauLeaping(several), uniform(3), seed=4)
    assert laws.accepted(counts, by_chances(denoiser, uniform(3), chances))
    assert not laws.accepted(counts, by_chances(denoiser, uniform(3), [1 / 3, 1 / 2, 1.0]))


def surest_first(score: str) -> np.ndarray:
    """The law [3, 3] of keeping the surer of two drawn tokens and drawing the other again."""
    law, mu = np.zeros((3, 3)), MU[15]
    for x in itertools.product(range(3), repeat=2):
        chance = mu[0, x[0]] * mu[1, x[1]]
        values = {
            "probability": [mu[n, x[n]] for n in range(2)],
            "margin": [np.sort(mu[n])[-1] - np.sort(mu[n])[-2] for n in range(2)],
            "entropy": [np.sum(mu[n] * np.log(mu[n])) for n in range(2)],
        }[score]
        if values[0] > values[1]:
            law[x[0]] += chance * MU[4 * x[0] + 3, 1]
        else:
            law[:, x[1]] += chance * MU[12 + x[1], 0]
    return law


@pytest.mark.parametrize("options", [{}, {"per_step": 1}], ids=["grid", "per_step"])
@pytest.mark.parametrize("score", ["probability", "margin", "entropy"])
@pytest.mark.cases(2)
def test_the_surest_token_first(score, options):
    """One of two masks in each of two steps, by enumeration; chi-squared, n = 20,000, p > 1e-4."""
    counts = counts_of(TABLE, Masking(3), Confidence(score, **options), uniform(2), seed=6)
    assert laws.accepted(counts, surest_first(score)) and not laws.accepted(counts, along(BOTH))


@pytest.mark.parametrize("steps", [2, 5])
def test_a_wrong_denoiser_and_the_cosine_grid_have_the_enumerated_law(steps):
    """Chi-squared over 9 sequences, n = 20,000, p > 1e-4."""
    denoiser = exact.denoiser_of(exact.table_logits(3, 2), time=1.0)
    law = exact.ancestral_law(denoiser, Masking(3), cosine(steps), 2)
    clean = law[(exact.sequences(4, 2) < 3).all(axis=1)]
    counts = counts_of(denoiser, Masking(3), Ancestral(), cosine(steps), seed=steps)
    assert laws.accepted(counts, clean)


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
    assert laws.accepted(counts, expected)


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
    rows = jnp.broadcast_to(transform(logits), (laws.N, 2, 5))
    tokens = jax.jit(draw_token)(exact.keys_for(3, laws.N), rows)
    counts, law = np.bincount(np.ravel(tokens), minlength=5), np.asarray(law)
    assert (counts[law == 0] == 0).all()
    assert stats.chisquare(counts[law > 0], 2 * laws.N * law[law > 0] / law.sum()).pvalue > 1e-4
    # The two positions of a row share a key and yet are independent.
    pairs = np.bincount(np.asarray(tokens) @ np.array([5, 1]), minlength=25)
    both = np.outer(law, law).ravel() / law.sum() ** 2
    assert stats.chisquare(pairs[both > 0], laws.N * both[both > 0]).pvalue > 1e-4


def test_a_transform_does_not_change_when_tokens_appear():
    """One step from t = 1 to s = 0.6 with temperature 0: 0.4 of n = 20,000, within 5 errors."""
    step, process = Ancestral(Transform(temperature=0.0)), Masking(3)
    chain = exact.chain_of(jnp.full((laws.N, 2), 3))
    after = jax.jit(lambda k: step(PERFECT, process, chain, jnp.float32(0.6), jnp.float32(1.0), k))
    revealed = np.asarray(after(exact.keys_for(4, laws.N)).z < 3)
    error = 5 * np.sqrt(0.4 * 0.6 / laws.N)
    assert (np.abs(revealed.mean(axis=0) - 0.4) < error).all()
    both = revealed.all(axis=1).mean()
    assert abs(both - 0.16) < 5 * np.sqrt(0.16 * 0.84 / laws.N)
