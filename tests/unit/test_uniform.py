"""Uniform noise: levels, scores and reverse steps against brute force and identities."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.d3pm import D3PM
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Geometric, Linear, LogLinear
from md4_jax.processes.uniform import PARAMETRISATIONS, Uniform
from md4_jax.protocols import Denoiser, UserError
from md4_jax.samplers.ancestral import Ancestral

every_parametrisation = pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
FROM_05_TO_09 = Geometric(0.5, 0.9)  # sigma_bar 0.5 at t = 0 and 0.9 at t = 1
GPT2 = 50257
P = exact.P_V3L2
STATES = jnp.asarray(exact.sequences(3, 2))


def at(time: float, count: int = 1):
    return jnp.full(count, time)


def probabilities(logits) -> np.ndarray:
    return np.asarray(jax.nn.softmax(logits, axis=-1))


def test_a_parametrisation_that_is_not_one_is_refused():
    with pytest.raises(UserError, match="parametrisation must be one of joint, mixture, score"):
        Uniform(3, parametrisation="posterior")
    with pytest.raises(UserError, match="log_linear or geometric"):
        Uniform(3, Linear(), "score")
    assert not Uniform(3, LogLinear(), "score").is_noise(STATES).any()


def test_rows_have_keys_of_their_own():
    process, keys, x = Uniform(40), exact.keys_for(0, 6), jnp.zeros((6, 50), jnp.int32)
    z = np.asarray(process.corrupt(keys, x, at(0.9, 6)))
    assert len({tuple(row) for row in z}) == 6
    rows = jnp.array([4, 1])
    np.testing.assert_array_equal(process.corrupt(keys[rows], x[:2], at(0.9, 2)), z[rows])
    assert z.dtype == np.int32 and z.min() >= 0 and z.max() < 40


@pytest.mark.parametrize(
    "sigma, exactly", [(1e-4, 1.989872057e-09), (1e-2, 1.9997542779e-07), (1.0, 3.4188731571e-05)]
)
def test_s10_the_ratio_keeps_its_digits_in_float32(sigma, exactly):
    """V = 50257, where 1 - V / (e + V) has no digit left for the smallest sigma."""
    process = Uniform(GPT2, Geometric(sigma, 20.0), "score")
    ratio = process.ratio(jnp.float32(0.0))
    assert ratio.dtype == jnp.float32 and float(ratio) == pytest.approx(exactly, rel=5e-7)
    log_ratio = -jnp.log1p(process.odds(jnp.float32(0.0)))
    assert float(log_ratio) == pytest.approx(np.log(exactly), rel=2e-7)


@pytest.mark.usefixtures("x64")
def test_the_ratio_of_s04():
    process = Uniform(5, Geometric(0.7, 20.0), "score")
    assert float(process.ratio(jnp.float64(0.0))) == pytest.approx(0.16857239677, rel=1e-9)


def ends(process) -> list[float]:
    """Nats of one token at t = 1 and at t = 0."""
    x = np.array([[0]])
    return [float(f(x)[0, 0]) for f in (process.prior_nats, process.reconstruction_nats)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("vocab", [1, 2, 5])
@pytest.mark.parametrize("schedule", [Geometric(0.1, 2.0), LogLinear(0.3), Linear()])
def test_the_ends_by_enumeration(schedule, vocab):
    """KL of z_1's law from uniform, and the cost of the decoder p(x | z_0) prop q(z_0 | x)."""
    process, x = Uniform(vocab, schedule), np.array([[0]])
    first, last = exact.noise_law(process, x, np.array([0.0, 1.0]))[0]
    prior = sum(q * np.log(q * vocab) for q in last if q > 0)
    assert ends(process)[0] == pytest.approx(prior, rel=1e-9, abs=1e-15)
    table = exact.noise_law(process, exact.sequences(vocab, 1), np.array([0.0]))[:, 0]
    decoder = table / table.sum(axis=0)
    cost = sum(-q * np.log(d) for q, d in zip(first, decoder[0], strict=True) if q > 0)
    assert ends(process)[1] == pytest.approx(cost, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("schedule", [Geometric(1e-3, 9.0), LogLinear(1e-3), Geometric(1e-5, 20.0)])
def test_the_ends_in_float32_with_a_large_vocabulary(schedule):
    process = Uniform(GPT2, schedule)
    narrow = ends(process)
    with jax.enable_x64(True):
        wide = ends(process)
    np.testing.assert_allclose(narrow, wide, rtol=2e-3)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "parametrisation, score", [("joint", [1, 0.6116, 0.4394]), ("mixture", [1, 1.5006, 0.9422])]
)
def test_the_same_outputs_are_different_scores(parametrisation, score):
    """V = 3, sigma_bar = 0.6, z = 0: the digits were worked out with matrix exponentials."""
    process = Uniform(3, Geometric(0.6, 9.0), parametrisation)
    outputs = jnp.asarray(exact.table_logits(3, 1))[:1]
    found = jnp.exp(process.log_score(outputs, jnp.array([[0]]), at(0.0)))
    np.testing.assert_allclose(found[0, 0], score, atol=6e-5)


