"""The networks: one function however it is compiled, time, segments, dtypes, positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from tiny_networks import OF_TOKENS, SIZES, SIZES_OF, T, Z, built, logits, perturbed

from configs import owt, owt_medium, text8
from md4_jax.networks.attention import attend
from md4_jax.networks.condition import TIME_EMBEDDINGS, TimeEmbedding
from md4_jax.networks.diffusion_gemma import DiffusionGemma
from md4_jax.networks.encoder_decoder import EncoderDecoder
from md4_jax.networks.esm import Esm
from md4_jax.networks.layers import LocalMixing
from md4_jax.networks.lfm2 import Lfm2
from md4_jax.networks.maskgit import MaskGit
from md4_jax.networks.modernbert import ModernBert
from md4_jax.networks.ordinal import log_masses
from md4_jax.networks.partition import Partition
from md4_jax.networks.rotary import Rope, rotate
from md4_jax.networks.transformer import Transformer
from md4_jax.options import MeshOptions
from md4_jax.protocols import Conditioned, UserError
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.sharding import AXES, shardings_of

MARKS = {"unet": pytest.mark.slow, "uvit": pytest.mark.campaign}
every_network = pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=MARKS.get(name, [])) for name, make in OF_TOKENS.items()],
)


def unrolled(params, depth=2):
    """The parameters of scanned blocks as those of unrolled ones."""
    rest = {name: value for name, value in params.items() if name != "blocks"}
    blocks = {f"blocks_{i}": jax.tree.map(lambda x: x[i], params["blocks"]) for i in range(depth)}  # noqa: B023
    return rest | blocks


@pytest.mark.quick(1)
@every_network
@pytest.mark.cases(1)
def test_initial_logits_are_zero_and_one_for_each_clean_symbol(make):
    """65 symbols are stored as 128 rows: padded rows and the mask must not come out."""
    network = make(**(SIZES_OF[make] | dict(vocab_size=65))).build()
    params = jax.jit(network.init)(jax.random.key(0))
    out = logits(network, params)
    assert out.shape == (3, 6, 65) and out.dtype == jnp.float32
    if make not in (DiffusionGemma, MaskGit):  # whose head is their table of symbols
        np.testing.assert_array_equal(out, 0.0)
    assert logits(network, perturbed(params)).shape == (3, 6, 65)


def two_parts(network, params):
    """Features of everything, logits of one position."""
    denoiser = network.bind(params)
    h = denoiser.features(Z, T)
    return h, denoiser.unembed(h[:, 2])


@every_network
@pytest.mark.cases(2)
def test_calling_is_features_and_then_unembed(make):
    network, params = built(make)
    h, part = jax.jit(two_parts, static_argnums=0)(network, params)
    assert h.shape[:2] == (3, 6)
    np.testing.assert_allclose(part, logits(network, params)[:, 2], atol=1e-3)


@every_network
@pytest.mark.cases(2)
def test_different_keys_give_different_parameters_and_rows_stay_apart(make):
    network, params = built(make)
    init = jax.jit(network.init)
    one, two = (init(jax.random.key(seed)) for seed in (0, 1))
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True))
    whole = logits(network, params)
    np.testing.assert_allclose(logits(network, params, Z[1:2], T[1:2])[0], whole[1], atol=1e-3)


@every_network
@pytest.mark.cases(4)
def test_every_position_sees_every_other(make):
    network, params = built(make)
    before = logits(network, params)
    for position in (0, 5):
        after = logits(network, params, Z.at[0, position].set(4))
        assert (np.abs(after - before)[0].max(axis=1) > 1e-4).all()


@every_network
@pytest.mark.cases(3)
def test_time_is_used_if_and_only_if_the_network_says_so(make):
    if make in (Partition, ModernBert, Lfm2, Esm, MaskGit, DiffusionGemma, EncoderDecoder):
        pytest.skip("these networks are never told the time, which their own tests check")
    conditioned, params = built(make)
    assert not conditioned.time_free
    difference = np.abs(logits(conditioned, params) - logits(conditioned, params, t=T + 0.01))
    assert (difference.max(axis=(1, 2)) > 1e-3).all()
    free, params = built(make, time_conditioning=False)
    assert free.time_free
    np.testing.assert_array_equal(logits(free, params), logits(free, params, t=1.0 - T))


def test_the_waves_of_time_are_those_of_thousandths():
    """The fastest of them is back after 2 pi thousandths, and its opposite after half of that;
    the slowest is 10,000 times slower."""
    t = jnp.asarray([0.1, 0.1 + 2e-3 * np.pi, 0.1 + 1e-3 * np.pi, 0.9])[:, None]
    embedding, one = TimeEmbedding(8, TIME_EMBEDDINGS["plain"], jnp.float32, "lecun"), np.eye(8)
    shapes = embedding.init(jax.random.key(0), t)["params"]
    zero = jax.tree.map(jnp.zeros_like, shapes)

    def seen(wave):
        """silu(wave), the wave brought to the first place and nothing else."""
        params = zero | {
            "time_in": zero["time_in"] | {"kernel": jnp.asarray(np.outer(one[wave], one[0]))},
            "time_out": zero["time_out"] | {"kernel": jnp.asarray(one)},
        }
        return np.asarray(embedding.apply({"params": params}, t))[:, 0, 0]

    fast, slow = seen(0), seen(3)
    np.testing.assert_allclose(fast[1], fast[0], atol=1e-4)
    # silu(x) - silu(-x) = x, and sin(100) = -0.50636564.
    np.testing.assert_allclose(fast[0] - fast[2], -0.50636564, atol=1e-4)
    assert slow[0] < slow[1] < slow[3] < 0.1


@pytest.mark.parametrize("vocab", [127, 128])
def test_the_mask_has_an_embedding_of_its_own(vocab):
    """Also where the vocabulary fills up its rows."""
    network, params = built(vocab_size=vocab, depth=1)
    z = jnp.asarray([[0, vocab], [0, vocab - 1]])
    h = np.asarray(network.bind(params).features(z, T[:2] * 0.0))
    assert np.abs(h[0] - h[1]).max() > 0.1


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


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("scan_blocks", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.cases(1)
def test_recomputed_blocks_have_the_same_gradients(scan_blocks, remat):
    plain, params = built(scan_blocks=scan_blocks)
    remat, _ = built(scan_blocks=scan_blocks, remat=remat)

    def gradient(network):
        return jax.jit(jax.grad(lambda p: jnp.mean(jnp.sin(network.bind(p)(Z, T)))))(params)

    def close(a, b):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4)

    expected = gradient(plain)
    jax.tree.map(close, gradient(remat), expected)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(expected))


@pytest.mark.parametrize("options", [{}, dict(local_width=3, time_conditioning=False)])
def test_tokens_of_another_segment_have_no_influence(options):
    network, params = built(**options)
    segments = jnp.asarray([[0, 0, 0, 1, 1, 1]] * 3)
    before = logits(network, params, segments=segments)
    after = logits(network, params, Z.at[:, 4].set(3), segments=segments)
    np.testing.assert_allclose(after[:, :3], before[:, :3], atol=1e-6)
    assert (np.abs(after - before)[:, 3:].max(axis=(1, 2)) > 1e-4).all()
    same = logits(network, params, segments=jnp.zeros_like(segments))
    np.testing.assert_allclose(same, logits(network, params), atol=1e-5)


@pytest.mark.quick(1)
@every_network
@pytest.mark.cases(2)
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


# Of Llama-3.2-1B, by transformers 4.57.6: base 500,000, heads of 64 features.
LLAMA_3 = [
    1.0, 0.663601, 0.440367, 0.292228, 0.193923, 0.128687, 0.0853971, 0.0566696, 0.037606,
    0.0249554, 0.0165604, 0.0109895, 0.00729267, 0.00483942, 0.00321145, 0.00129055, 0.000429557,
    9.70829e-05, 1.94616e-05, 1.29148e-05, 8.57026e-06, 5.68723e-06, 3.77405e-06, 2.50447e-06,
    1.66197e-06, 1.10288e-06, 7.31875e-07, 4.85673e-07, 3.22293e-07, 2.13874e-07, 1.41927e-07,
    9.41831e-08,
]  # fmt: skip


def test_frequencies_of_llama_3():
    found = Rope(5e5, (32.0, 1.0, 4.0, 8192.0)).frequency(64)
    np.testing.assert_allclose(found, LLAMA_3, rtol=5e-6)  # six digits


# Every fourth frequency by `_compute_yarn_parameters` of transformers 5.24.0, with Ministral 3's
# sizes, and all of a smaller network; each with its attention factor.
YARN = {
    (1e6, (16.0, 1.0, 32.0, 16384.0), 128, 4): [
        1.0, 0.421697, 0.177828, 0.0749894, 0.0316228, 0.0133352, 0.00438295, 0.00132518,
        0.000338235, 4.96113e-05, 1.11142e-05, 4.68684e-06, 1.97642e-06, 8.33451e-07, 3.51463e-07,
        1.48211e-07,
    ],
    (1e4, (4.0, 1.0, 32.0, 2048.0), 32, 1): [
        1.0, 0.562341, 0.316228, 0.177828, 0.1, 0.050209, 0.0248465, 0.0120669, 0.00571429,
        0.00261087, 0.00112938, 0.00044457, 0.00025, 0.000140585, 7.90569e-05, 4.4457e-05,
    ],
    # The ramp has no width: one pair stays, and all others become slower.
    (100.0, (4.0, 0.5, 1.0, 1.0), 8, 1): [1.0, 0.0790569, 0.025, 0.00790569],
}  # fmt: skip


@pytest.mark.parametrize("case", YARN, ids=["ministral", "small", "a step"])
def test_frequencies_of_yarn(case):
    base, scaling, size, each = case
    found = Rope(base, scaling, ramp="pairs").frequency(size)[::each]
    np.testing.assert_allclose(found, YARN[case], rtol=5e-6)  # six digits


def test_a_gain_multiplies_what_is_turned():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 5, 1, 8)), jnp.float32)
    plain, found = (rotate(x, rope=Rope(part=0.5, gain=gain)) for gain in (1.0, 1.5))
    np.testing.assert_allclose(found[..., :4], 1.5 * plain[..., :4], rtol=1e-5)
    np.testing.assert_array_equal(found[..., 4:], x[..., 4:])


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


CAUSAL = {
    "plain": dict(causal=True),
    "unrolled, recomputed": dict(causal=True, scan_blocks=False, remat="full"),
    "local, time-free": dict(causal=True, local_width=4, time_conditioning=False, qk_norm=True),
    "local, unrolled": dict(causal=True, local_width=3, scan_blocks=False),
    "not causal": dict(local_width=3, scan_blocks=False),
}


@pytest.mark.parametrize("options", CAUSAL.values(), ids=CAUSAL)
@pytest.mark.cases(3)
def test_a_causal_network_sees_nothing_to_the_right(options):
    """Each position in turn changes: no feature before it does, its own and later ones do."""
    network, params = built(**options)
    assert network.causal == options.get("causal", False)
    z = np.tile(np.asarray(Z[:1]), (7, 1))
    for position in range(6):
        z[position, position] = (z[position, position] + 1) % 6
    call = jax.jit(lambda s: network.bind(params, {"segments": s}).features(z, jnp.full(7, 0.3)))
    for document in (np.zeros(6, int), np.array([0, 0, 1, 1, 1, 2])):
        out = np.asarray(call(jnp.tile(document, (7, 1))))
        for position in range(6):
            seen = document == document[position]
            if network.causal:
                seen &= np.arange(6) >= position
            moved = np.abs(out[position] - out[6]).max(axis=1)
            assert (moved[seen] > 1e-5).all() and (moved[~seen] < 1e-6).all(), position


@pytest.mark.parametrize("causal, taps", [(False, [-1, 0, 1]), (True, [-2, -1, 0])])
def test_local_mixing_looks_at_its_window(causal, taps):
    """x plus one number a tap times the neighbour there, zero beyond the ends."""
    x = np.arange(1.0, 6.0, dtype=np.float32)[None, :, None]
    scale = np.array([[100.0], [10.0], [1.0]], np.float32)
    out = LocalMixing(3, causal).apply({"params": {"scale": scale}}, x, None)
    padded = {n: float(n + 1) for n in range(5)}
    expected = [
        padded[n] + sum(w * padded.get(n + d, 0.0) for w, d in zip((100, 10, 1), taps, strict=True))
        for n in range(5)
    ]
    np.testing.assert_allclose(out[0, :, 0], expected)


def test_causal_attention_averages_over_itself_and_the_left():
    rng = np.random.default_rng(3)
    query, key, value = (rng.normal(size=(1, 4, 1, 3)).astype(np.float32) for _ in range(3))
    out = attend(*map(jnp.asarray, (query, key, value)), causal=True)
    for n in range(4):
        score = np.exp(key[0, : n + 1, 0] @ query[0, n, 0] / np.sqrt(3.0))
        np.testing.assert_allclose(
            out[0, n, 0], score / score.sum() @ value[0, : n + 1, 0], atol=1e-5
        )


ORDINAL = dict(vocab_size=9, output="truncated_logistic")


@pytest.mark.parametrize("symbols", [2, 9, 256])
def test_a_truncated_logistic_is_the_mass_of_its_bins(symbols, x64):
    """Against the normalised integral of the density over each bin, by 400 points a bin."""
    places = np.linspace(-1.0, 1.0, symbols)
    width = 2.0 / (symbols - 1)
    nodes, weights = np.polynomial.legendre.leggauss(400)
    for location, log_scale in [(0.0, 0.0), (0.3, -2.0), (-1.4, -1.0), (0.9, 3.0)]:
        x = (places[:, None] + 0.5 * width * nodes - location) / np.exp(log_scale)
        mass = (0.25 / np.cosh(0.5 * x) ** 2) @ weights
        arguments = jnp.array([location]), jnp.array([log_scale])
        found = np.exp(np.asarray(log_masses(*arguments, symbols)))
        np.testing.assert_allclose(found, mass / mass.sum(), rtol=1e-9)


def test_a_truncated_logistic_sums_to_one_and_peaks_at_its_location():
    """256 symbols in float32, from one symbol's width to nearly uniform."""
    location = jnp.linspace(-1.0, 1.0, 256)[:, None]
    for log_scale in (-12.0, -5.0, -2.0, 0.0, 12.0):
        logits = log_masses(location, jnp.full_like(location, log_scale), 256)
        assert logits.dtype == jnp.float32 and jnp.isfinite(logits).all()
        np.testing.assert_allclose(jnp.exp(logits).sum(axis=-1), 1.0, rtol=1e-5)
        if log_scale < 1.0:
            assert (np.abs(logits.argmax(axis=-1) - np.arange(256)) <= 2).all()
        else:
            np.testing.assert_allclose(jnp.exp(logits), 1 / 256, rtol=1e-3)
    # The narrowest is one symbol.
    narrow = log_masses(location, jnp.full_like(location, -12.0), 256)
    np.testing.assert_allclose(jnp.exp(jnp.diagonal(narrow)), 1.0, rtol=1e-5)


