"""Sequential Monte Carlo towards p(x) exp(strength r(x)), beside enumeration."""

import candi
import exact
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.options import MeshOptions, SampleOptions
from md4_jax.processes.gaussian_masking import GaussianMasking
from md4_jax.processes.lengths import Grows
from md4_jax.processes.masking import Masking
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, Network, Prompt, UserError
from md4_jax.runtime.mesh import make_mesh
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.particles import SteeringOptions, log_mean_exp, systematic
from md4_jax.samplers.steering import Programs, Steering, draw_steered

MESH = make_mesh(MeshOptions(data=1))
V, L, STEPS, STRENGTH = 2, 3, 4, 1.5
PROCESS = Masking(V)
TABLE = exact.denoiser_of(exact.table_logits(V, L))
P = np.array([[0.4, 0.1], [0.15, 0.35]])  # data of two tokens, for other noise


def values(symbols: int, length: int) -> np.ndarray:
    """The reward of each sequence: no function of any part of it."""
    return np.cos(1.0 + 2.0 * np.arange(symbols**length))


def reward(tokens, domain):
    symbols, length = domain
    return values(symbols, length)[coded(tokens, symbols)]


def coded(tokens, symbols: int) -> np.ndarray:
    return tokens @ symbols ** np.arange(tokens.shape[1])[::-1]


def law() -> np.ndarray:
    """The law of plain sampling over the 2^3 sequences, enumerated."""
    states = exact.ancestral_law(TABLE, PROCESS, uniform(STEPS), L)
    return states.reshape((V + 1,) * L)[(slice(V),) * L].ravel()


def drawn(num, denoiser=TABLE, process=PROCESS, *, function=reward, sampler="ancestral", **more):
    """Samples of a network; `more` holds options of steering, prompt, batch_size and others."""
    network = Network(
        lambda key: {},
        lambda params, context, keys: Denoiser(denoiser.features, lambda h: h),
        time_free=process is PROCESS,
    )
    symbols, prompt = process.vocab_size, more.pop("prompt", None)
    length = more.pop("length", L)
    particles = more.get("particles", 4)
    own = SampleOptions(num=num, batch_size=more.pop("batch_size", num * particles))
    prompt = prompt or Prompt(np.zeros(length, np.int32), np.zeros(length, bool))
    programs = Programs(network, uniform(more.pop("steps", STEPS)), MESH, 1.0)
    params = {"network": {}, "process": process}
    asked = SteeringOptions(**{"strength": STRENGTH, "every": 1, **more})
    steering = Steering(asked, function, (symbols, length))
    return draw_steered(programs, params, exact.SAMPLERS[sampler](), own, [prompt], steering)


def check_weighted_law(found, p: np.ndarray, symbols: int, length: int) -> None:
    """The mean of (estimate of Z) 1[sample = x] is p(x) exp(strength r(x)), within 4.5 errors.

    That holds for any number of particles, looks and resamplings. Summed over x it says that the
    estimate of Z has no bias.
    """
    which = coded(found.tokens, symbols)[:, None] == np.arange(len(p))
    weighted = np.exp(found.steered.log_means)[:, None] * which
    wanted = p * np.exp(STRENGTH * values(symbols, length))
    errors = weighted.std(axis=0) / len(weighted) ** 0.5
    assert (np.abs(weighted.mean(axis=0) - wanted) < 4.5 * errors).all()
    assert np.abs(wanted - p).max() > 10 * errors.max()


@pytest.mark.parametrize(
    "particles, threshold, every", [(1, 1.0, 1), (4, 0.9, 1), (4, 1.0, 2), (4, 0.0, 1)]
)
@pytest.mark.cases(1)
def test_weighted_samples_have_the_tilted_law_without_bias(particles, threshold, every):
    found = drawn(8192, particles=particles, threshold=threshold, every=every)
    check_weighted_law(found, law(), V, L)
    if particles > 1 and threshold:
        assert found.steered.resamplings.mean() > 0.1
    else:
        assert found.steered.resamplings.max() == 0


