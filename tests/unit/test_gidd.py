"""GIDD's noise, bound and weights, against sums over all sequences in float64."""

import exact
import interpolating
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm

from md4_jax.config.evaluators import tightest
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.d3pm import D3PM
from md4_jax.objectives.gidd import GIDD, divergence
from md4_jax.objectives.md4 import MD4
from md4_jax.processes.hybrid import Hybrid
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, UserError

P, X, Z = exact.P_V3L2, exact.sequences(3, 2), exact.sequences(4, 2)
GPT2 = 50257
TABLE = exact.denoiser_of(exact.table_logits(3, 2), time=0.5)
PROCESSES = {"published": Hybrid(3), "more": Hybrid(3, 0.4, 2.0), "sudden": Hybrid(3, 0.2, 0.5)}
every_process = pytest.mark.parametrize(
    "process",
    [
        pytest.param(process, id=name, marks=[pytest.mark.slow] * (name != "published"))
        for name, process in PROCESSES.items()
    ],
)


@every_process
def test_the_law_of_a_token_and_its_rates(process, x64):
    """By hand, at t = 1/2 the share that is asked for; later what the rates make of it."""
    t = np.array([0.0, 1e-3, 0.3, 0.5, 0.9, 1.0])
    found = np.asarray(process.marginal(jnp.asarray(t)))
    np.testing.assert_allclose(found, interpolating.token_law(process, t), rtol=1e-12)
    share = process.uniform
    np.testing.assert_allclose(found[3, 0, [1, 3]], [share / 3, (1 - share) / 2], rtol=1e-12)
    moved, middles = found[2], np.linspace(0.3, 0.9, 401)[:-1] + 0.00075
    for to_each, to_mask in np.stack(process.jump_rates(jnp.asarray(middles)), axis=1):
        rates = np.tile([to_each] * 3 + [to_mask], (4, 1))
        moved = moved @ expm(0.0015 * (rates - np.diag(rates.sum(axis=1))))
    np.testing.assert_allclose(moved, found[4], rtol=1e-4)


@every_process
@pytest.mark.parametrize("s, t", [(0.3, 0.8), (0.0, 0.4), (0.5, 0.5001), (0.2, 1.0)])
@pytest.mark.cases(6)
def test_the_posterior_is_that_of_bayes(process, s, t, x64):
    """q(z_s | z_t, x) of one token, for every x and z_t that it can become."""
    onto = interpolating.step(process, s, t)
    np.testing.assert_allclose(onto.sum(axis=1), 1.0, rtol=1e-12)
    before, now = (interpolating.token_law(process, time) for time in (s, t))
    np.testing.assert_allclose(before @ onto, now, rtol=1e-9, atol=1e-15)
    x, z = exact.sequences(4, 2).T
    x, z = x[(x < 3) & (now[np.minimum(x, 2), z] > 0)], z[(x < 3) & (now[np.minimum(x, 2), z] > 0)]
    expected = before[x] * onto[:, z].T / now[x, z][:, None]
    times = jnp.full(len(x), s), jnp.full(len(x), t)
    logits = process.posterior_logits(jnp.asarray(x)[:, None], jnp.asarray(z)[:, None], *times)
    np.testing.assert_allclose(jax.nn.softmax(logits)[:, 0], expected, rtol=1e-9, atol=1e-15)


@every_process
@pytest.mark.parametrize("s, t", [(0.3, 0.8), (0.0, 0.4), (0.999, 1.0)])
@pytest.mark.cases(4)
def test_the_reverse_step_of_the_perfect_denoiser_is_that_of_bayes(process, s, t, x64):
    """p(z_s^n | z_t) from sums over all x and z_s, for every z_t; and the step to clean data."""
    onto = interpolating.step(process, s, t)
    whole = (onto[Z[:, None, :, None], Z[None, :, None, :]][..., [0, 1], [0, 1]]).prod(axis=-1)
    at_s = P.ravel() @ interpolating.laws(process, X, [s])[:, 0]
    joint = at_s[:, None] * whole
    possible = joint.sum(axis=0) > 0
    expected = np.einsum("st,sny->tny", joint, np.eye(4)[Z])[possible]
    expected /= expected.sum(axis=-1, keepdims=True)
    z, before = jnp.asarray(Z[possible]), jnp.full(possible.sum(), s)
    outputs = interpolating.perfect(process, P)(z, jnp.full(len(z), t))
    found = jax.nn.softmax(process.reverse_logits(outputs, z, before, jnp.full(len(z), t)))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)
    if s == 0:
        clean = jax.nn.softmax(process.clean_logits(outputs, z, jnp.full(len(z), t)))
        np.testing.assert_allclose(clean, expected[..., :3], rtol=1e-9)


