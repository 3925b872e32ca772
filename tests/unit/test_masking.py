"""The forward process: posterior, exact masks, and what holds for every process."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine, Linear, Polynomial

every_process = pytest.mark.parametrize(
    "make", exact.PROCESS_CASES.values(), ids=exact.PROCESS_CASES
)
X = np.tile(np.arange(8, dtype=np.int32), (6, 1))
KEYS = exact.keys_for(0, 6)


@every_process
@pytest.mark.cases(3)
def test_corrupt_keeps_shape_and_states_and_rows_apart(make):
    process = make(8).init()
    t = jnp.linspace(0.1, 0.9, 6)
    z = jax.jit(process.corrupt)(KEYS, X, t)
    assert z.shape == X.shape and z.dtype == jnp.int32
    last = max(getattr(process, "absent_id", 8), getattr(process, "states", 0) - 1)
    assert ((z >= 0) & (z <= last)).all()
    rows = np.array([4, 1])
    np.testing.assert_array_equal(process.corrupt(KEYS[rows], X[rows], t[rows]), z[rows])
    prior = process.prior(exact.keys_for(0, 6), 8)
    assert prior.shape == (6, 8) and prior.dtype == jnp.int32


@every_process
def test_a_process_is_a_pytree_that_jit_takes(make):
    process = make(8).init()
    leaves, structure = jax.tree.flatten(process)
    again = jax.tree.unflatten(structure, leaves)
    assert jax.tree.structure(again) == structure and type(again) is type(process)
    for one, other in zip(jax.tree.leaves(again), leaves, strict=True):
        np.testing.assert_array_equal(one, other)
    assert jax.jit(lambda p: p.prior(exact.keys_for(0, 1), 2))(process).shape == (1, 2)


def test_masking_has_nothing_to_learn_and_starts_from_the_mask():
    process = Masking(5)
    assert jax.tree.leaves(process) == [] and process.mask_id == 5
    assert (process.prior(exact.keys_for(0, 2), 3) == 5).all()


def test_nothing_is_masked_at_zero_and_everything_at_one():
    process = Masking(8)
    assert (process.corrupt(KEYS, X, jnp.zeros(6)) == X).all()
    assert (process.corrupt(KEYS, X, jnp.ones(6)) == 8).all()


def test_masks_grow_with_time():
    process = Masking(8)
    before = process.corrupt(KEYS, X, jnp.full(6, 0.3))
    after = process.corrupt(KEYS, X, jnp.full(6, 0.6))
    assert ((after == 8) | (before != 8)).all() and (after == 8).sum() > (before == 8).sum()


@pytest.mark.parametrize("count", range(1, 9))
def test_exactly_so_many_masks(count):
    z, masked = jax.jit(Masking(8).mask_exactly)(KEYS, X, jnp.full(6, count), X >= 0)
    assert ((z == 8).sum(axis=1) == count).all()
    assert ((z == 8) | (z == X)).all()
    assert ((masked > 0) & (masked < 1)).all()


def test_m02_reveal_probability():
    """alpha_s = 0.7, alpha_t = 0.45."""
    value = Masking(3).reveal_probability(jnp.float32(0.3), jnp.float32(0.55))
    np.testing.assert_allclose(value, 0.45454545455, rtol=1e-6)


def test_m02_reverse_steps_compose(x64):
    """Staying masked from t to r is staying from t to s and then from s to r."""
    for schedule in (Linear(), Cosine(), Polynomial(2.0)):
        stay = lambda s, t: 1.0 - Masking(3, schedule).reveal_probability(s, t)  # noqa: B023, E731
        r, s, t = (jnp.asarray(v) for v in (0.1, 0.3, 0.55))
        np.testing.assert_allclose(stay(s, t) * stay(r, s), stay(r, t), rtol=1e-12)


def test_m01_steps_of_the_forward_process_multiply(x64):
    """Three steps that mask with 0.1, 0.3 and 0.25: alpha = 0.4725; the rest is masked."""
    alpha = np.cumprod([0.9, 0.7, 0.75])
    t = jnp.asarray(1.0 - alpha)
    process = Masking(3)
    np.testing.assert_allclose(process.schedule.alpha(t)[-1], 0.4725, rtol=1e-12)
    # Reversed, the same chain: P(masked before | masked after) by Bayes.
    masked = 1.0 - alpha
    np.testing.assert_allclose(
        1.0 - process.reveal_probability(t[:-1], t[1:]), masked[:-1] / masked[1:], rtol=1e-12
    )
