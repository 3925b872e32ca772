"""Network evaluations that sequences use, counted, against identity T12; n in each test."""

import exact
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine, Linear, LogLinear
from md4_jax.protocols import Denoiser
from md4_jax.samplers import reveal
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.chain import NEVER
from md4_jax.samplers.grids import cosine, uniform
from md4_jax.samplers.tweedie import Tweedie

pytestmark = pytest.mark.slow

EVEN = Denoiser(lambda z, t: jnp.zeros((*z.shape, 2)), lambda h: h)
FOUR_STEPS = {
    "linear": (Linear(), uniform(4), 2.3125, 2.734375),
    "cosine": (Cosine(), uniform(4), 2.1873701146, 2.4226169546),
    "cosine grid": (Linear(), cosine(4), 2.1873701146, 2.4226169546),
}
four_steps = pytest.mark.parametrize(
    "schedule, grid, lazy, cached", FOUR_STEPS.values(), ids=FOUR_STEPS
)


def within(values, expected: float, errors: float = 4.0) -> bool:
    return abs(values.mean() - expected) < errors * values.std() / np.sqrt(len(values))


@four_steps
@pytest.mark.cases(2)
def test_t12_a_step_at_which_nothing_appears_is_free(schedule, grid, lazy, cached):
    """T = 4, L = 3: the mean over n = 20,000 sequences, within 4 standard errors."""
    keys, process = exact.keys_for(1, 20_000), Masking(2, schedule)
    z, evaluations = exact.drawn(EVEN, process, Ancestral(), grid, keys, length=3)
    evaluations = np.asarray(evaluations, np.float64)
    assert within(evaluations, lazy) and not within(evaluations, cached)
    assert set(evaluations) == {1.0, 2.0, 3.0} and (z < 2).all()


@four_steps
def test_t12_a_cache_that_computes_after_each_change(schedule, grid, lazy, cached):
    """1 + steps with a change before the last one, of the same plans: n = 20,000, 4 errors."""
    chain, process = exact.chain_of(jnp.full((20_000, 3), 2)), Masking(2, schedule)
    keys = exact.keys_for(2, 20_000)
    plan = reveal.independent_schedule(process, chain, grid, keys, Tweedie().reveal_probability)
    rounds = np.sort(plan.round, axis=1)
    assert (rounds < NEVER).all()
    new = np.concatenate([np.ones((20_000, 1), bool), rounds[:, 1:] > rounds[:, :-1]], axis=1)
    assert within(new.sum(axis=1), lazy)
    assert within(1 + (new & (rounds < 3)).sum(axis=1), cached)


@pytest.mark.parametrize("steps, mean", [(64, 63.999993652), (1024, 647.47546684)])
def test_t12_a_thousand_tokens(steps, mean):
    """Log-linear, L = 1024: n = 64 sequences, 4 standard errors of the law of L balls in T boxes.

    Their variance is T (q_1 - q_2) + T^2 (q_2 - q_1^2) with q_k = (1 - k/T)^L that k given
    boxes stay empty. A step hardly ever needs a second evaluation for want of room.
    """
    keys, process = exact.keys_for(3, 64), Masking(2, LogLinear())
    _, evaluations = exact.drawn(EVEN, process, Ancestral(), uniform(steps), keys, length=1024)
    one, two = ((1.0 - k / steps) ** 1024 for k in (1, 2))
    variance = steps * (one - two) + steps**2 * (two - one**2)
    assert abs(np.mean(evaluations) - mean) < 4 * np.sqrt(variance / 64)
    assert np.ptp(evaluations) < 9 * np.sqrt(variance)