def test_a_truncated_logistic_has_finite_gradients_at_every_scale():
    """The cost of a symbol, raw log-scales from -1e4 to 1e4, locations far outside too."""
    network, params = built(**ORDINAL)
    raw = np.concatenate([np.linspace(-1e4, 1e4, 20), np.linspace(-30.0, 30.0, 40)])
    pairs = np.stack(np.meshgrid([-50.0, -1.0, 0.0, 1.0, 50.0], raw), axis=-1).reshape(-1, 2)

    def cost(bias):
        head = {"location_scale": params["head"]["location_scale"] | {"bias": bias}}
        return -network.bind(params | {"head": head}).unembed(jnp.zeros(16))[7]

    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(cost)))(jnp.asarray(pairs, jnp.float32))
    assert jnp.isfinite(values).all() and jnp.isfinite(slopes).all()
    # There is a way back from a scale that is far too small.
    small = (pairs[:, 1] >= -30.0) & (pairs[:, 1] <= 0.0)
    assert (np.abs(slopes[small]).max(axis=1) > 1e-6).all()


def test_an_ordinal_head_starts_broad_and_in_float32():
    """Within a factor of two of uniform; parameters of two outputs; float32 from bfloat16."""
    network = Transformer(**(SIZES | ORDINAL | dict(dtype="bfloat16"))).build()
    params = jax.jit(network.init)(jax.random.key(0))
    assert params["head"]["location_scale"]["kernel"].shape == (16, 2)
    out = logits(network, params)
    assert out.shape == (3, 6, 9) and out.dtype == jnp.float32
    assert np.abs(out - np.log(1 / 9)).max() < np.log(2.0)
    # The head's own product is not rounded to bfloat16, whose steps near 1 are 1 / 128.
    head = {"kernel": np.eye(16, 2, dtype="f4"), "bias": np.array([0.003, -4.0], "f4")}
    h = jnp.zeros((1, 16), jnp.bfloat16).at[0, 0].set(1.0)
    rounded = network.bind(params | {"head": {"location_scale": head}}).unembed(h)
    exact = log_masses(jnp.array([[1.003]]), 12.0 * jnp.tanh(jnp.array([[-4.0 / 12.0]])), 9)
    np.testing.assert_allclose(rounded, exact, rtol=1e-5)


