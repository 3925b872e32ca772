"""Concrete score matching: identities C01 and C03, and both forms by enumeration."""

import itertools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.concrete_score import ConcreteScore, sampled_objective
from md4_jax.objectives.token_nats import excess_squares
from md4_jax.processes.neighbours import degree, log_ratios, moved, random_move
from md4_jax.processes.schedules import LogLinear
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, UserError

pytestmark = pytest.mark.slow

P, STATES = exact.P_V3L2, exact.sequences(3, 2)
SCORE, JOINT = Uniform(3, LogLinear(), "score"), Uniform(3, LogLinear(), "joint")
# All neighbours: a row of STATES, a position, and a symbol other than the one there.
ROWS, WHERE, SYMBOL = (
    np.array(column)
    for column in zip(
        *((i, n, y) for i, z in enumerate(STATES) for n in range(2) for y in range(3) if y != z[n]),
        strict=True,
    )
)


def denoiser_of(table) -> Denoiser:
    """A denoiser of a table [9, L, V] over the nine sequences."""
    return Denoiser(lambda z, t: jnp.asarray(table)[z @ jnp.array([3, 1])], lambda h: h)


def noised_law(t: float) -> np.ndarray:
    """p_t [3, 3]: each token redrawn with probability 1 - alpha_t."""
    kernel = kernel_at(t)
    return np.einsum("ab,ai,bj->ij", P, kernel, kernel)


def kernel_at(t: float) -> np.ndarray:
    """q(z_n | x_n) [3, 3]."""
    alpha = 1.0 - 0.999 * t
    return alpha * np.eye(3) + (1.0 - alpha) / 3.0


def log_scores(law: np.ndarray) -> np.ndarray:
    """log law(z with y at n) / law(z): [9, L, V]."""
    both = np.stack([law[:, STATES[:, 1]].T, law[STATES[:, 0]]], axis=1)
    return np.log(both / law.ravel()[:, None, None])


WRONG = np.sin(1.0 + 2.1 * np.arange(9)[:, None, None] + 3.7 * np.eye(2, 3) + 5.3 * np.arange(3))


def matching(table, process, t: float):
    """J by enumeration of z ~ p_t and of its uniformly drawn neighbour, differentiable."""
    z, times = jnp.asarray(STATES[ROWS]), jnp.full(len(ROWS), t)
    move = jnp.asarray(WHERE), jnp.asarray(SYMBOL)
    each = ConcreteScore(time=t).loss_at_move(
        denoiser_of(table), process, exact.batch_of(STATES[ROWS]), z, times, move
    )
    return jnp.asarray(noised_law(t).ravel())[ROWS] @ each / 4.0


