"""Continuous-time noise: exponentials, reverse rates and the reverse step against exact laws."""

import chains
import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.linalg import expm

from md4_jax.processes import kernels
from md4_jax.processes.masking import Masking
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import Cosine, Exponential, Geometric, LogLinear
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, UserError
from md4_jax.samplers.ancestral import Ancestral

pytestmark = pytest.mark.slow

NARROW = {"rate_width": 1.0, "stationary_width": 0.4}
CASES = {
    "uniform": lambda v, *a, **k: Rates(v, *a, **k),
    "absorbing": lambda v, *a, **k: Rates(v, *a, kernel="absorbing", **k),
    "gaussian_symmetric": lambda v, *a, **k: Rates(
        v, *a, kernel="gaussian_symmetric", **NARROW, **k
    ),
    "gaussian_target": lambda v, *a, **k: Rates(v, *a, kernel="gaussian_target", **NARROW, **k),
}
every_kernel = pytest.mark.parametrize("make", CASES.values(), ids=CASES)
both_forms = pytest.mark.parametrize("form", ["joint", "mixture"])


def at(sigma_bar: float):
    """The t of the linear schedule with that sigma_bar, [1]."""
    return jnp.array([-np.expm1(-sigma_bar)])


@every_kernel
@pytest.mark.parametrize("vocab_size", [2, 5])
def test_transitions_are_the_exponential_of_the_generator(make, vocab_size, x64):
    process = make(vocab_size)
    generator = process.parts.generator
    np.testing.assert_allclose(generator.sum(axis=1), 0.0, atol=1e-13)
    for low, high in ((0.0, 1e-7), (0.0, 0.6), (0.3, 1.7), (0.0, 12.0)):
        law = process.transition(at(low), at(high))[0]
        np.testing.assert_allclose(law, expm((high - low) * generator), rtol=2e-9, atol=1e-15)
        np.testing.assert_allclose(
            process.parts.exponential(high - low), law, rtol=1e-8, atol=1e-15
        )
    marginal = process.marginal(at(0.6))[0]
    np.testing.assert_array_equal(marginal, process.transition(at(0.0), at(0.6))[0, :vocab_size])


@every_kernel
def test_the_slowest_mode_decays_as_alpha_and_the_stationary_law_is_reached(make, x64):
    process = make(4)
    values = np.sort(np.linalg.eigvals(process.parts.generator).real)[::-1]
    np.testing.assert_allclose(values[:2], [0.0, -1.0], atol=1e-10)
    np.testing.assert_allclose(process.parts.stationary @ process.parts.generator, 0.0, atol=1e-13)
    end = process.marginal(jnp.ones(1))[0]
    np.testing.assert_allclose(end, np.tile(process.parts.stationary, (4, 1)), atol=1e-13)
    np.testing.assert_array_equal(process.prior_nats(np.arange(4)), 0.0)
    np.testing.assert_allclose(process.reconstruction_nats(np.arange(4)), 0.0, atol=1e-13)


def test_gaussian_target_rates_are_those_of_tauldr_with_their_gap():
    """S = 5, sigma_r = 1.5, sigma_Q = 2: rows of R, its law and gap, and exp(0.648683298 R)."""
    parts = Rates(5, kernel="gaussian_target", rate_width=1.5, stationary_width=0.4).parts
    gap = 1.584084498
    rows = [
        [-1.828509343, 1.0, 0.641180388, 0.169013315, 0.018315639],
        [0.778800783, -2.499817409, 1.0, 0.641180388, 0.079836237],
        [0.499351789, 1.0, -2.581024741, 0.778800783, 0.302872170],
        [0.030197383, 0.169013315, 0.641180388, 1.0, -1.840391087],
    ]
    np.testing.assert_allclose(gap * parts.generator[[0, 1, 2, 4]], rows, atol=2e-9)
    law = [0.193252343, 0.248140921, 0.248140921, 0.193252343, 0.117213471]
    np.testing.assert_allclose(parts.stationary, law, atol=1e-9)
    row = [0.192289008, 0.343670707, 0.233211439, 0.164993895, 0.065834951]
    np.testing.assert_allclose(parts.exponential(gap * 0.648683298)[1], row, atol=1e-9)