@pytest.mark.slow
def test_an_ordinal_head_is_laid_out_and_learns():
    """A row of the sharding table has it; ten plain steps bring a symbol's cost down."""
    network = Transformer(**(SIZES | ORDINAL)).build()
    params = jax.jit(network.init)(jax.random.key(0))
    specs = shardings_of({"network": params}, make_mesh(MeshOptions(data=1)))
    assert specs["network"]["head"]["location_scale"]["kernel"].spec == P("fsdp", None)
    x = jnp.full(Z.shape, 7)

    def loss(params):
        out = network.bind(params)(Z, T)
        return -jnp.mean(jnp.take_along_axis(out, x[..., None], axis=-1))

    step = jax.jit(lambda p: jax.tree.map(lambda x, g: x - 0.3 * g, p, jax.grad(loss)(p)))
    start = float(loss(params))
    for _ in range(10):
        params = step(params)
    assert float(loss(params)) < start - 0.3


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(size=20, heads=4), "network.size=20 must be a multiple of twice network.heads=4"),
        (dict(dtype="float16"), "float32 or bfloat16, not 'float16'"),
        (dict(output="normal"), "categorical or truncated_logistic, not 'normal'"),
        (dict(output="truncated_logistic", vocab_size=1), "at least two symbols"),
    ],
)
def test_impossible_sizes_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Transformer(**(SIZES | options))


