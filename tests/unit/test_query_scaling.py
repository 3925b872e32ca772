"""Queries that are scaled by their position, and clean tokens that see only those before them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import bound, built

from md4_jax.networks.modernbert import ModernBert
from md4_jax.networks.partition import Partition
from md4_jax.networks.rotary import scaled_queries
from md4_jax.protocols import UserError

V, L, P = 5, 12, 3
RNG = np.random.default_rng(6)
X = jnp.asarray(RNG.integers(0, V, (2, L)))
Z = jnp.where(RNG.random((2, L)) < 0.5, V, X)
T, GROUPS = jnp.zeros(2), jnp.zeros((2, L // P))
SEGMENTS = jnp.array([[0] * 4 + [1] * 5 + [-1] * 3, [0] * 12])
SCALED = dict(query_scaling=(0.5, 2.0))
MODELS = {
    "scanned": SCALED, "a list": SCALED | dict(scan_blocks=False), "rotary": dict(depth=1),
    "context": SCALED | dict(causal_context=True), "shifted": SCALED | dict(shifted=True),
    "both": SCALED | dict(causal_context=True, shifted=True),
}  # fmt: skip


def test_the_factor_grows_by_steps():
    """1 + 0.5 log(1 + floor(p / 2)), to which a position contributes by whole lengths."""
    query = jnp.ones((1, 6, 1, 1))
    expected = [1.0, 1.0, 1.3465736, 1.3465736, 1.5493061, 1.5493061]
    np.testing.assert_allclose(
        scaled_queries(query, jnp.arange(6), (0.5, 2.0)).ravel(), expected, rtol=1e-6
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.cases(2)
def test_block_by_block_with_a_cache_is_the_whole_pass(options):
    denoiser = bound(**options)
    whole, cache = denoiser.blocks.features(Z, GROUPS, X, P), denoiser.blocks.empty_cache(2, L)
    append, read = jax.jit(denoiser.blocks.append_block), jax.jit(denoiser.blocks.read)
    for begin in range(0, L, P):
        part = slice(begin, begin + P)
        found = append(Z[:, part], T, cache)[0]
        np.testing.assert_allclose(found, whole[:, part], atol=3e-5)
        cache = read(X[:, part], T, cache)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["context", "both", "positions"])
@pytest.mark.cases(1)
def test_a_text_begins_anywhere(name):
    """Two places before a text, which nothing sees, change nothing of a block after four tokens."""
    options = MODELS.get(name, dict(causal_context=True, positions=L))
    blocks = bound(**options).blocks
    cache = blocks.empty_cache(2, L)
    for place in range(4):
        cache = blocks.read(X[:, place : place + 1], T, cache)
    expected = blocks.append_block(Z[:, 4:7], T, cache)[0]
    cache = blocks.beginning(blocks.empty_cache(2, L), jnp.asarray([2, 0]))
    padded = jnp.pad(X, ((0, 0), (2, 0)))
    for place in (0, P):
        cache = blocks.read(padded[:, place : place + P], T, cache)
    found = blocks.append_block(Z[:, 4:7], T, cache)[0]
    np.testing.assert_allclose(found[0], expected[0], atol=3e-5)
    assert np.abs(found[1] - expected[1]).max() > 1e-3  # this text begins at once


@pytest.mark.campaign
def test_a_document_begins_with_an_unscaled_query():
    """In a text that holds several, it has the features that it has alone."""
    packed, alone = bound(SEGMENTS, **SCALED), bound(**SCALED)
    document = slice(4, 9)
    expected = alone.features(Z[:1, document], T[:1])
    found = packed.features(Z, T)[:1, document]
    np.testing.assert_allclose(found, expected, atol=3e-5)
    index = jnp.array([[8, 5], [0, 7]])
    some = packed.features_at(Z, T, index)
    np.testing.assert_allclose(some[0], expected[0, [4, 1]], atol=3e-5)
    # The same of its noisy blocks after clean ones: blocks of one, so that none holds two.
    clean = packed.blocks.features(Z, jnp.zeros((2, L)), X, 1)[:1, document]
    found = alone.blocks.features(Z[:1, document], jnp.zeros((1, 5)), X[:1, document], 1)
    np.testing.assert_allclose(clean, found, atol=3e-5)


def test_the_scale_counts_tokens_that_are_no_longer_seen():
    """Of nine tokens the last six are seen, by a block whose positions are 9, 10 and 11."""

    def last(x, **options):
        blocks = bound(depth=1, **options).blocks
        cache = blocks.empty_cache(2, 6)
        for begin in range(0, x.shape[1] - P, P):
            cache = blocks.read(x[:, begin : begin + P], T, cache)
        return blocks.append_block(x[:, -P:], T, cache)[0]

    all_twelve = last(X, query_scaling=(0.5, 3.0))
    # Without the first three tokens they are 6, 7 and 8, of the second step and not of the third.
    steps = np.log(4) / np.log(3)
    same = last(X[:, P:], query_scaling=(0.5 * steps, 3.0))
    np.testing.assert_allclose(all_twelve, same, atol=3e-5)
    assert np.abs(all_twelve - last(X[:, P:], query_scaling=(0.5, 3.0))).max() > 1e-3


def test_clean_tokens_see_nothing_to_their_right():
    """One clean token changes: blocks after its own change, and of these those after it alone.

    In a network of two layers a later token of its block carries the change on; what an earlier
    one of its block holds stays as it was, which a cache of one layer less shows.
    """
    blocks = bound(causal_context=True).blocks
    other = X.at[:, 4].set((X[:, 4] + 1) % V)  # the middle of the second block
    one, two = (blocks.features(Z, GROUPS, x, P) for x in (X, other))
    moved = np.abs(one - two).max(axis=(0, 2))
    assert (moved[:6] < 1e-6).all() and (moved[6:] > 1e-4).all()
    caches = []
    for x in (X, other):
        cache = blocks.empty_cache(2, 6)
        for begin in (0, 3):
            cache = blocks.read(x[:, begin : begin + P], T, cache)
        caches.append(cache[0].keys[1])
    moved = np.abs(caches[0] - caches[1]).max(axis=(0, 2, 3))
    assert (moved[:4] < 1e-6).all() and (moved[4:] > 1e-4).all()


@pytest.mark.parametrize(
    "make, key, value",
    [
        (Partition, "query_scaling", (0.5, 2.0)),
        (Partition, "causal_context", True),
        (ModernBert, "causal_context", True),
    ],
)
def test_networks_without_them_refuse_them(make, key, value):
    with pytest.raises(UserError, match=f"needs network.{key}="):
        built(make, **{key: value})
