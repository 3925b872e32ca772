"""Noise that is partly the mask and partly uniform, through the samplers and D3PM's bound."""

import exact
import hybrid
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from hybrid import Hybrid

from md4_jax.objectives.d3pm import D3PM
from md4_jax.processes.capabilities import HasPosterior, RevealsBySymbol, RevealsMasks
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Geometric
from md4_jax.protocols import Prompt
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import no_prompt, sample

pytestmark = pytest.mark.slow

P = exact.P_V3L2
N = 20_000
CLEAN = (exact.sequences(4, 2) < 3).all(axis=1)
TABLE = exact.denoiser_of(exact.table_logits(3, 2), time=0.3)


def test_it_is_no_pure_masking():
    process = Hybrid(3)
    assert isinstance(process, HasPosterior) and not process.shows_clean
    assert not isinstance(process, RevealsMasks | RevealsBySymbol)
    assert set(exact.samplers_for(process)) == {"ancestral", "psi"}
    assert exact.fits(D3PM(3), process)


def test_the_reverse_step_is_that_of_bayes(x64):
    """p(z_s^n | z_t) of the perfect denoiser against sums over all x and z_s, for every z_t."""
    process, x, z = Hybrid(3), exact.sequences(3, 2), exact.sequences(4, 2)
    s, t = 0.3, 0.8
    kept = (1.0 - t) / (1.0 - s)
    noise = hybrid.single(process, 0.0)[0]
    step = kept * np.eye(4) + (1.0 - kept) * noise
    at_s = P.ravel() @ hybrid.products(hybrid.single(process, 1.0 - s)[x])
    joint = at_s[:, None] * hybrid.products(step[z])  # [z_s, z_t]
    expected = np.einsum("st,sny->tny", joint / joint.sum(axis=0), np.eye(4)[z])
    before, now = jnp.full(16, s), jnp.full(16, t)
    outputs = hybrid.perfect(process, P)(z, now)
    found = jax.nn.softmax(process.reverse_logits(outputs, z, before, now))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def clean_law(denoiser, steps: int) -> np.ndarray:
    law = hybrid.model_law(denoiser, Hybrid(3), uniform(steps).astype(np.float64), 2)
    np.testing.assert_allclose(law[~CLEAN], 0.0, atol=1e-12)
    return law[CLEAN]


def test_with_more_steps_the_law_of_the_samples_tends_to_that_of_the_data(x64):
    """The error of independent tokens halves with each doubling of T."""
    perfect = hybrid.perfect(Hybrid(3), P)
    apart = [0.5 * np.abs(clean_law(perfect, steps) - P.ravel()).sum() for steps in (1, 32, 64)]
    assert apart[0] == pytest.approx(0.255, rel=1e-6)  # that of the product of the marginals
    assert apart[1] < 0.01 and apart[2] == pytest.approx(apart[1] / 2, rel=0.05)


def bounds(denoiser, process, steps: int, x: np.ndarray, length: int) -> np.ndarray:
    """D3PM's bound of each x by enumeration of steps and states, the prior included: [X]."""
    objective, z = D3PM(steps), exact.sequences(4, length)
    total = np.asarray(objective.prior(process, exact.batch_of(x)), np.float64)
    row, code = np.indices((len(x), len(z))).reshape(2, -1)
    loss_at = jax.jit(lambda batch, z, i: objective.loss_at(denoiser, process, batch, z, i))
    for i in range(1, steps + 1):
        chance = hybrid.products(hybrid.single(process, 1.0 - i / steps)[x])
        values = loss_at(exact.batch_of(x[row]), z[code], np.full(len(row), i))
        total = total + (chance * np.asarray(values).reshape(chance.shape)).sum(axis=1) / steps
    return total


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_bound_of_the_perfect_denoiser_is_the_entropy_of_one_token_at_every_T(steps, x64):
    process, x = Hybrid(3), exact.sequences(3, 1)
    value = bounds(hybrid.perfect(process, exact.P_V3L1), process, steps, x, 1)
    np.testing.assert_allclose(value, -np.log(exact.P_V3L1), rtol=1e-9)
    assert exact.P_V3L1 @ value == pytest.approx(1.0296530141, rel=1e-9)


@pytest.mark.parametrize("steps", [1, 4])
def test_the_bound_is_above_the_model_that_is_sampled(steps, x64):
    """For every x and any denoiser; with one step and independent tokens it is -log p itself."""
    process, x = Hybrid(3), exact.sequences(3, 2)
    for denoiser in (TABLE, hybrid.perfect(process, P)):
        gap = bounds(denoiser, process, steps, x, 2) + np.log(clean_law(denoiser, steps))
        assert (gap > -1e-9).all()
    if steps == 1:  # the perfect denoiser does not look at z_1
        np.testing.assert_allclose(gap, 0.0, atol=1e-9)


