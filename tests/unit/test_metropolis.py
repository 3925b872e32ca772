"""Metropolis-Hastings: identity C02 on a star graph, and the sampler's one proposal."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.processes.schedules import Geometric, LogLinear
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, Prompt, UserError
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import sample
from md4_jax.samplers.metropolis import Metropolis, acceptance
from md4_jax.samplers.transforms import Transform

PROCESS = Uniform(3, LogLinear(), "score")


def fixed(outputs) -> Denoiser:
    """A denoiser that puts out the same numbers at every state."""
    return Denoiser(lambda z, t: jnp.broadcast_to(jnp.asarray(outputs), (*z.shape, 3)), lambda h: h)


def stationary(degrees: dict[int, int]) -> np.ndarray:
    """The law that the chain on a star of four states leaves unchanged."""
    p, neighbours = np.array([0.4, 0.3, 0.2, 0.1]), {0: [1, 2, 3], 1: [0], 2: [0], 3: [0]}
    kernel = np.zeros((4, 4))
    for x, others in neighbours.items():
        for y in others:
            kernel[x, y] = acceptance(p[y] / p[x], degrees[x], degrees[y]) / len(others)
        kernel[x, x] = 1.0 - kernel[x].sum()
    values, vectors = np.linalg.eig(kernel.T)
    law = np.real(vectors[:, np.argmax(np.real(values))])
    return law / law.sum()


def test_c02_the_degrees_belong_into_the_acceptance(x64):
    np.testing.assert_allclose(
        stationary({0: 3, 1: 1, 2: 1, 3: 1}), [0.4, 0.3, 0.2, 0.1], rtol=1e-9
    )


def test_c02_without_them_the_law_is_another_one(x64):
    law = stationary(dict.fromkeys(range(4), 1))
    np.testing.assert_allclose(
        law, [0.66666666667, 0.16666666667, 0.11111111111, 0.055555555556], rtol=1e-9
    )
    distance = 0.5 * np.abs(law - [0.4, 0.3, 0.2, 0.1]).sum()
    np.testing.assert_allclose(distance, 0.26666666667, rtol=1e-9)


def test_an_infinite_ratio_is_taken_and_zero_is_not():
    assert acceptance(jnp.inf, 4, 4) == 1.0 and acceptance(0.0, 4, 4) == 0.0


def test_a_proposal_changes_at_most_one_token_and_none_towards_zero():
    """Outputs (-inf, 0, 0): symbol 0 has ratio 0 and is never entered, 1 and 2 always are."""
    z = jnp.asarray(np.tile(exact.sequences(3, 2), (40, 1)))
    step, keys = Metropolis(proposals=1), exact.keys_for(3, len(z))
    after = step(fixed([-jnp.inf, 0.0, 0.0]), PROCESS, exact.chain_of(z), 0.0, 1.0, keys).z
    changed = np.asarray(after != z)
    assert changed.any(axis=0).all() and (changed.sum(axis=1) <= 1).all()
    assert (np.asarray(after)[changed] > 0).all()
    full = (np.asarray(z) == 0).any(axis=1)
    # From (0, y), half of the proposals or more stay above 0; from elsewhere half or fewer.
    assert changed[full].any(axis=1).mean() > changed[~full].any(axis=1).mean()


def test_the_ratio_is_that_of_the_proposed_symbol_at_the_proposed_position():
    """Only (1, 2) may be entered: from its neighbours the chain goes there and stays."""
    target = np.array([1, 2])

    def features(z, t):
        near = jnp.sum(z != target, axis=1)[:, None, None] - (z != target)[:, :, None]
        here = (jnp.arange(3) == target[:, None]) & (near == 0)
        return jnp.where(here, 0.0, -jnp.inf)

    denoiser = Denoiser(features, lambda h: h)
    starts = jnp.asarray(np.repeat([[1, 0], [1, 1], [0, 2], [2, 2], [1, 2]], 8, axis=0), jnp.int32)
    keys = exact.keys_for(1, len(starts))
    z = Metropolis(proposals=80)(denoiser, PROCESS, exact.chain_of(starts), 0.0, 1.0, keys).z
    assert (np.asarray(z) == target).all()


def test_every_proposal_and_every_step_has_its_own_draws():
    """All are taken: after k proposals (k odd or even alike) the states differ between rows."""
    z = jnp.zeros((64, 2), jnp.int32)
    flat = fixed([0.0, 0.0, 0.0])
    chain, keys = exact.chain_of(z), exact.keys_for(0, 64)
    one = Metropolis(proposals=1)(flat, PROCESS, chain, 0.0, 1.0, keys).z
    many = Metropolis(proposals=9)(flat, PROCESS, chain, 0.0, 1.0, keys).z
    assert ((one != z).sum(axis=1) == 1).all()
    assert len(np.unique(one, axis=0)) == 4 and len(np.unique(many, axis=0)) == 9


def run(step, process, keys, steps=3):
    return exact.drawn(fixed([0.1, 0.4, -0.3]), process, step, uniform(steps), keys)


@pytest.mark.campaign
def test_the_loop_runs_it_and_a_sample_does_not_depend_on_its_neighbours():
    keys = exact.keys_for(2, 8)
    whole = run(Metropolis(5), PROCESS, keys)[0]
    part = run(Metropolis(5), PROCESS, keys[5:7])[0]
    assert whole.shape == (8, 2) and whole.dtype == jnp.int32
    assert ((whole >= 0) & (whole < 3)).all()
    np.testing.assert_array_equal(part, whole[5:7])
    many, evaluations = run(Metropolis(5), PROCESS, exact.keys_for(2, 64))
    assert len(np.unique(many, axis=0)) > 3
    assert (evaluations == 3 * 5).all()
    assert (run(Metropolis(5, level=0.2), PROCESS, keys)[1] == 3 * 5 + 1).all()


@pytest.mark.campaign
def test_noise_of_the_chains_own_level_is_taken_away():
    keys, chain = exact.keys_for(0, 4), exact.chain_of(jnp.zeros((4, 2)))
    noisy = Uniform(3, Geometric(0.5, 9.0), "score")
    assert (run(Metropolis(2), noisy, keys, steps=1)[1] == 2 + 1).all()
    seen = []
    denoiser = Denoiser(
        lambda z, t: seen.append(np.asarray(t)) or jnp.zeros((*z.shape, 3)), lambda h: h
    )
    with jax.disable_jit():
        given = np.zeros((4, 2), bool)
        sample(
            denoiser, PROCESS, Metropolis(1, 0.3),
            grid=uniform(1), keys=keys, prompt=Prompt(chain.z, given),
        )  # fmt: skip
    assert len(seen) == 2 and all((t == np.float32(0.3)).all() for t in seen)


@pytest.mark.parametrize("level", [0.0, 0.3])
@pytest.mark.cases(1)
def test_the_chain_sees_its_prompt_from_the_first_proposal_on(level):
    """With the noise of its own level, not with that of t = 1, also in the first step."""
    seen = []

    def features(z, t):
        seen.append(np.asarray(z))
        return jnp.zeros((*z.shape, 3))

    tokens = np.full((60, 2), 2, np.int32)
    prompt = Prompt(tokens, np.tile([True, False], (60, 1)))
    with jax.disable_jit():
        sample(
            Denoiser(features, lambda h: h), PROCESS, Metropolis(2, level),
            grid=uniform(1), keys=exact.keys_for(0, 60), prompt=prompt,
        )  # fmt: skip
    for z in seen:
        same = (z[:, 0] == 2).mean()  # 1 - 2/3 level on average
        assert same == 1.0 if not level else 0.55 < same < 0.95


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Metropolis(0), "sample.proposals must be at least 1, not 0"),
        (lambda: Metropolis(level=-0.1), r"sample.level must lie in \[0, 1\], not -0.1"),
        (lambda: Metropolis(transform=Transform(0.5)), "sample.temperature must be 1.0 .*not 0.5"),
        (lambda: Metropolis(transform=Transform(top_k=3)), "sample.top_k must be 0 .*not 3"),
        (lambda: Metropolis(transform=Transform(top_p=0.9)), "sample.top_p must be 1.0 .*not 0.9"),
    ],
)
def test_impossible_settings_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()
