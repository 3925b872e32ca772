"""Networks whose logits at a position are made of the features of the position before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import random_parameters

from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import UserError

SIZES = dict(vocab_size=7, size=16, depth=2, heads=2, time_conditioning=False)
# Two documents and padding.
SEGMENTS = jnp.array([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
Z = jnp.array([[1, 7, 3, 7, 5, 0], [7, 2, 7, 7, 6, 1]])
T = jnp.zeros(2)


def bound(segments=None, **options):
    """The denoiser with random parameters, the same for all options."""
    network = Transformer(**SIZES, **options).build()
    return network.bind(
        random_parameters(network, 1.0), {} if segments is None else {"segments": segments}
    )


@pytest.mark.parametrize("scan", [True, False])
def test_features_move_to_the_right_by_one(scan):
    plain, found = (bound(scan_blocks=scan, shifted=x).features(Z, T) for x in (False, True))
    assert np.array_equal(found[:, 1:], plain[:, :-1])
    assert np.array_equal(found[:, 0], plain[:, 0])


def test_a_document_begins_with_its_own_features():
    """Those of the document before would tell nothing of it."""
    plain, found = (bound(SEGMENTS, shifted=x).features(Z, T) for x in (False, True))
    source = np.array([[0, 0, 1, 3, 3, 5], [0, 0, 1, 2, 3, 4]])
    assert np.array_equal(found, np.take_along_axis(plain, source[..., None], axis=1))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("segments", [None, SEGMENTS])
@pytest.mark.cases(2)
def test_some_positions_have_the_same_features_as_among_all(segments, scan):
    denoiser = bound(segments, shifted=True, scan_blocks=scan)
    index = jnp.array([[4, 0, 3, 2], [5, 1, 0, 4]])
    found, whole = denoiser.features_at(Z, T, index), denoiser.features(Z, T)
    expected = np.take_along_axis(np.asarray(whole), np.asarray(index)[..., None], axis=1)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("key, value", [("causal", "False"), ("tables", "0")])
def test_what_cannot_be_shifted(key, value):
    with pytest.raises(UserError, match=f"shifted=True needs network.{key}={value}: "):
        Transformer(**SIZES, shifted=True, **{key: 4096 if key == "tables" else True})


def test_heads_may_be_wider_than_their_part_of_the_network():
    """Head size 24 in a network of 16 features with 2 heads."""
    network = Transformer(**SIZES, head_dim=24, kv_heads=1, scan_blocks=False).build()
    params = random_parameters(network)
    shapes = jax.tree.map(jnp.shape, params["blocks_0"]["attention"])
    assert {name: tuple(kernel["kernel"]) for name, kernel in shapes.items()} == {
        "query": (16, 48), "key": (16, 24), "value": (16, 24), "out": (48, 16)
    }  # fmt: skip
    assert network.bind(params).features(Z, T).shape == (2, 6, 16)
    with pytest.raises(UserError, match="network.head_dim=5 must be even"):
        Transformer(**SIZES, head_dim=5)