def test_gaussian_target_transitions_with_tauldrs_time(x64):
    """S = 5, base 0.3, exponent 10, t = 0.5: row 1, with the base in units of the gap."""
    widths = dict(rate_width=1.5, stationary_width=0.4)
    gap = Rates(5, kernel="gaussian_target", **widths).parts.gap
    assert gap == pytest.approx(1.584084498, abs=1e-9)
    process = Rates(5, Exponential(0.3 * gap, 10.0), "gaussian_target", **widths)
    assert process.sigma_bar(jnp.asarray(0.5)) / gap == pytest.approx(0.648683298, abs=1e-9)
    row = [0.192289008, 0.343670707, 0.233211439, 0.164993895, 0.065834951]
    np.testing.assert_allclose(process.marginal(jnp.full(1, 0.5))[0, 1], row, atol=2e-9)


def test_the_default_time_is_tauldrs_on_cifar_10():
    """Base 3 and exponent 100 in the rates of 256 symbols; little is left of x at the end."""
    process = Rates(256, Exponential(), "gaussian_target")
    assert 3.0 * process.parts.gap == pytest.approx(Exponential().scale, rel=1e-4)
    prior = np.asarray(process.prior_nats(jnp.arange(256)))
    assert (prior > 0).all() and prior.max() < 1e-4


def test_gaussian_target_rates_of_256_symbols_as_they_stand():
    """tauLDR's for images by default: nearest neighbours and what leaves the middle, gap 1."""
    target = Rates(256, kernel="gaussian_target").parts.generator
    assert target[127, 128] == pytest.approx(47.8, rel=1e-3)
    assert -target[127, 127] == pytest.approx(556.0, rel=1e-3)
    # Of the same law and widths, yet another chain.
    settings = dict(rate_width=6 / np.sqrt(2), stationary_width=2.0)
    symmetric = Rates(256, kernel="gaussian_symmetric", **settings).parts.generator
    assert symmetric[127, 128] == pytest.approx(66.7, rel=1e-3)
    assert -symmetric[127, 127] == pytest.approx(660.5, rel=1e-3)


def test_symmetric_gaussian_rates_are_reversible_and_prefer_near_symbols():
    parts = Rates(8, kernel="gaussian_symmetric", rate_width=1.5, stationary_width=0.3).parts
    flow = parts.stationary[:, None] * parts.generator
    np.testing.assert_allclose(flow, flow.T, atol=1e-15)
    assert (np.diff(parts.generator[0, 1:]) < 0).all()
    # A discretised Gaussian about 3.5 with the standard deviation 0.3 * 8.
    ratio = parts.stationary[0] / parts.stationary[3]
    assert ratio == pytest.approx(np.exp((0.5**2 - 3.5**2) / (2 * 2.4**2)), rel=1e-12)


def test_t01_tokens_jump_one_at_a_time_and_independently(x64):
    process = CASES["absorbing"](2)
    law = np.asarray(process.transition(at(0.0), at(0.6))[0])
    assert law[0, 2] * law[1, 2] == pytest.approx(0.20357093972, rel=1e-9)
    whole = chains.generator(process, 2)
    np.testing.assert_allclose(expm(0.6 * whole), np.kron(law, law), atol=1e-13)
    assert expm(0.6 * whole)[1, 8] == pytest.approx(0.20357093972, rel=1e-9)
    z = jnp.asarray(chains.states(process, 2))
    for seed in range(4):
        jumped = process.jump(exact.keys_for(seed, len(z)), z, jnp.ones(z.shape, bool))
        possible = whole[np.arange(9), np.asarray(jumped) @ [3, 1]] > 0
        np.testing.assert_array_equal(possible, (z != 2).any(axis=1))
        np.testing.assert_array_equal(jumped[-1], z[-1])


def reverse_generator(process, p, t):
    """The reverse rates of all pairs of symbols with the exact denoiser, in units of beta."""
    denoiser = chains.exact_denoiser(process, p)

    def of_state(z):
        times = jnp.full(len(z), t)
        return process.reverse_rates(denoiser(z, times), z, times) / process.beta(times)[0]

    return chains.generator(process, p.ndim, of_state)


