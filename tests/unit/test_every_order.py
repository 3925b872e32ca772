"""Likelihood of block diffusion over all orders: by enumeration, and against its bound."""

import itertools

import exact
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.autoregressive import AlongOrder
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.every_order import EveryOrder
from md4_jax.processes.masking import Masking
from md4_jax.protocols import UserError, batch_of


def nats_of(objective, denoiser, vocab, x, seed=0, **told) -> np.ndarray:
    keys = exact.keys_for(seed, len(x))
    found, _ = objective(denoiser, Masking(vocab), batch_of(x, **told), jnp.zeros(len(x)), keys)
    return np.asarray(found, np.float64)


def test_m16_the_law_of_one_token_at_a_time(x64):
    """p_theta(0, 0) and p_theta(1, 2) of the table denoiser, in one block of two tokens."""
    denoiser, x = exact.block_table(exact.table_logits(3, 2)), exact.sequences(3, 2)
    law = np.exp(-nats_of(EveryOrder(2), denoiser, 3, x))
    np.testing.assert_allclose(law[[0, 5]], [0.09552560043, 0.090936707774], rtol=1e-9)
    np.testing.assert_allclose(law.sum(), 1.0, rtol=1e-12)


def test_b01_blocks_of_one_are_the_likelihood_from_left_to_right(x64):
    denoiser, x = exact.block_table(exact.table_logits(2, 4)), np.array([[0, 1, 1, 0]], np.int32)
    np.testing.assert_allclose(nats_of(EveryOrder(1), denoiser, 2, x), 3.4412506329, rtol=1e-9)


@pytest.mark.quick(1)
@pytest.mark.parametrize("block", [1, 2, 3, 4])
@pytest.mark.cases(2)
def test_it_is_the_mean_over_the_orders_of_each_block(block, x64):
    """Each order by a call a token; the last block of three is shorter. It sums to one."""
    logits, x = exact.table_logits(2, 4), exact.sequences(2, 4)
    blocks = [range(4)[i : i + block] for i in range(0, 4, block)]
    law = []
    for parts in itertools.product(*(itertools.permutations(part) for part in blocks)):
        order = jnp.broadcast_to(jnp.asarray([*itertools.chain(*parts)]), x.shape)
        base, batch = exact.denoiser_of(logits), exact.batch_of(x)
        law.append(np.exp(-AlongOrder().loss_along(base, Masking(2), batch, order)))
    found = np.exp(-nats_of(EveryOrder(block), exact.block_table(logits), 2, x))
    np.testing.assert_allclose(found, np.mean(law, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.sum(), 1.0, rtol=1e-12)


@pytest.mark.parametrize("block", [1, 2, 4])
def test_a_perfect_denoiser_has_the_likelihood_for_every_block(block, x64):
    p = np.random.default_rng(0).dirichlet(np.ones(16)).reshape(2, 2, 2, 2)
    found = nats_of(
        EveryOrder(block), exact.block_table(exact.perfect_logits(p)), 2, exact.sequences(2, 4)
    )
    np.testing.assert_allclose(found, -np.log(p.ravel()), rtol=1e-8)


def test_tokens_that_do_not_count_are_known(x64):
    """Given the second of three tokens, the others have the conditional probability."""
    p = exact.P_V2L3
    denoiser, x = exact.block_table(exact.perfect_logits(p)), exact.sequences(2, 3)
    mask = np.broadcast_to([True, False, True], x.shape)
    found = nats_of(EveryOrder(3), denoiser, 2, x, loss_mask=mask)
    given = p / p.sum(axis=(0, 2), keepdims=True)
    np.testing.assert_allclose(found, -np.log(given.ravel()), rtol=1e-8)


@pytest.mark.slow
def test_some_orders_lie_between_the_likelihood_and_the_bound(x64):
    """One order has the bound's mean 3.1124319407 (B01), eight come close; within 4 errors."""
    logits, x = exact.table_logits(2, 4), np.array([[0, 1, 1, 0]], np.int32).repeat(4000, axis=0)
    denoiser = exact.block_table(logits)
    least = nats_of(EveryOrder(4), denoiser, 2, x[:1])[0]
    one, eight = (nats_of(EveryOrder(4, k), denoiser, 2, x, seed=k) for k in (1, 8))
    errors = [values.std() / len(values) ** 0.5 for values in (one, eight)]
    assert abs(one.mean() - 3.1124319407) < 4 * errors[0]
    # All 24 orders, whose mean of eight draws is computed here by drawing them.
    law = np.exp(-np.array([_along(logits, x[:1], o) for o in itertools.permutations(range(4))]))
    drawn = -np.log(np.random.default_rng(0).choice(law[:, 0], (200_000, 8)).mean(axis=1))
    error = np.hypot(errors[1], drawn.std() / len(drawn) ** 0.5)
    assert abs(eight.mean() - drawn.mean()) < 4 * error
    assert least < drawn.mean() < 3.1124319407


def _along(logits, x, order) -> np.ndarray:
    base, batch = exact.denoiser_of(logits), exact.batch_of(x)
    rows = jnp.broadcast_to(jnp.asarray(order), x.shape)
    return np.asarray(AlongOrder().loss_along(base, Masking(2), batch, rows))


def test_what_is_said():
    assert EveryOrder(4).is_exact(None) and not EveryOrder(4, 8).is_exact(None)
    assert EveryOrder(16, 8).is_bound(None)
    for options, words in [
        (dict(block=0), "objective.block must be at least 1, not 0"),
        (dict(orders=-1), "objective.orders must be at least 0, not -1"),
        (dict(block=16), r"objective.block=16 .* 2\^16 calls .* at most 12"),
    ]:
        with pytest.raises(UserError, match=words):
            EveryOrder(**options)
    with pytest.raises(UserError, match="objective.block=4 must divide .* data.length=10"):
        EveryOrder(4).check_length(10)
    BlockDiffusion(4).check_length(12)
