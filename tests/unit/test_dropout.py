"""Dropout: its mean and share, where it is off, and which draws it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import SIZES, T, Z, built

from md4_jax.networks import dropout
from md4_jax.networks.attention import Form, attend, attend_dropping
from md4_jax.networks.layers import dropped
from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import UserError

pytestmark = pytest.mark.slow

RATE = 0.3
RATES = dict(dropout=RATE, attention_dropout=RATE, embedding_dropout=RATE)
KEYS = jax.random.split(jax.random.key(3), 3)


def keys(count: int):
    return jax.random.split(jax.random.key(0), count)


def within(found, expected, error, times=4.0):
    assert abs(found - expected) < times * error, (found, expected, error)


def test_a_share_is_dropped_and_the_mean_is_kept():
    """200,000 entries of value 2, 4 standard errors."""
    keep = dropout.kept(keys(200), RATE, (1000,))
    y = np.asarray(dropout.scaled(jnp.full(keep.shape, 2.0), keep, RATE))
    within((y == 0).mean(), RATE, np.sqrt(RATE * (1 - RATE) / y.size))
    within(y.mean(), 2.0, y.std() / np.sqrt(y.size))


def test_attention_keeps_its_mean_and_drops_a_share_of_its_weights():
    """Values that are the unit vectors show the weights: 3,000 draws of 2 heads and 4 keys."""
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(1, 4, 2, 4)), jnp.float32) for _ in range(2))
    value = jnp.broadcast_to(jnp.eye(4)[None, :, None], (1, 4, 2, 4))
    plain = np.asarray(attend(query, key, value))
    many = [jnp.repeat(x, 3000, axis=0) for x in (query, key, value)]
    found = np.asarray(attend_dropping(*many, dropout=(keys(3000), Form(rate=RATE))))
    within((found == 0).mean(), RATE, np.sqrt(RATE * (1 - RATE) / found.size))
    error = found.std(axis=0) / np.sqrt(3000)
    assert (np.abs(found.mean(axis=0) - plain[0]) < 4.5 * error).all()


@pytest.mark.parametrize("kernel", ["plain", "splash", "rounded"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.cases(3)
def test_attention_that_drops_has_the_gradient_of_its_formula(causal, kernel):
    """With the draws of the same keys; with products of bfloat16 to 2^-6 of the largest entry."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(3, 5, 2, 4)), jnp.float32) for _ in range(4)]
    slope = arrays.pop()

    def loss(attention, *arrays):
        return jnp.sum(slope * attention(*arrays))

    def hand(*arrays):
        form = Form.dropping(kernel, RATE)
        return attend_dropping(*arrays, dropout=(KEYS, form), causal=causal)

    def formula(query, key, value):
        eye = jnp.broadcast_to(jnp.eye(5)[None, :, None], (3, 5, 2, 5))
        drop = dict(dropout=(KEYS, Form(rate=RATE)), causal=causal)
        factor = attend_dropping(jnp.zeros_like(query), jnp.zeros_like(key), eye, **drop)
        seen = jnp.tril(jnp.ones((5, 5), bool)) if causal else jnp.ones((5, 5), bool)
        # Equal scores have equal weights, so that what is left of them are the draws.
        kept = jnp.swapaxes(factor, 1, 2) > 0
        scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2.0, -jnp.inf)
        weights = jnp.where(kept, jax.nn.softmax(scores) / (1 - RATE), 0.0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    found = jax.grad(lambda *a: loss(hand, *a), (0, 1, 2))(*arrays)
    expected = jax.grad(lambda *a: loss(formula, *a), (0, 1, 2))(*arrays)
    digits = 2.0**-6 if kernel == "rounded" else 1e-5
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=digits * np.abs(b).max())