@pytest.mark.slow
@every_network
@pytest.mark.parametrize(
    "time_conditioning", [True, pytest.param(False, marks=pytest.mark.campaign)]
)
@pytest.mark.cases(1)
def test_every_parameter_learns_from_the_true_initialisation(make, time_conditioning):
    """Zeros that multiply zeros would never move: after four plain steps every array has."""
    if make is EncoderDecoder:
        pytest.skip("its encoder learns in blocks, which test_encoder_decoder.py checks")
    timed = make not in (Partition, ModernBert, Lfm2, Esm, MaskGit)
    options = dict(time_conditioning=time_conditioning and timed)
    if make is DiffusionGemma:
        options = {}
    if make is Transformer:
        options |= dict(qk_norm=True, local_width=3)
    network = make(**(SIZES_OF[make] | options)).build()
    start = jax.jit(network.init)(jax.random.key(1))
    targets = jax.random.randint(jax.random.key(2), Z.shape, 0, 5)

    def loss(params):
        denoiser, read = network.bind(params), Z
        if denoiser.recall is not None:
            read = Conditioned(Z, denoiser.recall(denoiser(Z, T)))
        logits = jax.nn.log_softmax(denoiser(read, T))
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
    scales = ["['decoder_scales']", "['encoder_scales']"]  # factors that are read and stay
    assert still == (scales if make is DiffusionGemma else [])