@pytest.mark.usefixtures("x64")
@every_parametrisation
def test_t02_the_score_gives_the_reverse_rates(parametrisation):
    """At sigma_bar = 0.6 and z = (0, 0), each jump has rate 1/V times its score."""
    process = Uniform(3, Geometric(0.6, 9.0), parametrisation)
    denoiser, z = exact.uniform_outputs(process, P), jnp.array([[0, 0]])
    log_score = process.log_score(denoiser(z, at(0.0)), z, at(0.0))[0]
    assert float(jnp.exp(log_score[0, 1]) / 3) == pytest.approx(0.20632399655, rel=1e-9)
    assert float(jnp.sum(jnp.exp(log_score)) / 3 - 2 / 3) == pytest.approx(0.96370346825, rel=1e-9)
    np.testing.assert_array_equal(log_score[:, 0], 0.0)


@pytest.mark.usefixtures("x64")
@every_parametrisation
@pytest.mark.parametrize("s, t", [(0.0, 1.0), (0.3, 0.35), (0.5, 0.9)])
def test_t05_the_step_has_the_exact_marginals(parametrisation, s, t):
    """From exact outputs: p(z_s^n | z_t) by Bayes over all states."""
    process = Uniform(3, FROM_05_TO_09, parametrisation)
    outputs = exact.uniform_outputs(process, P)(STATES, at(t, 9))
    found = probabilities(process.reverse_logits(outputs, STATES, at(s, 9), at(t, 9)))
    levels = (float(process.schedule.one_minus_alpha(jnp.float64(time))) for time in (s, t))
    np.testing.assert_allclose(found, exact.uniform_marginals(P, *levels), rtol=1e-9)


@pytest.mark.usefixtures("x64")
@every_parametrisation
def test_t05_numbers(parametrisation):
    """z_t = (0, 1), sigma_bar 0.9 -> 0.5: P(stay) and the total correlation that is left."""
    process, z = Uniform(3, FROM_05_TO_09, parametrisation), jnp.array([[0, 1]])
    outputs = exact.uniform_outputs(process, P)(z, at(1.0))
    step = probabilities(process.reverse_logits(outputs, z, at(0.0), at(1.0)))[0]
    assert step[0, 0] == pytest.approx(0.74439217607, rel=1e-9)
    alpha_s, kept = np.exp(-0.5), np.exp(-0.4)
    law_s = alpha_s * np.eye(3) + (1 - alpha_s) / 3
    back = kept * np.eye(3)[[0, 1]] + (1 - kept) / 3
    joint = (law_s @ P @ law_s) * np.outer(back[0], back[1])
    joint /= joint.sum()
    correlation = np.sum(joint * np.log(joint / np.outer(step[0], step[1])))
    assert correlation == pytest.approx(0.00903274509, rel=1e-8)


def test_t05_masks_stay_with_the_exact_probability():
    reveal = Masking(3, FROM_05_TO_09).reveal_probability(jnp.float32(0.0), jnp.float32(1.0))
    assert 1.0 - float(reveal) == pytest.approx(0.66304216956, rel=1e-6)


def test_t06_the_analytic_step_of_masks_is_the_ancestral_one():
    process, z = Masking(2, Geometric(0.405, 0.5)), jnp.array([[0, 1, 0]])
    times = jnp.float32(0.0), jnp.float32(1.0)
    reveal = process.reveal_probability(*times)
    assert float(reveal) == pytest.approx(0.15362353545, rel=1e-6)
    denoiser = exact.denoiser_of(exact.table_logits(2, 3))
    chain = exact.chain_of(z)
    kept = Ancestral()(denoiser, process, chain, *times, exact.keys_for(0, 1)).z
    np.testing.assert_array_equal(kept, z)


@pytest.mark.usefixtures("x64")
def test_t07_the_analytic_step_of_a_score():
    """sigma_bar 0.6 -> 0.3: the score moved by the matrix, times the way from y to z = 3."""
    process = Uniform(4, Geometric(0.3, 0.6), "score")
    outputs, z = jnp.log(jnp.array([[[0.25, 0.375, 0.9, 1.0]]])), jnp.array([[3]])
    step = probabilities(process.reverse_logits(outputs, z, at(0.0), at(1.0)))[0, 0]
    assert step[0] == pytest.approx(0.11661632961 * -np.expm1(-0.3) / 4, rel=1e-9)


