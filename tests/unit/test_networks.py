"""The networks: one function however it is compiled, time, segments, dtypes, positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.networks import NETWORKS
from md4_jax.networks.attention import attend, rotate
from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import UserError

SIZES = dict(vocab_size=5, size=16, depth=2, heads=2, hidden=24)
Z = jnp.asarray([[0, 5, 2, 3, 5, 1], [4, 4, 5, 5, 0, 2], [5, 5, 5, 5, 5, 5]])
T = jnp.asarray([0.1, 0.6, 1.0])
every_network = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)


def perturbed(params, scale=0.3):
    """Noise on every leaf: at initialisation zeros hide most of the network."""
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    noisy = [np.asarray(x + scale * rng.normal(size=x.shape), x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, noisy)


@functools.cache
def built(make=Transformer, **options):
    """(network, perturbed parameters)."""
    network = make(**(SIZES | options)).build()
    return network, perturbed(jax.jit(network.init)(jax.random.key(0)))


def logits(network, params, z=Z, t=T, **context):
    return jax.jit(lambda p, z, t, context: network.bind(p)(z, t, **context))(params, z, t, context)


def unrolled(params, depth=2):
    """The parameters of scanned blocks as those of unrolled ones."""
    rest = {name: value for name, value in params.items() if name != "blocks"}
    blocks = {f"blocks_{i}": jax.tree.map(lambda x: x[i], params["blocks"]) for i in range(depth)}  # noqa: B023
    return rest | blocks


@every_network
def test_initial_logits_are_zero_and_one_for_each_clean_symbol(make):
    """65 symbols are stored as 128 rows: padded rows and the mask must not come out."""
    network = make(**(SIZES | dict(vocab_size=65))).build()
    params = jax.jit(network.init)(jax.random.key(0))
    out = logits(network, params)
    assert out.shape == (3, 6, 65) and out.dtype == jnp.float32
    np.testing.assert_array_equal(out, 0.0)
    assert logits(network, perturbed(params)).shape == (3, 6, 65)


def two_parts(network, params):
    """Features of everything, logits of one position."""
    denoiser = network.bind(params)
    h = denoiser.features(Z, T)
    return h, denoiser.unembed(h[:, 2])


@every_network
def test_calling_is_features_and_then_unembed(make):
    network, params = built(make)
    h, part = jax.jit(two_parts, static_argnums=0)(network, params)
    assert h.shape == (3, 6, 16)
    np.testing.assert_allclose(part, logits(network, params)[:, 2], atol=1e-5)


@every_network
def test_different_keys_give_different_parameters_and_rows_stay_apart(make):
    network, params = built(make)
    init = jax.jit(network.init)
    one, two = (init(jax.random.key(seed)) for seed in (0, 1))
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True))
    whole = logits(network, params)
    np.testing.assert_allclose(logits(network, params, Z[1:2], T[1:2])[0], whole[1], atol=1e-5)


@every_network
def test_every_position_sees_every_other(make):
    network, params = built(make)
    before = logits(network, params)
    for position in (0, 5):
        after = logits(network, params, Z.at[0, position].set(4))
        assert (np.abs(after - before)[0].max(axis=1) > 1e-4).all()


@every_network
def test_time_is_used_if_and_only_if_the_network_says_so(make):
    conditioned, params = built(make)
    assert not conditioned.time_free
    difference = np.abs(logits(conditioned, params) - logits(conditioned, params, t=T + 0.01))
    assert (difference.max(axis=(1, 2)) > 1e-3).all()
    free, params = built(make, time_conditioning=False)
    assert free.time_free
    np.testing.assert_array_equal(logits(free, params), logits(free, params, t=1.0 - T))


@pytest.mark.parametrize(
    "options", [{}, dict(time_conditioning=False, qk_norm=True, local_width=5)]
)
def test_scanned_and_unrolled_blocks_compute_the_same(options):
    scanned, params = built(**options)
    loop, _ = built(**options, scan_blocks=False)
    assert params["blocks"]["attention"]["query"]["kernel"].shape == (2, 16, 16)
    np.testing.assert_allclose(
        logits(scanned, params), logits(loop, unrolled(params)), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("scan_blocks", [pytest.param(True, marks=pytest.mark.slow), False])
def test_recomputed_blocks_have_the_same_gradients(scan_blocks):
    plain, params = built(scan_blocks=scan_blocks)
    remat, _ = built(scan_blocks=scan_blocks, remat=True)

    def gradient(network):
        return jax.jit(jax.grad(lambda p: jnp.mean(jnp.sin(network.bind(p)(Z, T)))))(params)

    def close(a, b):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4)

    expected = gradient(plain)
    jax.tree.map(close, gradient(remat), expected)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(expected))


@every_network
@pytest.mark.parametrize("options", [{}, dict(local_width=3, time_conditioning=False)])
def test_tokens_of_another_segment_have_no_influence(make, options):
    network, params = built(make, **options)
    segments = jnp.asarray([[0, 0, 0, 1, 1, 1]] * 3)
    before = logits(network, params, segments=segments)
    after = logits(network, params, Z.at[:, 4].set(3), segments=segments)
    np.testing.assert_allclose(after[:, :3], before[:, :3], atol=1e-6)
    assert (np.abs(after - before)[:, 3:].max(axis=(1, 2)) > 1e-4).all()
    same = logits(network, params, segments=jnp.zeros_like(segments))
    np.testing.assert_allclose(same, logits(network, params), atol=1e-5)


@every_network
def test_bfloat16_computes_narrow_and_keeps_wide_parameters_and_logits(make):
    narrow, params = built(make, dtype="bfloat16")
    shapes = jax.eval_shape(narrow.init, jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    wide, _ = built(make)
    out, reference = logits(narrow, params), logits(wide, params)
    assert out.dtype == jnp.float32
    error = np.abs(out - reference).max() / np.abs(reference).max()
    assert 1e-6 < error < 0.1
    features, _ = jax.jit(two_parts, static_argnums=0)(narrow, params)
    assert features.dtype == jnp.bfloat16


def test_rotary_products_depend_on_the_distance_alone():
    """Equal queries and keys everywhere: q_i . k_j is a function of i - j, and not constant."""
    rng = np.random.default_rng(1)
    query, key = (
        jnp.broadcast_to(rng.normal(size=8).astype(np.float32), (1, 10, 1, 8)) for _ in range(2)
    )
    product = np.einsum("bihd,bjhd->ij", rotate(query), rotate(key))
    for distance in range(-9, 10):
        np.testing.assert_allclose(np.ptp(np.diagonal(product, distance)), 0.0, atol=1e-5)
    assert np.ptp(product[0]) > 0.1
    norms = np.linalg.norm(rotate(query), axis=-1)
    np.testing.assert_allclose(norms, np.linalg.norm(query, axis=-1), rtol=1e-5)


def test_attention_is_the_softmax_average_of_the_values():
    rng = np.random.default_rng(2)
    query, key, value = (rng.normal(size=(1, 4, 2, 3)).astype(np.float32) for _ in range(3))
    out = attend(*map(jnp.asarray, (query, key, value)))
    for head in range(2):
        score = np.exp(query[0, :, head] @ key[0, :, head].T / np.sqrt(3.0))
        expected = score / score.sum(axis=1, keepdims=True) @ value[0, :, head]
        np.testing.assert_allclose(out[0, :, head], expected, atol=1e-5)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(size=20, heads=4), "network.size=20 must be a multiple of twice network.heads=4"),
        (dict(dtype="float16"), "float32 or bfloat16, not 'float16'"),
    ],
)
def test_impossible_sizes_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Transformer(**(SIZES | options))


@every_network
@pytest.mark.parametrize("time_conditioning", [True, False])
def test_every_parameter_learns_from_the_true_initialisation(make, time_conditioning):
    """Zeros that multiply zeros would never move: after four plain steps every array has."""
    options = dict(time_conditioning=time_conditioning, qk_norm=True, local_width=3)
    network = make(**(SIZES | options | dict(scan_blocks=True))).build()
    start = jax.jit(network.init)(jax.random.key(1))
    targets = jax.random.randint(jax.random.key(2), Z.shape, 0, 5)

    def loss(params):
        logits = jax.nn.log_softmax(network.bind(params)(Z, T))
        return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], axis=-1))

    step = jax.jit(lambda p: jax.tree.map(lambda x, g: x - 0.5 * g, p, jax.grad(loss)(p)))
    params = start
    for _ in range(4):
        params = step(params)
    still = [
        jax.tree_util.keystr(path)
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(start), jax.tree.leaves(params), strict=True
        )
        if (old == new).all()
    ]
    assert still == []
