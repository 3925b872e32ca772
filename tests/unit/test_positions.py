"""Learned positions: a vector for each place of a text, in place of rotary ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import CONVOLVED, SIZES, bound, built

from md4_jax.networks.dit import DiT
from md4_jax.networks.positions import places
from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import Mixture, UserError

V, L, P = 5, 12, 3
RNG = np.random.default_rng(8)
X = jnp.asarray(RNG.integers(0, V, (2, L)))
Z = jnp.where(RNG.random((2, L)) < 0.5, V, X)
T = jnp.zeros(2)
LEARNED = dict(positions=L, out_bias=True, qkv_bias=True)
SEGMENTS = jnp.array([[0] * 4 + [1] * 5 + [-1] * 3, [3] * 12])
KINDS = {"scanned": {}, "a list": dict(scan_blocks=False), "shifted": dict(shifted=True)}


def test_places_begin_anew_in_each_document():
    assert places(4).tolist() == [0, 1, 2, 3]
    assert places(L, SEGMENTS).tolist() == [[*range(4), *range(5), *range(3)], [*range(L)]]
    # A document that has the number of the last position is not taken for its continuation.
    assert places(3, jnp.array([[1, 0, 1]])).tolist() == [[0, 0, 0]]


def test_a_place_is_added_to_the_token_and_nothing_is_turned():
    """Without its vectors the network cannot tell the order of a text."""
    network, params = built(**LEARNED)
    assert params["positions"].shape == (L, 16)
    assert params["blocks"]["attention"]["out"]["bias"].shape == (2, 16)
    order = RNG.permutation(L)
    for scale, same in ((0.0, True), (1.0, False)):
        denoiser = network.bind(params | {"positions": scale * params["positions"]})
        h, turned = denoiser.features(Z, T), denoiser.features(Z[:, order], T)
        assert np.allclose(h[:, order], turned, atol=1e-5) == same
    # A token and its place are one sum: the vector of place 0 may lie in that of the token.
    vectors, first = params["embedding"], params["positions"][0]
    moved = params | {"embedding": vectors + first, "positions": params["positions"] - first}
    one, other = (network.bind(p).features(Z, T) for p in (params, moved))
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.cases(1)
def test_packed_documents_are_documents_alone(options):
    packed = bound(SEGMENTS, **LEARNED | options).features(Z, T)
    alone = bound(**LEARNED | options)
    for begin, end in ((0, 4), (4, 9)):
        h = alone.features(Z[:1, begin:end], T[:1])
        np.testing.assert_allclose(packed[:1, begin:end], h, atol=1e-5)
    np.testing.assert_allclose(packed[1:], alone.features(Z[1:], T[1:]), atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.cases(1)
def test_block_by_block_with_a_memory_is_the_pass_over_both_halves(options):
    denoiser = bound(**LEARNED | options)
    t = jnp.zeros((2, L // P))
    whole, past = denoiser.blocks.features(Z, t, X, P), denoiser.blocks.empty_cache(2, L)
    append = jax.jit(denoiser.blocks.append_block)
    for b in range(L // P):
        part = slice(b * P, (b + 1) * P)
        h, _ = append(Z[:, part], T, past)
        np.testing.assert_allclose(h, whole[:, part], atol=2e-5)
        _, past = append(X[:, part], T, past)
    first = bound(**LEARNED | options).features(Z[:, :P], T)  # the first block sees itself alone
    np.testing.assert_allclose(whole[:, :P], first, atol=2e-5)


def test_a_block_of_documents_has_their_places():
    """Each half of a document of its own, in both halves of the pass."""
    t = jnp.zeros((2, L // P))
    packed = bound(SEGMENTS, **LEARNED).blocks.features(Z, t, X, P)
    moved = SEGMENTS.at[:, :].set(jnp.array([[0] * 6 + [1] * 6] * 2))
    alone, halves = bound(**LEARNED).blocks.features, bound(moved, **LEARNED).blocks.features
    second = alone(Z[:, 6:], t[:, :2], X[:, 6:], P)
    np.testing.assert_allclose(halves(Z, t, X, P)[:, 6:], second, atol=2e-5)
    assert np.abs(packed - halves(Z, t, X, P)).max() > 0.1


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one text", "documents"])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.cases(1)
def test_a_window_among_its_own_text_has_the_features_of_the_whole(options, segments):
    denoiser = bound(segments, **LEARNED | options)
    whole = denoiser.features(Z, T)
    h, cache = denoiser.blocks.around(Z, T, 0, None)
    np.testing.assert_allclose(h, whole, atol=1e-5)
    for begin in (0, 5, 9):
        part = slice(begin, begin + P)
        h, _ = denoiser.blocks.around(Z[:, part], T, begin, cache)
        np.testing.assert_allclose(h, whole[:, part], atol=1e-5)


def test_some_positions_mixtures_and_texts_that_grow():
    denoiser = bound(**LEARNED)
    index = jnp.array([[1, 7, 11], [0, 5, 6]])
    whole = denoiser.features(Z, T)
    some = denoiser.accelerator.features_at(Z, T, index)
    np.testing.assert_allclose(
        some, jnp.take_along_axis(whole, index[..., None], axis=1), atol=1e-5
    )
    mixture = Mixture(jnp.stack([Z, X], axis=-1), jnp.array([1.0, 0.0]) * jnp.ones((2, L, 1)))
    np.testing.assert_allclose(denoiser.features(mixture, T), whole, atol=1e-5)
    growing = bound(**LEARNED | dict(gaps=True))
    short = jnp.where(jnp.arange(L - 1) < 5, Z[:, :-1], V + 1)
    assert growing.gaps(short, T)[1].shape == (2, L)
    with pytest.raises(UserError, match="reads 13 tokens at once, but has .* network.positions=12"):
        growing.gaps(Z, T)


@pytest.mark.parametrize("causal", [True, False])
def test_longer_texts_are_refused(causal):
    denoiser, z = bound(**LEARNED | dict(causal=causal)), jnp.zeros((2, L + 1), jnp.int32)
    said = "reads 13 tokens at once, but has .* network.positions=12"
    with pytest.raises(UserError, match=said):
        denoiser.features(z, T)
    with pytest.raises(UserError, match=said):
        denoiser.features(Mixture(z[..., None], jnp.ones((2, L + 1, 1))), T)
    with pytest.raises(UserError, match=said):
        denoiser.blocks.empty_cache(2, L + 1)
    if not causal:
        with pytest.raises(UserError, match=said):
            denoiser.blocks.features(z, jnp.zeros((2, L + 1)), z, 1)


def test_options_that_do_not_go_together_are_refused():
    with pytest.raises(UserError, match="network.positions must not be negative, not -1"):
        Transformer(**SIZES, positions=-1)
    shape = {key: x for key, x in CONVOLVED.items() if key == "shape"}
    with pytest.raises(
        UserError, match="network.positions=4 is only for texts: with network.name='dit'"
    ):
        DiT(**SIZES | shape | dict(patch=1, positions=4))


def test_every_vector_learns():
    network, params = built(**LEARNED)

    def loss(params):
        logits = jax.nn.log_softmax(network.bind(params)(Z, T))
        return -jnp.mean(jnp.take_along_axis(logits, X[..., None], axis=-1))

    slope = jax.jit(jax.grad(loss))(params)["positions"]
    assert slope.shape == (L, 16) and (np.abs(slope).max(axis=1) > 0).all()