@pytest.mark.parametrize("kernel, kept", [("plain", True), ("splash", False), ("cudnn", False)])
def test_weights_are_kept_where_no_kernel_is_asked_for(kernel, kept):
    arrays = [jnp.ones((3, 5, 2, 4)) for _ in range(3)]
    dropout = KEYS, Form.dropping(kernel, RATE)
    attention = lambda *a: attend_dropping(*a, dropout=dropout)  # noqa: E731
    _, pull = jax.vjp(attention, *arrays)
    floats = [x for x in jax.tree.leaves(pull) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert any(x.shape == (3, 2, 5, 5) for x in floats) == kept


def features(network, params, keys, index=None):
    denoiser = network.bind(params, {}, keys)
    if index is None:
        return denoiser.features(Z, T)
    return denoiser.accelerator.features_at(Z, T, index)


def test_nothing_is_dropped_without_keys():
    """In evaluation, sampling and the judgement of the moving average no keys are given."""
    plain, params = built()
    dropping, _ = built(**RATES)
    np.testing.assert_array_equal(features(dropping, params, None), features(plain, params, None))
    np.testing.assert_array_equal(features(plain, params, KEYS), features(plain, params, None))
    assert np.abs(features(dropping, params, KEYS) - features(plain, params, None)).max() > 0.1


@pytest.mark.parametrize("rate", RATES)
def test_each_place_has_its_own_rate(rate):
    network, params = built(**{rate: RATE})
    assert np.abs(features(network, params, KEYS) - features(network, params, None)).max() > 0.01


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.cases(1)
def test_the_positions_that_are_asked_for_change_no_draw(shared, scan):
    network, params = built(**RATES, dropout_shared=shared, scan_blocks=scan)
    index = jnp.asarray([[5, 0], [2, 3], [1, 1]])
    whole = features(network, params, KEYS)
    part = features(network, params, KEYS, index)
    np.testing.assert_allclose(part, jnp.take_along_axis(whole, index[..., None], 1), atol=1e-5)


def test_a_sequence_has_its_own_draws_and_keeps_them_among_others():
    """So neither mesh nor microbatches change anything."""
    network, params = built(**RATES)
    same = jnp.broadcast_to(Z[:1], Z.shape), jnp.broadcast_to(T[:1], T.shape)
    found = network.bind(params, {}, KEYS).features(*same)
    assert (np.abs(found[0] - found[1]) > 1e-3).any()
    alone = network.bind(params, {}, KEYS[1:2]).features(Z[:1], T[:1])
    np.testing.assert_allclose(alone[0], found[1], atol=1e-5)


def recorded(monkeypatch, run) -> list:
    """Returns the keys of all draws that a run makes."""
    found, real = [], dropout.kept

    def kept(keys, rate, shape):
        found.append(np.asarray(jax.random.key_data(keys)))
        return real(keys, rate, shape)

    for module in ("layers", "trunk"):
        monkeypatch.setattr(f"md4_jax.networks.{module}.kept", kept)
    run()
    return found


def test_no_two_places_share_their_draws_with_each_other_or_with_the_noise(monkeypatch):
    """Two branches of two layers and the embedding, all with keys other than the step's own."""
    network, params = built(**RATES, scan_blocks=False)
    found = recorded(monkeypatch, lambda: features(network, params, KEYS))
    assert len(found) == 5
    every = np.concatenate([*found, np.asarray(jax.random.key_data(KEYS))])
    assert len({tuple(row) for row in every}) == len(every)
    step = {tuple(np.asarray(jax.random.key_data(dropout.folded(KEYS, n)))[0]) for n in range(9)}
    assert not step & {tuple(row) for row in every}


def test_a_shared_draw_drops_a_feature_at_every_position():
    """With zero attention the first branch shows it: only whole columns of it are dropped."""
    o = Transformer(**SIZES, dropout=0.5, dropout_shared=True)
    y = np.asarray(dropped(o, jnp.ones((3, 6, 16)), KEYS, 1, (3, 6, 16), lambda x: x))
    assert set(np.unique(y)) == {0.0, 2.0} and (y == y[:, :1]).all()
    assert (y[0] != y[1]).any()


def test_block_diffusion_drops_in_branches_and_refuses_to_drop_weights():
    plain, params = built(time_conditioning=False)
    times, clean = jnp.zeros((3, 3)), jnp.zeros_like(Z)

    def run(network, keys):
        return network.bind(params, {}, keys).blocks.features(Z, times, clean, 2)

    network, _ = built(time_conditioning=False, dropout=RATE)
    assert np.abs(run(network, KEYS) - run(plain, None)).max() > 0.01
    np.testing.assert_array_equal(run(network, None), run(plain, None))
    network, _ = built(time_conditioning=False, attention_dropout=RATE)
    with pytest.raises(UserError, match="network.attention_dropout=0.3 must be 0 in block"):
        run(network, KEYS)


@pytest.mark.parametrize("key", [*RATES, "label_dropout"])
@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_lies_in_the_half_open_unit_interval(key, rate):
    with pytest.raises(UserError, match=rf"network.{key} must lie in \[0, 1\), not {rate}"):
        Transformer(**SIZES, **{key: rate})