def law_at(process, p, t):
    """p_t over all states."""
    x = exact.sequences(p.shape[0], p.ndim)
    return p.ravel() @ np.concatenate([chains.law_of(process, row, [t]) for row in x])


@both_forms
def test_t02_reverse_rates_of_the_uniform_kernel(form, x64):
    process, t = Rates(3, parametrisation=form), float(at(0.6)[0])
    reverse = reverse_generator(process, exact.P_V3L2, t)
    assert reverse[0, 3] == pytest.approx(0.20632399655, rel=1e-9)
    assert reverse[0, 0] == pytest.approx(-0.96370346825, rel=1e-9)
    assert chains.generator(process, 2)[0, 0] == pytest.approx(-1.3333333333, rel=1e-9)


@every_kernel
@both_forms
@pytest.mark.cases(4)
def test_t02_reverse_rates_turn_time_around(make, form, x64):
    process, t = make(3, parametrisation=form), float(at(0.6)[0])
    law = law_at(process, exact.P_V3L2, t)
    reverse = reverse_generator(process, exact.P_V3L2, t)
    np.testing.assert_allclose(law @ reverse, -law @ chains.generator(process, 2), atol=1e-12)


@pytest.mark.parametrize("name, rate", [("uniform", 2.2970368016), ("absorbing", 2.0)])
@both_forms
def test_t03_the_corrector_leaves_the_law_as_it_is(name, rate, form, x64):
    process, t = CASES[name](3, parametrisation=form), float(at(0.6)[0])
    corrector = chains.generator(process, 2) + reverse_generator(process, exact.P_V3L2, t)
    np.testing.assert_allclose(law_at(process, exact.P_V3L2, t) @ corrector, 0.0, atol=1e-12)
    assert -corrector[0, 0] == pytest.approx(rate, rel=1e-9)


def step(process, denoiser, z, s, t) -> np.ndarray:
    """p(z_s | z_t = z) of each token, [L, S]."""
    z = jnp.asarray([z])
    return np.asarray(jax.nn.softmax(process.reverse_logits(denoiser(z, t), z, s, t)))[0]


@pytest.mark.parametrize(
    "name, z, stay", [("uniform", (0, 1), 0.74439217607), ("absorbing", (3, 3), 0.66304216956)]
)
@both_forms
@pytest.mark.cases(2)
def test_t05_the_step_has_the_marginal_law_of_each_token(name, z, stay, form, x64):
    process = CASES[name](3, parametrisation=form)
    denoiser = chains.exact_denoiser(process, exact.P_V3L2)
    assert step(process, denoiser, z, at(0.5), at(0.9))[0, z[0]] == pytest.approx(stay, rel=1e-9)


@every_kernel
@both_forms
@pytest.mark.cases(4)
def test_the_step_is_the_reverse_conditional_for_one_token(make, form, x64):
    """p(z_s | z_t) prop p_s(z_s) P_{s,t}[z_s, z_t], by scipy's exponential, and down to s = 0."""
    process, p = make(3, parametrisation=form), exact.P_V3L1
    denoiser, generator = chains.exact_denoiser(process, p), process.parts.generator
    start = np.append(p, np.zeros(len(generator) - 3))
    for s, t in ((0.4, 1.1), (0.0, 0.7)):
        joint = (start @ expm(s * generator))[:, None] * expm((t - s) * generator)
        for z in np.flatnonzero(joint.sum(axis=0) > 0):
            found = step(process, denoiser, (z,), at(s), at(t))[0]
            np.testing.assert_allclose(found, joint[:, z] / joint[:, z].sum(), atol=1e-12)
        zt = jnp.asarray([[0]])
        clean = process.clean_logits(denoiser(zt, at(1.1)), zt, at(1.1))
        to_clean = p * expm(1.1 * generator)[:3, 0]
        np.testing.assert_allclose(
            jax.nn.softmax(clean)[0, 0], to_clean / to_clean.sum(), atol=1e-12
        )


