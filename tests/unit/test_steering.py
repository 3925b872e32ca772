"""Sequential Monte Carlo towards p(x) exp(strength r(x)), beside enumeration."""

import exact
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.options import MeshOptions, SampleOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, Network, Prompt, UserError
from md4_jax.runtime.sharding import make_mesh
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.particles import SteeringOptions, systematic
from md4_jax.samplers.steering import Programs, Steering, draw_steered

MESH = make_mesh(MeshOptions(data=1))
V, L, STEPS = 2, 3, 4
LOGITS = exact.table_logits(V, L)
PROCESS = Masking(V)
X = exact.sequences(V, L)
TABLE = np.cos(1.0 + 2.0 * np.arange(V**L))


def reward(tokens, domain):
    return TABLE[tokens @ V ** np.arange(L)[::-1]]


def law() -> np.ndarray:
    """The law of plain sampling over the 2^3 sequences, enumerated."""
    states = exact.ancestral_law(exact.denoiser_of(LOGITS), PROCESS, uniform(STEPS), L)
    return states.reshape((V + 1,) * L)[(slice(V),) * L].ravel()


def drawn(num, *, prompt=None, function=reward, **options):
    features = exact.denoiser_of(LOGITS).features
    network = Network(
        lambda key: {},
        lambda params, context, keys: Denoiser(features, lambda h: h),
        time_free=True,
    )
    programs = Programs(network, uniform(STEPS), MESH, 1.0)
    asked = SteeringOptions(**{"strength": 1.5, "every": 1, **options})
    steering = Steering(asked, function, None)
    prompt = prompt or Prompt(np.zeros(L, np.int32), np.zeros(L, bool))
    params = {"network": {}, "process": PROCESS}
    own = SampleOptions(num=num, batch_size=num * asked.particles)
    return draw_steered(programs, params, Ancestral(), own, [prompt], steering)


def distance(tokens, expected) -> float:
    found = np.bincount(tokens @ V ** np.arange(L)[::-1], minlength=V**L) / len(tokens)
    return 0.5 * np.abs(found - expected).sum()


@pytest.mark.parametrize("particles, threshold", [(1, 1.0), (2, 1.0), (4, 0.9), (4, 0.0)])
def test_the_estimate_of_the_normaliser_has_no_bias(particles, threshold):
    p, count = law(), 4096
    exact_mean = p @ np.exp(1.5 * TABLE)
    found = drawn(count, particles=particles, threshold=threshold)
    means = np.exp(found.steered.log_means)
    assert abs(means.mean() - exact_mean) < 4 * means.std() / count**0.5
    if particles > 1 and threshold:
        assert found.steered.resamplings.mean() > 0.1


def test_samples_tend_to_the_tilted_law_and_one_particle_gives_the_plain_one():
    p = law()
    tilted = p * np.exp(1.5 * TABLE) / (p @ np.exp(1.5 * TABLE))
    far, near = (drawn(4096, particles=n, threshold=0.9) for n in (1, 16))
    assert distance(far.tokens, p) < 0.04
    assert distance(near.tokens, tilted) < 0.05 < 0.15 < distance(far.tokens, tilted)
    assert near.steered.rewards == pytest.approx(reward(near.tokens, None))


def test_prompts_stay():
    prompt = Prompt(np.array([0, 1, 0], np.int32), np.array([False, True, False]))
    assert (drawn(64, prompt=prompt).tokens[:, 1] == 1).all()


def test_systematic_children_are_within_one_of_their_share():
    weights = np.random.default_rng(0).random((50, 7))
    parents = systematic(weights, np.random.default_rng(1).random(50))
    children = (parents[:, :, None] == np.arange(7)).sum(axis=1)
    assert (np.abs(children - 7 * weights / weights.sum(axis=1, keepdims=True)) < 1).all()


def test_wrong_rewards_and_options_are_refused():
    with pytest.raises(UserError, match="must be finite"):
        drawn(4, function=lambda tokens, domain: np.full(len(tokens), jnp.nan))
    with pytest.raises(UserError, match="one number for each"):
        drawn(4, function=lambda tokens, domain: np.zeros((len(tokens), 2)))
    with pytest.raises(UserError, match=r"sample\.reward\.particles must be at least 1, not 0"):
        SteeringOptions(particles=0)