@every_process
def test_the_reverse_rates_are_those_of_a_short_step(process, x64):
    """To every symbol, at a step of 1e-7: to first order in it."""
    short, z, t = 1e-7, jnp.asarray(Z), jnp.full(16, 0.6)
    outputs = TABLE(z, t)
    moved = jax.nn.softmax(process.reverse_logits(outputs, z, t - short, t)) / short
    expected = np.where(np.arange(4) == Z[..., None], 0.0, moved)
    np.testing.assert_allclose(process.reverse_rates(outputs, z, t), expected, rtol=1e-5)


@every_process
@pytest.mark.parametrize("p", [exact.P_V3L1, P], ids=["one token", "two tokens"])
@pytest.mark.cases(3)
def test_exact_outputs_have_the_nats_of_the_data(process, p, x64):
    """-log p(x) for every x: no term is left out at either end of time (identity M05)."""
    x = exact.sequences(3, p.ndim)
    found = interpolating.integral(GIDD(), interpolating.perfect(process, p), process, x)
    np.testing.assert_allclose(found, -np.log(p.ravel()), rtol=1e-7)
    if p is P:
        np.testing.assert_allclose(found[[0, 5]], [1.6094379124, 2.5257286443], rtol=1e-7)


def test_times_cut_at_both_ends_lose_a_part(x64):
    """The published code leaves out t below 1e-4 and above 1 - 1e-4: the sum of exp(-L) is 1.04."""
    process = Hybrid(3, 0.2)
    t, weight = interpolating.times()
    values = interpolating.at_states(GIDD(), interpolating.perfect(process, P), process, X, t)
    each = (values * interpolating.laws(process, X, t)).sum(axis=2)
    cut = each @ np.where((t > 1e-4) & (t < 1.0 - 1e-4), weight, 0.0)
    assert np.exp(-cut).sum() == pytest.approx(1.044, abs=1e-3)
    assert np.exp(-each @ weight).sum() == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("denoiser", [TABLE, None], ids=["wrong", "perfect"])
def test_it_is_the_limit_of_the_bound_of_many_steps(denoiser, x64):
    """D3PM's bound by enumeration: the distance halves with each doubling of T."""
    process = Hybrid(3, 0.3, 2.0)
    denoiser = denoiser or interpolating.perfect(process, P)
    limit = interpolating.integral(GIDD(), denoiser, process, X)
    above = []
    for steps in (32, 64, 128):
        objective, i = D3PM(steps), np.arange(1, steps + 1)
        values = interpolating.at_states(objective, denoiser, process, X, i)
        law = interpolating.laws(process, X, i / steps)
        total = np.where(law > 0, law * values, 0.0).sum(axis=2).mean(axis=1)
        above.append(P.ravel() @ (total - limit))
    assert 0 < above[2] < 0.02
    np.testing.assert_allclose([above[0] / above[1], above[1] / above[2]], 2.0, rtol=0.06)