def test_d04_only_the_mixture_is_exact_for_the_posterior(x64):
    """alpha_s = 0.6, alpha_t = 0.3, z_t = 0, the network's output the posterior of x."""
    s, t = jnp.array([0.4]), jnp.array([0.7])
    posterior = chains.exact_denoiser(Rates(3, parametrisation="mixture"), exact.P_V3L1)
    for form, expected in (("mixture", 0.75362318841), ("joint", 0.8306010929)):
        found = step(Rates(3, parametrisation=form), posterior, (0,), s, t)[0, 0]
        assert found == pytest.approx(expected, rel=1e-9)


@both_forms
def test_t06_the_absorbing_step_is_that_of_masks(form, x64):
    process = CASES["absorbing"](2, parametrisation=form)
    mu = Denoiser(
        lambda z, t: jnp.broadcast_to(jnp.log(jnp.array([0.4, 0.6])), (*z.shape, 2)), lambda h: h
    )
    s, t = at(0.405), at(0.5)
    found = step(process, mu, (2, 1), s, t)
    reveal = float(Masking(2).reveal_probability(s, t)[0])
    assert 1.0 - found[0, 2] == pytest.approx(0.15362353545, rel=1e-9)
    np.testing.assert_allclose(found[0], [0.4 * reveal, 0.6 * reveal, 1 - reveal], rtol=1e-9)
    np.testing.assert_allclose(found[1], [0, 1, 0], atol=1e-15)