@pytest.mark.usefixtures("x64")
@every_parametrisation
def test_t04_the_step_to_no_noise_is_the_posterior_of_x(parametrisation):
    """sigma_bar = 0.8, one token: p(x) q(z | x), normalised."""
    process = Uniform(3, Geometric(0.8, 9.0), parametrisation)
    z, times = jnp.arange(3)[:, None], at(0.0, 3)
    outputs = exact.uniform_outputs(process, exact.P_V3L1)(z, times)
    alpha = np.exp(-0.8)
    joint = exact.P_V3L1 * (alpha * np.eye(3) + (1 - alpha) / 3)
    bayes = joint / joint.sum(axis=1, keepdims=True)
    found = probabilities(process.clean_logits(outputs, z, times))[:, 0]
    np.testing.assert_allclose(found, bayes, rtol=1e-9)
    assert found[0, 0] == pytest.approx(0.7751747, abs=1e-7)


@pytest.mark.usefixtures("x64")
def test_negative_entries_of_a_wrong_score_are_cut_off():
    process = Uniform(3, Geometric(0.3, 2.0), "score")
    outputs, z = jnp.log(jnp.array([[[1.0, 2.0, 1e-6]]])), jnp.array([[0]])
    step = probabilities(process.reverse_logits(outputs, z, at(0.0), at(1.0)))[0, 0]
    assert step[2] == 0.0 and step.sum() == pytest.approx(1.0) and (step[:2] > 0).all()


def outputs_of_gpt2_size() -> np.ndarray:
    """[3, V]: nearly all on z = 0, nearly all on another symbol, and spread."""
    outputs = np.sin(np.arange(3 * GPT2, dtype=np.float64)).reshape(3, GPT2)
    outputs[0, 0], outputs[1, 1] = 30.0, 25.0
    return outputs.astype(np.float32)


@every_parametrisation
@pytest.mark.parametrize("noise", [1e-7, 1e-4, 0.1, 0.9, 0.999])
@pytest.mark.cases(6)
def test_scores_and_steps_keep_their_digits_in_float32(parametrisation, noise):
    """V = 50257, against float64 from the same float32 numbers, log scores to 5e-5,
    which is what alpha = 1 - t has of digits near t = 1.

    A step of a thousandth of t has the same probabilities to 3e-4 of the chance to move.
    """
    outputs, z = outputs_of_gpt2_size()[None], np.zeros((1, 3), np.int32)
    t, found = np.float32(noise), {}
    s = t * np.float32(0.999)
    for dtype in (np.float32, np.float64):
        with jax.enable_x64(dtype == np.float64):
            process = Uniform(GPT2, LogLinear(1e-6), parametrisation)
            now, wide = at(dtype(t)), jnp.asarray(outputs, dtype)
            score = process.log_score(wide, jnp.asarray(z), now)
            step = process.reverse_logits(wide, jnp.asarray(z), at(dtype(s)), now)
            found[dtype] = np.asarray(score), probabilities(step)
    (score, law), (wide_score, wide_law) = found.values()
    assert score.dtype == np.float32
    np.testing.assert_allclose(score, wide_score, atol=5e-5)
    moved, wide_moved = (chance[..., 1:].sum(axis=-1) for chance in (law, wide_law))
    np.testing.assert_allclose(moved, wide_moved, rtol=3e-4)
    np.testing.assert_allclose(law, wide_law, rtol=1e-2, atol=1e-9)


@pytest.mark.usefixtures("x64")
def test_the_prior_of_t_steps_is_that_of_all_tokens():
    """D3PM's KL(q(z_T | x) || uniform) of three tokens, over all 27 states."""
    process, x = Uniform(3, Geometric(0.1, 1.0)), np.array([[0, 2, 1], [1, 1, 1]])
    law = exact.noise_law(process, x, np.array([1.0]))[:, 0]
    expected = np.sum(law * np.log(27 * law), axis=1)
    np.testing.assert_allclose(D3PM(4).prior(process, exact.batch_of(x)), expected, rtol=1e-9)


def test_a_step_between_levels_without_signal_costs_nothing():
    """Geometric up to sigma_bar = 200: alpha is 0 in float32 before and after D3PM's last step."""
    process, x = Uniform(3, Geometric(1e-3, 200.0)), np.array([[0, 1, 2]])
    denoiser = Denoiser(lambda z, t: jnp.zeros((1, 3, 3)), lambda h: h)
    step = jnp.array([40])
    nats = D3PM(40).loss_at(denoiser, process, exact.batch_of(x), jnp.zeros((1, 3), int), step)
    np.testing.assert_array_equal(nats, 0.0)