def test_without_uniform_noise_it_is_masking(x64):
    """The integrand is MD4's, and the posterior that of masks."""
    process, masking = Hybrid(3, 0.0), Masking(3)
    assert process.shows_clean and not Hybrid(3).shows_clean
    t = np.array([1e-6, 0.2, 0.7, 1.0 - 1e-6])
    found, expected = (
        exact.over_patterns(exact.bind(objective, TABLE, of), 3, X, t)
        for objective, of in ((GIDD(), process), (MD4(), masking))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(
        interpolating.integral(GIDD(), TABLE, process, X), exact.continuous(TABLE, masking, X)
    )
    x, z, s, t = jnp.array([[1]]), jnp.array([[3]]), jnp.array([0.2]), jnp.array([0.7])
    found = jax.nn.softmax(process.posterior_logits(x, z, s, t))[0, 0]
    revealed = float(masking.reveal_probability(s, t)[0])
    np.testing.assert_allclose(found, [0.0, revealed, 0.0, 1.0 - revealed], rtol=1e-12)
    reverse = jax.nn.softmax(process.reverse_logits(jnp.zeros((1, 1, 3)), x, s, t))[0, 0]
    np.testing.assert_allclose(reverse, [0.0, 1.0, 0.0, 0.0], atol=1e-25)


@pytest.mark.parametrize("uniform", [0.0, 0.1])
@pytest.mark.parametrize("t", [0.5, 1.0])
def test_a_step_of_no_length_changes_nothing(uniform, t):
    """As on a grid of so many steps that its first two times are both rounded to 1."""
    z, time = jnp.array([[0, 2, 3]]), jnp.full((1,), t)
    logits = Hybrid(3, uniform).reverse_logits(jnp.zeros((1, 3, 3)), z, time, time)
    found = jax.nn.softmax(logits, axis=-1)[0]
    np.testing.assert_allclose(found, np.eye(4)[[0, 2, 3]], atol=1e-6)


def test_next_to_no_uniform_noise_is_next_to_masking(x64):
    """The bound, whose formula is another one there, to 1e-4 of MD4's."""
    found = interpolating.integral(GIDD(), TABLE, Hybrid(3, 1e-7), X)
    np.testing.assert_allclose(found, exact.continuous(TABLE, Masking(3), X), rtol=1e-4)


def test_weights_at_one_time_by_hand(x64):
    """V = 4, p = 0.2, gamma = 1, t = 0.36: c = 0.5 * 0.6 * 0.8 = 0.24.

    Mask 1 / (0.36 * 0.64); changed 1 / (2 * 0.36 * 0.64); kept that times 0.06 / (0.64 + 0.06).
    """
    process, t = Hybrid(4, 0.2), jnp.full((1, 3), 0.36)
    x, z = jnp.array([[1, 1, 1]]), jnp.array([[4, 2, 1]])
    bound, clip, dynamic = (
        np.asarray(GIDD(weights, 2.0).weight(process, x, z, t))[0]
        for weights in ("bound", "clip", "dynamic")
    )
    np.testing.assert_allclose(bound, [4.3402777778, 2.1701388889, 0.1860119048], rtol=1e-9)
    np.testing.assert_allclose(clip, [2.0, 2.0, 0.1860119048], rtol=1e-9)
    np.testing.assert_allclose(dynamic, [2.0, 1.0, 0.0857142857], rtol=1e-9)


def test_the_divergence_of_one_token_by_hand(x64):
    """q(. | x) and q(. | mu) written out, for a mask, a changed and a kept token."""
    process, t, mu = Hybrid(4, 0.2), 0.36, np.array([0.1, 0.2, 0.3, 0.4])
    law = interpolating.token_law(process, t)
    given, model = law[1], mu @ law
    kl = np.sum(given * np.log(given / model))
    for z in (4, 2, 1):
        ratio = given[z] / model[z]
        expected = kl + ratio - 1.0 - np.log(ratio)
        levels = process.levels(jnp.full((1,), t))
        arguments = jnp.log(mu)[None] + 7.0, jnp.array([1]), jnp.array([z]), levels
        assert float(divergence(*arguments)[0]) == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bound", "clip", "dynamic"])
@pytest.mark.parametrize("t", [1e-6, 1e-3, 0.5, 0.999, 1.0 - 2.0**-24])
@pytest.mark.cases(2)
def test_a_large_vocabulary_in_float32(weights, t):
    """V = 50257: kept, changed and masked tokens to 2e-5 of float64, near t = 1 to 1e-3."""
    outputs = np.sin(np.arange(5.0 * GPT2)).reshape(1, 5, GPT2).astype(np.float32)
    outputs[0, 0, 0], outputs[0, 4, 0] = 20.0, 30.0
    # Sure of a wrong token.
    outputs[0, 1, -1], outputs[0, 1, 0] = 30.0, -30.0
    x, z, found = np.zeros((1, 5)), np.array([[1, GPT2 - 1, 0, GPT2, 0]]), []
    for dtype in (np.float64, np.float32):
        with jax.enable_x64(dtype == np.float64):
            cast, time = jnp.asarray(outputs, dtype), jnp.asarray([np.float32(t)], dtype)
            denoiser = Denoiser(lambda z, t, cast=cast: cast, lambda h: h)
            arguments = exact.batch_of(x), jnp.asarray(z), time
            found.append(float(GIDD(weights).loss_at(denoiser, Hybrid(GPT2), *arguments)[0]))
    assert found[0] > 1e-3
    assert found[1] == pytest.approx(found[0], rel=2e-5 if t < 0.9999 else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("process", [Hybrid(2), Hybrid(2, 0.3, 2.0), Hybrid(2, 0.0)])
@pytest.mark.parametrize("u", [0.0, 1e-30, 0.5, 1.0 - 2.0**-24])
@pytest.mark.cases(1)
def test_gradients_are_finite_at_the_ends_of_time(process, u):
    """float32, and outputs of a bfloat16 network; V = 2 leaves no symbol but z and x."""

    def loss(table):
        denoiser = Denoiser(lambda z, t: jnp.broadcast_to(table, (*z.shape, 2)), lambda h: h)
        x = exact.batch_of(np.tile([[0, 1, 1]], (8, 1)))
        return GIDD()(denoiser, process, x, jnp.full(8, u), exact.keys_for(1, 8))[0].sum()

    for dtype in (jnp.float32, jnp.bfloat16):
        value, gradient = jax.value_and_grad(loss)(jnp.asarray([9.0, -9.0], dtype))
        assert jnp.isfinite(value) and jnp.isfinite(gradient.astype(jnp.float32)).all()
        assert value.dtype == jnp.float32


def test_what_is_a_bound_and_what_is_reported():
    """auto is the bound, also of a run that trains with other weights."""
    network = Transformer(vocab_size=3, size=8, depth=1, heads=1).build()
    process = Hybrid(3)
    for weights in ("bound", "clip", "dynamic"):
        objective = GIDD(weights)
        assert objective.is_bound(process) == (weights == "bound")
        assert tightest("evals.test", objective, process, network) == GIDD()
    assert tightest("evals.test", D3PM(8), process, network) == GIDD()


def test_tokens_that_do_not_count_stay_and_cost_nothing():
    x = np.tile([[0, 1, 2, 1]], (64, 1))
    mask = np.tile([[False, True, True, False]], (64, 1))
    batch, seen = exact.batch_of(x)._replace(loss_mask=mask), []

    def outputs(z, t):
        seen.append(z)
        unasked = jnp.where(jnp.arange(4)[:, None] % 3 == 0, jnp.nan, 0.0)
        return jnp.broadcast_to(unasked, (64, 4, 3))

    arguments = jnp.full(64, 0.8), exact.keys_for(0, 64)
    nats, told = GIDD()(Denoiser(outputs, lambda h: h), Hybrid(3, 0.5), batch, *arguments)
    z = np.asarray(seen[0])
    assert (z[:, [0, 3]] == x[:, [0, 3]]).all() and (z[:, 1:3] != x[:, 1:3]).any()
    assert np.isfinite(nats).all() and (nats > 0).any()
    np.testing.assert_allclose(told["masked"], (z == 3).mean(axis=1))
    np.testing.assert_allclose(told["changed"], ((z != 3) & (z != x)).mean(axis=1))


@pytest.mark.parametrize(
    "make, key",
    [
        (lambda: Hybrid(3, 1.0), "process.uniform"),
        (lambda: Hybrid(3, -0.1), "process.uniform"),
        (lambda: Hybrid(3, 0.1, 2.5), "process.gamma"),
        (lambda: Hybrid(3, 0.1, 0.1), "process.gamma"),
        (lambda: GIDD("elbo"), "objective.weights"),
        (lambda: GIDD("clip", 0.0), "objective.largest"),
    ],
)
def test_wrong_options_are_named(make, key):
    with pytest.raises(UserError, match=key):
        make()