@pytest.mark.campaign
@pytest.mark.parametrize("sampler", ["any_order", "remask"])
def test_samplers_that_take_other_steps_have_it_too(sampler):
    """Beside frequencies of one particle, which the reward does not change."""
    plain = drawn(2**14, sampler=sampler, particles=1)
    p = np.bincount(coded(plain.tokens, V), minlength=V**L) / len(plain.tokens)
    wanted = p * np.exp(STRENGTH * values(V, L))
    found = drawn(2**14, sampler=sampler, threshold=0.9)
    which = coded(found.tokens, V)[:, None] == np.arange(V**L)
    weighted = np.exp(found.steered.log_means)[:, None] * which
    errors = weighted.std(axis=0) / 2**7 + np.exp(STRENGTH * values(V, L)) * (p / 2**14) ** 0.5
    assert (np.abs(weighted.mean(axis=0) - wanted) < 4.5 * errors).all()


def combinations() -> list:
    """Every process with every sampler that fits it; of most processes left to campaigns."""
    found = []
    for name, make in exact.PROCESS_CASES.items():
        process = make(3).init()
        if isinstance(process, GaussianMasking | Grows):  # tested below; refused
            continue
        mark = pytest.mark.slow if name == "masking" else pytest.mark.campaign
        for sampler in exact.samplers_for(process):
            found.append(pytest.param(process, sampler, id=f"{name}, {sampler}", marks=mark))
    return found


@pytest.mark.parametrize("process, sampler", combinations())
@pytest.mark.cases(2)
def test_every_sampler_of_every_process_moves_particles(process, sampler):
    """They are resampled at each look, and end without noise; the prompt stays."""
    prompt = Prompt(np.array([0, 2, 0], np.int32), np.array([False, True, False]))
    table = exact.denoiser_of(exact.table_logits(3, L), time=0.3)
    found = drawn(
        32, table, process, sampler=sampler, prompt=prompt, particles=2, every=2, threshold=1.0,
        steps=5,
    )  # fmt: skip
    assert (found.tokens[:, 1] == 2).all()
    assert found.tokens.min() >= 0 and found.tokens.max() < 3
    assert found.steered.resamplings.mean() > 0.1


def test_other_noise_has_the_tilted_law_too():
    process = Uniform(2)
    noises = np.asarray(process.schedule.one_minus_alpha(jnp.asarray(uniform(STEPS))), np.float64)
    p = exact.uniform_law(P, noises[::-1])
    denoiser = exact.uniform_outputs(process, P)
    found = drawn(8192, denoiser, process, length=2, threshold=0.9)
    check_weighted_law(found, p, 2, 2)
    assert found.steered.resamplings.mean() > 0.1


def test_a_look_removes_the_noise_of_its_time():
    """Of one token each guess has the law of the data: 8192 particles, within 5 standard errors.

    At t = 3/4, 1/2 and 1/4 the chain itself has symbol 0 with chances of 0.6, 0.7 and 0.8.
    """
    process, seen = Uniform(2), []
    denoiser = exact.uniform_outputs(process, np.array([0.9, 0.1]))

    def looked(tokens, domain):
        seen.append(np.mean(tokens == 0))
        return np.zeros(len(tokens))

    drawn(4096, denoiser, process, function=looked, length=1, particles=2)
    assert len(seen) == STEPS
    np.testing.assert_allclose(seen, 0.9, atol=5 * np.sqrt(0.09 / 8192))


@pytest.mark.campaign
def test_the_continuous_state_of_candi_goes_with_its_particle():
    process, p = GaussianMasking(3, confusion_end=0.2), candi.P_V3L1
    denoiser = candi.posterior(process, p)
    found = drawn(2**14, denoiser, process, length=1, threshold=0.9)
    check_weighted_law(found, candi.model_law(process, p), 3, 1)
    assert found.steered.resamplings.mean() > 0.1