@both_forms
def test_the_uniform_kernel_is_the_uniform_process(form, x64):
    """Another route to the same numbers: scores, steps and both ends, also short of alpha = 0."""
    rng, s, t = np.random.default_rng(0), jnp.array([0.2, 0.1]), jnp.array([0.6, 1e-5])
    outputs, z = jnp.asarray(rng.normal(size=(2, 3, 4))), jnp.asarray([[0, 3, 1], [2, 2, 0]])
    for schedule in (LogLinear(0.1), Geometric(0.1, 2.0), Cosine()):
        old = Uniform(4, schedule, form)
        new = Rates(4, schedule, parametrisation=form)
        np.testing.assert_allclose(
            new.log_score(outputs, z, t), old.log_score(outputs, z, t), rtol=1e-9
        )
        steps = [jax.nn.log_softmax(p.reverse_logits(outputs, z, s, t)) for p in (new, old)]
        np.testing.assert_allclose(steps[0][:1], steps[1][:1], rtol=1e-9)
        tolerance = dict(rtol=1e-6, atol=1e-12)  # the older ones are in float32
        np.testing.assert_allclose(new.prior_nats(z), old.prior_nats(z), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(
            new.reconstruction_nats(z), old.reconstruction_nats(z), **tolerance
        )


@every_kernel
def test_the_terms_of_the_ends_are_entropies_of_the_exponential(make, x64):
    """scipy's: KL(q(z_1 | x) || pi), and the conditional entropy where x is uniform."""
    reconstruction = np.asarray(make(3).reconstruction_nats(np.arange(3), float(at(0.4)[0])))
    law = expm(0.4 * make(3).parts.generator)[:3]
    conditional = stats.entropy((law / 3).ravel()) - stats.entropy(law.mean(axis=0))
    assert reconstruction.mean() == pytest.approx(conditional, rel=1e-9)
    if make is CASES["absorbing"]:
        np.testing.assert_allclose(reconstruction, -np.expm1(-0.4) * np.log(3), rtol=1e-9)
        return
    process = make(3, Geometric(0.1, 0.7))
    expected = stats.entropy(expm(0.7 * process.parts.generator), process.parts.stationary, axis=1)
    np.testing.assert_allclose(process.prior_nats(np.arange(3)), expected, rtol=1e-9)


@every_kernel
@pytest.mark.cases(2)
def test_one_step_of_the_sampler_has_the_enumerated_law(make):
    """Ancestral with the exact denoiser, one token, n = 20,000: chi-squared p > 1e-4."""
    process, rows = make(3), 20_000
    denoiser = chains.exact_denoiser(process, exact.P_V3L1)
    z = 3 if process.mask_id else 1
    law = expm(0.9 * process.parts.generator)
    start = np.append(exact.P_V3L1, np.zeros(len(law) - 3))
    until, after = (expm(level * process.parts.generator) for level in (0.4, 0.5))
    joint = (start @ until) * after[:, z]
    s, t = (jnp.float32(-np.expm1(-level)) for level in (0.4, 0.9))
    before, keys = jnp.full((rows, 1), z), exact.keys_for(1, rows)
    chain = exact.chain_of(before)
    drawn = jax.jit(lambda keys: Ancestral()(denoiser, process, chain, s, t, keys))(keys).z
    counts = np.bincount(np.asarray(drawn)[:, 0], minlength=len(law))
    possible = joint > 0
    assert counts[~possible].sum() == 0
    expected = rows * joint[possible] / joint.sum()
    assert stats.chisquare(counts[possible], expected).pvalue > 1e-4


@pytest.mark.parametrize("name", ["uniform", "gaussian_symmetric", "gaussian_target"])
def test_float32_laws_are_laws_and_keep_small_probabilities(name):
    process = Rates(200, kernel=name)
    t = jnp.array([2.0**-24, 1e-4, 0.3, 0.7, 1.0 - 2.0**-24, 1.0], jnp.float32)
    law = np.asarray(process.marginal(t))
    assert (law >= 0).all()
    np.testing.assert_allclose(law.sum(axis=2), 1.0, atol=3e-5)
    exactly = np.stack([process.parts.exponential(-np.log1p(-float(x))) for x in t[:5]])
    np.testing.assert_allclose(law[:5], exactly, atol=2e-6)
    beside = np.asarray(process.score_given(jnp.arange(200)[None], jnp.arange(200)[None], t[:1]))[0]
    expected = exactly[0, 100, 101] / exactly[0, 100, 100]
    assert beside[100, 101] == pytest.approx(expected, rel=1e-3)


@every_kernel
@both_forms
@pytest.mark.cases(3)
def test_scores_are_finite_for_excluded_symbols_and_half_precision(make, form):
    process = make(5, parametrisation=form)
    states = len(process.parts.stationary)
    z = jnp.tile(jnp.arange(states), (3, 1))
    outputs = jnp.full((3, states, 5), -jnp.inf, jnp.bfloat16).at[..., 2].set(30.0)
    for t in (2.0**-24, 0.5, 1.0 - 2.0**-24):
        times = jnp.full(3, t, jnp.float32)
        score = process.log_score(outputs, z, times)
        assert score.dtype == jnp.float32 and jnp.isfinite(score).all()
        for s in (0.0, 0.5 * t):
            logits = process.reverse_logits(outputs, z, jnp.full(3, s, jnp.float32), times)
            assert (logits.max(axis=-1) > -jnp.inf).all() and not jnp.isnan(logits).any()


def test_the_spectrum_is_made_once_and_is_no_leaf():
    process = Rates(16, kernel="gaussian_symmetric")
    assert process.parts is Rates(16, kernel="gaussian_symmetric").parts
    assert process.parts is not Rates(16, kernel="gaussian_symmetric", rate_width=2.0).parts
    assert jax.tree.leaves(process) == [] and hash(process) == hash(
        Rates(16, kernel="gaussian_symmetric")
    )
    assert kernels.uniform(3) is kernels.uniform(3)
    assert process.mask_id is None and Rates(3, kernel="absorbing").mask_id == 3


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(kernel="masks"), "process.kernel must be one of .*absorbing.*, not 'masks'"),
        (dict(parametrisation="score"), "process.parametrisation must be one of .*not 'score'"),
        (dict(vocab_size=4096), "4096 x 4096 matrices, 67 MB .*'masking' or 'uniform'"),
        (dict(vocab_size=1), "at least 2 symbols, not 1"),
        (
            dict(kernel="gaussian_symmetric", rate_width=0.1),
            "process.rate_width must be .* not 0.1",
        ),
        (
            dict(kernel="gaussian_symmetric", stationary_width=0.1),
            "stationary_width must be .* not 0.1",
        ),
        (dict(rate_width=3.0), "need process.kernel='gaussian_target' or .*, not 'uniform'"),
        (dict(kernel="gaussian"), "one of .*gaussian_target, gaussian_symmetric, not 'gaussian'"),
        (dict(kernel="absorbing", schedule=Geometric()), "needs a schedule that reaches alpha = 0"),
    ],
)
def test_impossible_rates_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Rates(**{"vocab_size": 4, **settings})