def test_the_bound_of_the_perfect_denoiser_tends_to_the_entropy(x64):
    process, x = Hybrid(3), exact.sequences(3, 2)
    perfect, entropy = hybrid.perfect(process, P), -np.sum(P * np.log(P))
    above = [P.ravel() @ bounds(perfect, process, T, x, 2) - entropy for T in (8, 16)]
    assert 0.0 < above[1] < above[0] < 0.05
    assert above[1] == pytest.approx(above[0] / 2, rel=0.1)


@pytest.mark.parametrize(
    "schedule", [Hybrid(3).schedule, Geometric(0.3, 9.0)], ids=["to no noise", "noise is left"]
)
@pytest.mark.cases(1)
def test_samples_have_the_law_of_the_model(schedule):
    """Three steps of a wrong denoiser: chi-squared over all sequences, n = 20,000, p > 1e-4.

    The law of pure masking, and that of leaving the last noise alone, are refused.
    """
    process, grid = Hybrid(3, 0.4, schedule), uniform(3)
    z, evaluations = exact.drawn(TABLE, process, Ancestral(), grid, exact.keys_for(3, N))
    law, left = hybrid.model_law(TABLE, process, grid, 2), schedule != Hybrid(3).schedule
    law = hybrid.finished(TABLE, process, law, 2) if left else law[CLEAN]
    assert (np.asarray(evaluations) == 3 + left).all() and (z < 3).all()
    counts = laws.counted(np.asarray(z), 3)
    assert laws.accepted(counts, law)
    assert not laws.accepted(counts, exact.ancestral_law(TABLE, Masking(3), grid, 2)[CLEAN])


def law_beside(token: int, grid: np.ndarray, shown) -> np.ndarray:
    """The law [4] of the second token beside a given one that is shown(t), a law [4], at t."""
    process, law = Hybrid(3), np.asarray(Hybrid(3).noise, np.float64)
    z = exact.sequences(4, 2)
    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        times = jnp.full(16, s), jnp.full(16, t)
        logits = process.reverse_logits(TABLE(z, times[1]), jnp.asarray(z), *times)
        step = np.asarray(jax.nn.softmax(logits), np.float64)[:, 1].reshape(4, 4, 4)
        law = law @ np.einsum("a,aby->by", shown(token, float(t)), step)
    return law


def test_a_prompt_comes_out_and_is_shown_with_the_noise_of_the_time():
    """The token beside it has the enumerated law, n = 20,000, p > 1e-4; a clean prompt's not."""
    process, grid, token = Hybrid(3), uniform(3), 1
    prompt = Prompt(np.full((N, 2), token, np.int32), np.tile([True, False], (N, 1)))
    keys = exact.keys_for(4, N)
    run = jax.jit(
        lambda keys: sample(TABLE, process, Ancestral(), grid=grid, keys=keys, prompt=prompt)[0]
    )
    chain = run(keys)
    z = np.asarray(chain.z)
    assert (z[:, 0] == token).all() and (np.asarray(chain.confidence)[:, 0] == 1.0).all()
    counts = np.bincount(z[:, 1], minlength=4)
    noised = law_beside(token, grid, lambda x, t: hybrid.single(process, 1.0 - t)[x])
    assert laws.accepted(counts, noised)
    clean = law_beside(token, grid, lambda x, t: np.eye(4)[x])
    assert not laws.accepted(counts, clean)


def test_a_mask_has_not_been_drawn_with_any_confidence():
    prompt = Prompt(np.zeros((1, 64), np.int32), np.zeros((1, 64), bool))
    denoiser = laws.fixed(np.zeros(3))
    _, frames = sample(
        denoiser, Hybrid(3), Ancestral(), grid=uniform(3), keys=exact.keys_for(0, 1),
        prompt=prompt, trace=True,
    )  # fmt: skip
    z, confidence = (np.asarray(x)[:, 0] for x in frames)
    assert (z[1] == 3).any() and (z[-1] < 3).all()
    np.testing.assert_array_equal(confidence[1:] > 0, z[1:] < 3)


class Idle(Ancestral):
    """A step that changes nothing."""

    def __call__(self, denoiser, process, chain, s, t, keys):
        return chain


def test_masks_that_a_step_leaves_are_drawn_and_other_symbols_stay():
    """No noise is left at t = 0; a third of the sequences hold no mask and cost no evaluation."""
    arguments = laws.fixed([-50.0, 50.0, -50.0]), Hybrid(3), Idle()
    chain, frames = jax.vmap(
        lambda key: sample(
            *arguments, grid=uniform(1), keys=key[None], prompt=no_prompt(1, 2), trace=True
        )
    )(exact.keys_for(0, 512))
    before, after = np.asarray(frames.z)[:, 0, 0], np.asarray(chain.z)[:, 0]
    masks = before == 3
    assert (after[masks] == 1).all() and (after[~masks] == before[~masks]).all()
    np.testing.assert_array_equal(np.asarray(chain.evaluations)[:, 0], masks.any(axis=1))
    assert 0.25 < (~masks.any(axis=1)).mean() < 0.5