@pytest.mark.campaign
def test_samples_tend_to_the_tilted_law_with_the_number_of_particles():
    """By weights alone it falls from 0.29 to 0.08 and 0.014, with 65,536 samples each."""
    p = law()
    tilted = p * np.exp(STRENGTH * values(V, L))
    tilted /= tilted.sum()
    one, four, many = (drawn(8192, particles=n, threshold=0.0) for n in (1, 4, 16))
    assert distance(one.tokens, p) < 0.025
    assert distance(one.tokens, tilted) > 2.5 * distance(four.tokens, tilted)
    assert distance(many.tokens, tilted) < 0.035
    assert many.steered.rewards == pytest.approx(reward(many.tokens, (V, L)))


def distance(tokens, expected) -> float:
    found = np.bincount(coded(tokens, V), minlength=len(expected)) / len(tokens)
    return 0.5 * np.abs(found - expected).sum()


@pytest.mark.slow
def test_a_sample_does_not_depend_on_its_batch():
    whole = drawn(12, threshold=0.9)
    parts = drawn(12, threshold=0.9, batch_size=20)  # 5 samples of 4 particles at once
    few = drawn(3, threshold=0.9)
    assert (whole.tokens == parts.tokens).all() and (whole.tokens[:3] == few.tokens).all()
    assert (whole.evaluations == parts.evaluations).all()
    assert whole.steered.log_means == pytest.approx(parts.steered.log_means)


def test_evaluations_of_all_particles_and_looks_are_counted():
    found = drawn(64, threshold=0.0)
    assert (found.evaluations <= 4 * STEPS).all() and (found.evaluations >= 4).all()
    looked = drawn(64, threshold=1e-9)  # looks, but never resamples
    assert (looked.tokens == found.tokens).all()
    more = looked.evaluations - found.evaluations
    assert (more <= 4 * (STEPS - 1)).all() and more.mean() > 4


def test_prompts_stay():
    prompt = Prompt(np.array([0, 1, 0], np.int32), np.array([False, True, False]))
    assert (drawn(64, prompt=prompt).tokens[:, 1] == 1).all()


def test_systematic_children_are_within_one_of_their_share():
    weights = np.random.default_rng(0).random((50, 7))
    parents = systematic(weights, np.random.default_rng(1).random(50))
    children = (parents[:, :, None] == np.arange(7)).sum(axis=1)
    assert (np.abs(children - 7 * weights / weights.sum(axis=1, keepdims=True)) < 1).all()


def test_the_error_of_a_log_mean_is_the_spread_of_its_estimates():
    """2000 of 100 logs from U(0, 3): their spread is known to 1.6%, within 4 of these."""
    logs = np.random.default_rng(0).uniform(0.0, 3.0, (2000, 100))
    means, errors = np.array([log_mean_exp(each) for each in logs]).T
    assert np.mean(errors) == pytest.approx(means.std(ddof=1), rel=0.064)
    assert log_mean_exp(logs[0, :1]) == (pytest.approx(logs[0, 0]), None)


def test_wrong_rewards_and_options_are_refused():
    with pytest.raises(UserError, match="must be finite"):
        drawn(4, function=lambda tokens, domain: np.full(len(tokens), np.nan))
    with pytest.raises(UserError, match="one number for each"):
        drawn(4, function=lambda tokens, domain: np.zeros((len(tokens), 2)))
    for key, value, said in (
        ("particles", 0, "must be at least 1, not 0"),
        ("every", -1, "must be at least 1, not -1"),
        ("strength", float("inf"), "must be a finite number, not inf"),
        ("threshold", 1.5, r"must lie in \[0, 1\], not 1.5"),
    ):
        with pytest.raises(UserError, match=rf"sample\.reward\.{key} {said}"):
            SteeringOptions(**{key: value})