@pytest.mark.parametrize("dtype, rtol", [("float32", 2e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("case", ["all", "causal", "segments", "index"])
@pytest.mark.cases(2)
def test_output_and_gradients_of_attention_are_those_of_jax(case, dtype, rtol):
    """Of attend, whose gradient is written by hand, relative to the largest number."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, slope = (2.0 * jax.random.normal(k, (2, 8, 2, 4), dtype) for k in keys)
    segments = jnp.array([[0] * 3 + [1] * 5, [0] * 8])
    index = jnp.array([[5, 0, 2], [7, 7, 1]])
    mine, mask = {}, None
    if case == "causal":
        mine, mask = dict(causal=True), jnp.tril(jnp.ones((8, 8), bool))[None, None]
    if case == "segments":
        mine, mask = dict(segments=segments), (segments[:, :, None] == segments[:, None])[:, None]
    if case == "index":
        mine, query, slope = dict(index=index), query[:, :3], slope[:, :3]
    got, pull = jax.vjp(lambda *qkv: attend(*qkv, **mine), query, key, value)
    wanted, other = jax.vjp(
        lambda *qkv: jax.nn.dot_product_attention(*qkv, mask=mask), query, key, value
    )
    for a, b in zip((got, *pull(slope)), (wanted, *other(slope)), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=rtol * np.abs(b).max())


def test_grouped_heads_are_whole_heads_whose_keys_and_values_are_equal():
    """4 query heads and 2 of keys and values: heads 0 and 1 share the first, 2 and 3 the second."""
    grouped, params = built(heads=4, kv_heads=2)
    whole, _ = built(heads=4)

    def repeated(path, x):
        if not {"key", "value"} & {part.key for part in path}:
            return x
        heads = x.reshape(*x.shape[:-1], 2, 4)
        return jnp.repeat(heads, 2, axis=-2).reshape(*x.shape[:-1], 16)

    copied = jax.tree_util.tree_map_with_path(repeated, params)
    np.testing.assert_allclose(logits(grouped, params), logits(whole, copied), atol=1e-5)


def test_a_tied_head_multiplies_by_the_embedding():
    tied, params = built(tied=True)
    free, other = built()
    copied = {name: value for name, value in params.items() if name != "head_bias"}
    rows = params["embedding"].shape[0]
    copied["head"] = dict(kernel=params["embedding"].T, bias=params["head_bias"])
    assert other["head"]["kernel"].shape == (16, rows)
    np.testing.assert_allclose(logits(tied, params), logits(free, copied), atol=1e-5)


@pytest.mark.parametrize(
    "module, symbols, count",
    [(text8, 27, 88_734_272), (owt, 50257, 165_857_344), (owt_medium, 50257, 416_240_960)],
    ids=["text8", "owt", "owt_medium"],
)
def test_the_reference_has_as_many_parameters(module, symbols, count):
    options = module.get_config().network.to_dict()
    del options["name"]
    network = Transformer(vocab_size=symbols, **options).build()
    assert network.size(jax.eval_shape(network.init, jax.random.key(0))) == count


def test_padding_is_not_counted():
    """5 symbols and the mask are 128 rows of width 16; all parameters of the table are 6 rows."""
    for options in (dict(), dict(tied=True), dict(tied=True, head_bias=False), dict(embedding=8)):
        network, params = built(**options)
        table = params["embedding"]
        of_head = params.get("head", {"bias": params.get("head_bias", np.zeros(0))})
        others = sum(x.size for x in jax.tree.leaves(params)) - table.size
        others -= sum(x.size for x in jax.tree.leaves(of_head))
        used = 6 * table.shape[1] + sum(x[..., :5].size for x in jax.tree.leaves(of_head))
        assert network.size(params) == others + used


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(dict(time_conditioning=False), marks=pytest.mark.campaign),
        pytest.param(dict(remat="full"), marks=pytest.mark.campaign),
    ],
)
@pytest.mark.campaign
def test_a_loop_over_blocks_is_unrolled_on_gpus_and_computes_the_same(options):
    """Same parameters, features, gradients, features in blocks, and features with a cache."""
    looped, params = built(depth=2, **options)
    network = Transformer(**(SIZES | dict(depth=2) | options)).build("gpu")
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    clean, times = (Z + 1) % 5, jnp.broadcast_to(T[:, None], (3, 3))

    def loss(params, network):
        denoiser = network.bind(params)
        blocks = denoiser.blocks
        one, cache = blocks.append_block(Z[:, :2], T, blocks.empty_cache(3, 6))
        two, _ = blocks.append_block(Z[:, 2:4], T, cache)
        return (
            jnp.sum(denoiser.features(Z, T) ** 2)
            + jnp.sum(blocks.features(Z, times, clean, 2) ** 2)
            + jnp.sum(one**2 + two**2)
        )

    both = [jax.jit(jax.value_and_grad(lambda p, n=n: loss(p, n))) for n in (looped, network)]
    (a, of_a), (b, of_b) = (each(params) for each in both)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    for left, right in zip(jax.tree.leaves(of_a), jax.tree.leaves(of_b), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4)
    text = both[1].lower(params).as_text()
    assert ("stablehlo.while" in text) == ("remat" in options)


@pytest.mark.parametrize("axis, loops", [("data", False), ("tensor", False), ("fsdp", True)])
def test_split_parameters_of_blocks_are_gathered_in_a_loop(axis, loops):
    """On a mesh of two devices that need not be there."""
    network = Transformer(**(SIZES | dict(depth=3))).build("gpu")
    sides = tuple(2 if name == axis else 1 for name in AXES)
    features = lambda params: network.bind(params).features(Z[:2], T[:2])  # noqa: E731
    shapes, automatic = jax.eval_shape(network.init, jax.random.key(0)), (AxisType.Auto,) * 4
    with jax.sharding.use_abstract_mesh(AbstractMesh(sides, AXES, axis_types=automatic)):
        text = str(jax.make_jaxpr(features)(shapes))
    assert ("length=3" in text and "unroll=1" in text) == loops
    assert ("unroll=3" in text) != loops


@pytest.mark.parametrize(
    "make, block",
    [
        (Transformer, 0),
        (Transformer, 2),
        (ModernBert, 0),
        (Lfm2, 0),
        (Esm, 0),
        (Partition, 0),
        (EncoderDecoder, 0),
        (EncoderDecoder, 2),
    ],
)
@pytest.mark.cases(3)
def test_operations_of_a_tied_head_are_those_of_a_head_of_its_own(make, block):
    """Of 128 symbols, whose head has no other columns."""
    keys = SIZES_OF[make] | dict(vocab_size=128, time_conditioning=False, head_bias=False)
    found = []
    for tied in (True, False):
        network = make(**keys, tied=tied).build()
        params = jax.eval_shape(network.init, jax.random.key(0))
        found.append(network.flops(params, 6, block))
    assert found[0] == pytest.approx(found[1])
    # Where the vectors are frozen, the trained parameters have no head.
    network = make(**keys, tied=True).build()
    params = jax.eval_shape(network.init, jax.random.key(0))
    frozen = {name: part for name, part in params.items() if name != "embedding"}
    assert network.flops(params, 6) - network.flops(frozen, 6) == 2.0 * 16 * 128
