"""Path planning: which tokens are hidden again, and that it is `confidence` without doubt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, Prompt, UserError
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import sample
from md4_jax.samplers.planning import PathPlanning
from md4_jax.samplers.transforms import Transform
from tests import exact

# Probabilities of the more likely of two symbols, one position each.
SURE = np.array([0.6, 0.99, 0.55, 0.9, 0.7, 0.95, 0.52, 0.8])
MASK = 2


def denoiser(bent: float = 0.0) -> Denoiser:
    """SURE at each position; with `bent` it also depends on the symbols that are seen."""
    logits = jnp.log(jnp.asarray(np.stack([SURE, 1 - SURE], axis=-1)))

    def outputs(z, t):
        seen = jnp.sin(bent * jnp.cumsum(z * jnp.arange(1, 9), axis=1))
        return logits + bent * seen[..., None] * jnp.array([1.0, -1.0])

    return Denoiser(outputs, lambda h: h)


def one_step(z, eta: float, s: float = 0.5, prompt=()) -> list[int]:
    """The masks that a step at temperature 0 leaves."""
    mask = jnp.zeros((1, 8), bool).at[0, list(prompt)].set(True)
    drawn = jnp.array([z]) != MASK
    chain = exact.chain_of(np.array([z]))
    chain = chain._replace(prompt_mask=mask, confidence=jnp.where(drawn, 0.3, 0.0))
    step, times = PathPlanning(eta, Transform(0.0)), (jnp.float32(s), jnp.float32(0.9))
    found = step(denoiser(), Masking(2), chain, *times, exact.keys_for(0, 1))
    hidden = np.flatnonzero(found.z[0] == MASK)
    assert np.array_equal(found.confidence[0] == 0, np.isin(np.arange(8), hidden))
    return hidden.tolist()


def drawn(step, bent: float, rows: int):
    """Samples with the second symbol in the second place."""
    tokens, mask = jnp.ones((rows, 8), jnp.int32), jnp.arange(8) == 1
    prompt = Prompt(tokens, jnp.broadcast_to(mask, tokens.shape))
    return sample(
        denoiser(bent), Masking(2), step,
        grid=uniform(6), keys=exact.keys_for(3, rows), prompt=prompt,
    )[0]  # fmt: skip


# The second token is as likely as any other, the fourth has a probability of 0.1.
SEEN = [MASK, 0, MASK, 1, MASK, MASK, MASK, MASK]


@pytest.mark.parametrize(
    "eta, hidden",
    [
        (1.0, [0, 2, 3, 6]),
        (0.0, [0, 2, 4, 6]),
        (0.1, [0, 2, 4, 6]),  # 0.1 log 0.1 is above log 0.7
        (0.2, [0, 2, 3, 6]),  # and 0.2 log 0.1 below it
        (60.0, [1, 2, 3, 6]),  # 60 log 0.99 is below log 0.6
    ],
)
@pytest.mark.cases(3)
def test_the_least_likely_tokens_are_hidden(eta, hidden):
    assert one_step(SEEN, eta) == hidden


def test_a_prompt_is_never_hidden():
    """The two unlikeliest tokens are the user's, so that a step to 1/2 hides 3 of the other 6."""
    given = [MASK, 1, MASK, 1, MASK, MASK, MASK, MASK]
    assert one_step(given, 1.0, prompt=(1, 3)) == [0, 2, 6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.cases(1)
def test_without_doubt_it_is_confidence(temperature):
    """The same draws, sample by sample."""
    transform = Transform(temperature)
    sure, plain = (
        drawn(step, bent=0.7, rows=64)
        for step in (PathPlanning(0.0, transform), Confidence(transform=transform))
    )
    assert np.array_equal(sure.z, plain.z) and np.array_equal(sure.confidence, plain.confidence)
    assert temperature == 0 or len(np.unique(sure.z, axis=0)) > 1


def test_a_sample_ends_without_masks_and_tokens_are_revised():
    """With the same keys doubt changes samples, and the network is asked once in every step."""
    doubting, sure = (drawn(PathPlanning(eta), bent=2.0, rows=32) for eta in (1.0, 0.0))
    assert np.all(doubting.z < MASK) and np.any(doubting.z != sure.z)
    assert np.all(doubting.evaluations == 6)


def test_a_head_may_plan():
    """It reads the whole text that was drawn; new and earlier tokens are hidden by its word."""
    quality = np.array([3.0, -1.0, 2.0, 0.5, -2.0, 1.0, 4.0, -0.5])
    seen = []

    def features(z, t):
        jax.debug.callback(lambda z: seen.append(np.asarray(z)[0].tolist()), z, ordered=True)
        return denoiser().features(z, t)

    judged = Denoiser(
        features, lambda h: h, quality=lambda h: jnp.broadcast_to(quality, h.shape[:-1])
    )
    step = PathPlanning(1.0, Transform(0.0), planner="quality")
    chain = exact.chain_of(np.array([SEEN]))
    found = step(
        judged, Masking(2), chain, jnp.float32(0.5), jnp.float32(0.9), exact.keys_for(0, 1)
    )
    assert seen == [SEEN, [0, 0, 0, 1, 0, 0, 0, 0]]
    assert np.flatnonzero(found.z[0] == MASK).tolist() == [1, 3, 4, 7]
    assert found.evaluations.tolist() == [2]
    assert step.needs.quality and not PathPlanning().needs.quality
    with pytest.raises(UserError, match="sample.planner must be 'network' or 'quality', not 'me'"):
        PathPlanning(planner="me")


@pytest.mark.parametrize("eta", [-0.1, float("inf"), float("nan")])
def test_doubt_is_a_number(eta):
    with pytest.raises(UserError, match="sample.eta must be a number of at least 0"):
        PathPlanning(eta)


def test_an_impossible_token_that_stays_is_not_hidden():
    """eta = 0 times log 0."""
    impossible = Denoiser(
        lambda z, t: jnp.broadcast_to(jnp.array([0.0, -jnp.inf]), (*z.shape, 2)), lambda h: h
    )
    chain = exact.chain_of(np.array([[1, MASK, MASK, MASK]]))
    times = jnp.float32(0.5), jnp.float32(0.9)
    step = jax.jit(lambda keys: PathPlanning(0.0)(impossible, Masking(2), chain, *times, keys).z)
    assert step(exact.keys_for(0, 1))[0, 0] == 1