def denoising(table, process, t: float):
    """The denoising form by enumeration of x and z, differentiable."""
    x, z = np.repeat(STATES, 9, axis=0), np.tile(STATES, (9, 1))
    weight = np.repeat(P.ravel(), 9) * np.prod(kernel_at(t)[x, z], axis=1)
    each = ConcreteScore("denoising").loss_at(
        denoiser_of(table), process, exact.batch_of(x), jnp.asarray(z), jnp.full(81, t)
    )
    return jnp.asarray(weight) @ each


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("phase, expected", [(0.0, 0.11662075765), (1.0, 0.82574399646)])
def test_c01_the_sampled_objective_on_a_path(phase, expected):
    """Three states in a row; J is the squared error less 0.7133... for every model c."""
    p, neighbours = np.array([0.5, 0.2, 0.3]), {0: [1], 1: [0, 2], 2: [1]}
    # An end has one neighbour: c = 0 in the second column adds nothing.
    c = np.array([[np.sin(phase + 1.3 * x + 2.9 * i) for i in range(2)] for x in range(3)])
    c[[0, 2], 1] = 0.0
    own = excess_squares(jnp.log1p(jnp.asarray(c)))
    value = 0.0
    for z in range(3):
        back = [(x, i) for x in range(3) for i, y in enumerate(neighbours[x]) if y == z]
        log_back = jnp.log1p(jnp.array([c[x, i] for x, i in back]))
        value += p[z] * jnp.mean(sampled_objective(own[z], log_back, len(back)))
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    truth = np.array([[0.2 / 0.5, 1.0], [0.5 / 0.2, 0.3 / 0.2], [0.2 / 0.3, 1.0]]) - 1.0
    squared = p @ np.sum((c - truth) ** 2, axis=1)
    np.testing.assert_allclose(squared - value, 0.71333333333, rtol=1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("t", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("process", [SCORE, JOINT], ids=["score", "joint"])
def test_c01_the_mean_over_moves_is_the_squared_error_less_its_constant(process, t):
    """On sequences: E J = E |c - c_p|^2 - E |c_p|^2, every neighbour enumerated."""
    law = noised_law(t)
    c = np.exp(log_ratios(process, jnp.asarray(WRONG), jnp.asarray(STATES), jnp.full(9, t))) - 1.0
    truth = np.exp(log_scores(law)) - 1.0
    squared, constant = ((v**2).sum(axis=(1, 2)) @ law.ravel() for v in (c - truth, truth))
    np.testing.assert_allclose(matching(WRONG, process, t), squared - constant, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", [matching, denoising])
@pytest.mark.parametrize("t", [0.05, 0.4, 0.9])
@pytest.mark.cases(3)
def test_both_forms_are_smallest_at_the_concrete_score(form, t):
    truth = log_scores(noised_law(t))
    away = np.abs(jax.grad(form)(jnp.asarray(WRONG), SCORE, t))
    np.testing.assert_allclose(jax.grad(form)(jnp.asarray(truth), SCORE, t), 0.0, atol=1e-13)
    assert away.max() > 1e-6
    for n in range(2):  # every ratio has a gradient, and the entry at z itself has none
        others = np.arange(3) != STATES[:, n, None]
        assert (away[:, n][others] > 0).all() and (away[:, n][~others] == 0).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", [matching, denoising])
def test_normalised_ratios_are_smallest_at_the_law_of_a_token_given_the_others(form):
    """Parametrisation 'joint': mu is the law of x_n given all tokens but z_n; clean data too."""
    for t in (0.0, 0.4) if form is matching else (0.4,):
        kernel = kernel_at(t)
        first, second = P @ kernel, (kernel.T @ P).T  # [x_1, z_2] and [x_2, z_1]
        table = np.log(np.stack([first[:, STATES[:, 1]].T, second[:, STATES[:, 0]].T], axis=1))
        found = log_ratios(JOINT, jnp.asarray(table), jnp.asarray(STATES), jnp.full(9, t))
        exact_to = 1e-12 if t else 1e-5  # at t = 0 the ratios of t = 2^-24 are taken
        np.testing.assert_allclose(found, log_scores(noised_law(t)), atol=exact_to)
        gradient = jax.grad(form)(jnp.asarray(table), JOINT, t)
        np.testing.assert_allclose(gradient, 0.0, atol=exact_to)


@pytest.mark.usefixtures("x64")
def test_the_forms_differ_by_a_constant_at_one_level():
    """V / rho^2 of denoising and J: the same squared error, each with a constant of its own."""
    t, truth = 0.4, log_scores(noised_law(0.4))
    scale = 3.0 / float(SCORE.ratio(jnp.float64(t))) ** 2
    differences = [
        scale * denoising(table, SCORE, t) - matching(table, SCORE, t)
        for table in (truth, WRONG, 0.3 * WRONG - truth)
    ]
    np.testing.assert_allclose(differences, differences[0], rtol=1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "z, s, squares",
    [
        ([1, 2], [[1.0, 9.0, 0.7], [1.2, 0.4, 9.0]], 0.25 + 0.04 + 0.49 + 0.01),
        ([0, 2], [[9.0, 5.0, 0.3], [1.2, 0.6, 9.0]], 9.00 + 0.49 + 0.49 + 0.01),
    ],
)
def test_the_denoising_form_by_hand(z, s, squares):
    """rho = 1/2, x = (1, 2): (rho^2 / V) sum (s - r)^2 over symbols other than z_n.

    Where z_n = x_n, r = 1/2; where it is not, r = 2 for x_n and 1 for the third symbol.
    """
    denoiser = Denoiser(lambda z, t: jnp.log(jnp.asarray([s])), lambda h: h)
    value = ConcreteScore("denoising").loss_at(
        denoiser, SCORE, exact.batch_of([[1, 2]]), jnp.array([z]), jnp.array([0.75 / 0.999])
    )
    np.testing.assert_allclose(value, squares / 12, rtol=1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "path", [[(0, 0), (1, 0), (1, 2)], [(0, 0), (0, 2), (2, 2), (1, 2)]], ids=["short", "long"]
)
@pytest.mark.parametrize("process, exact_to", [(SCORE, 1e-9), (JOINT, 1e-6)], ids=["s", "joint"])
def test_c03_the_product_of_ratios_along_a_path(process, exact_to, path):
    """p(0, 0) times c + 1 of each step is p(1, 2); 'joint' from unnormalised log p, t = 2^-24."""
    table = log_scores(P) + (7.0 if process is JOINT else 0.0)
    z = jnp.asarray(path[:-1])
    log_s = log_ratios(process, denoiser_of(table)(z, None), z, jnp.zeros(len(z)))
    value = P[path[0]]
    for i, (a, b) in enumerate(itertools.pairwise(path)):
        n = 0 if a[0] != b[0] else 1
        value = value * np.exp(log_s[i, n, b[n]])
    np.testing.assert_allclose(value, 0.08, rtol=exact_to)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("delta, expected", [(1e-3, -0.70025470715), (1e-4, -0.70002549707)])
def test_c03_the_scaled_score_tends_to_the_derivative(delta, expected):
    """Two symbols at 0.7 and 0.7 + delta of a normal density: c / delta is near -0.7."""
    points = jnp.array([0.7, 0.7 + delta])
    outputs = -0.5 * (points**2 - points[0] ** 2)[None, None]
    for kind, exact_to in (("score", 1e-9), ("joint", 1e-6)):
        process = Uniform(2, LogLinear(), kind)
        log_s = log_ratios(process, outputs, jnp.array([[0]]), jnp.zeros(1))
        c = sampled_objective(0.0, log_s[0, 0, 1], -0.5)
        np.testing.assert_allclose(c / delta, expected, rtol=exact_to)


def test_the_score_keeps_its_digits_near_one_in_float32():
    """log s = 1e-6: c and c^2 + 2 c must not be rounding noise of 1e-7."""
    log_s = jnp.float32(1e-6)
    np.testing.assert_allclose(excess_squares(log_s[None]), 2e-6, rtol=1e-4)
    np.testing.assert_allclose(sampled_objective(0.0, log_s, -0.5), 1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["matching", "denoising"])
@pytest.mark.parametrize("process", [SCORE, JOINT, Uniform(3)], ids=["score", "joint", "linear"])
@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-24])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.cases(5)
def test_the_ends_have_finite_gradients(form, process, u, dtype):
    table = jnp.asarray(3.0 * WRONG, dtype)
    batch, times = exact.batch_of(STATES), jnp.full(9, u, jnp.float32)

    def loss(table):
        objective = ConcreteScore(form)
        return objective(denoiser_of(table), process, batch, times, exact.keys_for(1, 9))[0].sum()

    value, gradient = jax.value_and_grad(loss)(table)
    assert value.dtype == jnp.float32 and jnp.isfinite(value) and jnp.isfinite(gradient).all()
    if process is SCORE and u > 0.5:  # the others tell no symbol apart where nothing is left
        assert jnp.abs(gradient).max() > 1e-3


@pytest.mark.slow
def test_clean_data_is_not_noised_and_one_level_is_told_to_the_network():
    seen = []

    def features(z, t):
        seen.append((np.asarray(z), np.asarray(t)))
        return jnp.zeros((*z.shape, 3))

    denoiser, batch = Denoiser(features, lambda h: h), exact.batch_of(STATES)
    ConcreteScore(time=0.0)(denoiser, SCORE, batch, jnp.full(9, 0.8), exact.keys_for(1, 9))
    z, t = seen[0]
    assert (t == 0.0).all() and (z[::2] == STATES).all()
    assert ((z[1::2] != STATES).sum(axis=1) == 1).all()
    ConcreteScore("denoising", 0.6)(denoiser, SCORE, batch, jnp.zeros(9), exact.keys_for(1, 9))
    assert (seen[1][1] == np.float32(0.6)).all() and seen[1][0].shape == (9, 2)


def test_drawn_levels_are_weighted_by_the_squared_ratio_and_one_level_is_not():
    """u = 0.6: 1 - alpha = 0.5994, rho = 0.5994 / (0.5994 + 3 * 0.4006)."""
    u, keys, batch = jnp.full(9, 0.6), exact.keys_for(1, 9), exact.batch_of(STATES)
    drawn, _ = ConcreteScore()(denoiser_of(WRONG), SCORE, batch, u, keys)
    fixed, _ = ConcreteScore(time=0.6)(denoiser_of(WRONG), SCORE, batch, u, keys)
    np.testing.assert_allclose(drawn / fixed, 0.11068, rtol=1e-3)


def test_what_it_needs():
    assert ConcreteScore().needs.time and not ConcreteScore(time=0.0).needs.time
    assert not any(ConcreteScore(form).is_bound(SCORE) for form in ("matching", "denoising"))
    assert exact.fits(ConcreteScore(), JOINT) and exact.fits(ConcreteScore(), SCORE)
    assert not exact.fits(ConcreteScore(), Uniform(3, parametrisation="mixture"))


def test_a_move_changes_one_token():
    z = jnp.asarray(np.tile(STATES, (20, 1)))
    where, symbol = random_move(exact.keys_for(2, len(z)), z, 3, jnp.ones(z.shape, bool))
    after = np.asarray(moved(z, where, symbol))
    assert ((after != z).sum(axis=1) == 1).all() and (after >= 0).all() and (after < 3).all()
    assert degree(2, 3) == len(ROWS) / 9


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ConcreteScore("exact"), "one of matching, denoising, not 'exact'"),
        (lambda: ConcreteScore(time=1.5), r"time must lie in \[0, 1\], not 1.5"),
        (lambda: ConcreteScore("denoising", 0.0), "time must be above 0 with .*'denoising'"),
    ],
)
def test_impossible_settings_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()
