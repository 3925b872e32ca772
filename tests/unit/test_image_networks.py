"""Networks of images: their parts, sizes, dropout, labels, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pixels import Pixels
from tiny_networks import SIZES_OF, T, Z, built, logits

from configs import networks
from md4_jax.config import build, inputs, schema
from md4_jax.data.domains import TextDomain
from md4_jax.data.random_tokens import RandomTokens
from md4_jax.data.tokenizers import Text8Symbols
from md4_jax.model import inputs as model_inputs
from md4_jax.model.model import Model
from md4_jax.networks.convolution import convolve, plainly
from md4_jax.networks.dit import DiT
from md4_jax.networks.group_norm import GroupNorm, normalised
from md4_jax.networks.images import patches, unpatched
from md4_jax.networks.ordinal import log_masses
from md4_jax.networks.residual import ResidualBlock
from md4_jax.networks.rotary import Rope, rotate
from md4_jax.networks.unet import UNet
from md4_jax.networks.uvit import UViT, sinusoids
from md4_jax.protocols import UserError


def made(make, **options):
    """(network, parameters far from zero); half as many channels take a third of the time."""
    return built(make, **((dict(channels=32) if make is UNet else {}) | options))


IMAGES = [UNet, UViT, DiT]
MARKS = {UNet: pytest.mark.slow, UViT: pytest.mark.campaign}
every_network = pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=MARKS.get(make, [])) for make in IMAGES],
)
KEYS = jax.random.split(jax.random.key(3), 3)
CIFAR = dict(vocab_size=256, shape=(32, 32, 3))
IMAGENET = dict(vocab_size=256, shape=(64, 64, 3))


@pytest.mark.parametrize(
    "options, count",
    [
        (UNet(**CIFAR), 28_427_520), (UViT(**IMAGENET), 204_595_712),
        (UNet(**CIFAR, **networks.DDPM), 33_634_310), (DiT(**CIFAR), 130_730_784),
    ],
    ids=["cifar10", "imagenet64", "ddpm", "dit"],
)  # fmt: skip
def test_full_sizes(options, count):
    """The first two are those of google-deepmind/md4's own code."""
    network = options.build()
    assert network.size(jax.eval_shape(network.init, jax.random.key(0))) == count


@pytest.mark.parametrize("shape", [(1, 2, 4, 3, 5), (2, 6, 8, 4, 4)])
def test_a_convolution_and_its_gradients(shape, x64):
    """Against sums written out, and the gradients of XLA's own."""
    _, height, width, channels, size = shape
    rng = np.random.default_rng(0)
    x, kernel, slope = (
        jnp.asarray(rng.normal(size=s))
        for s in (shape[:4], (3, 3, channels, size), (*shape[:3], size))
    )
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = sum(
        padded[:, i : i + height, j : j + width] @ np.asarray(kernel[i, j])
        for i in range(3) for j in range(3)
    )  # fmt: skip
    (found, pull), (_, wanted) = (jax.vjp(f, x, kernel) for f in (convolve, plainly))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(pull(slope), wanted(slope), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def test_groups_of_channels_are_normalised_over_the_image():
    """64 channels are 32 pairs; the image's mean is far from zero."""
    x = 3.0 + np.random.default_rng(0).normal(size=(2, 3, 4, 64)).astype(np.float32)
    params = {"scale": np.full(64, 2.0, "f4"), "bias": np.arange(64.0, dtype="f4")}
    found = GroupNorm(swish=False).apply({"params": params}, x)
    pairs = x.reshape(2, 12, 32, 2).astype(np.float64)
    mean, variance = (f(pairs, axis=(1, 3), keepdims=True) for f in (np.mean, np.var))
    y = ((pairs - mean) / np.sqrt(variance + 1e-6)).reshape(x.shape)
    np.testing.assert_allclose(found, 2.0 * y + params["bias"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("swish", [False, True])
def test_the_gradient_of_the_normalisation_is_that_of_its_formula(swish):
    rng = np.random.default_rng(1)
    x, slope = rng.normal(size=(2, 2, 3, 5, 64)).astype(np.float32)
    gain, bias = rng.normal(size=(2, 2, 64)).astype(np.float32)

    def formula(x, gain, bias):
        pairs = x.reshape(2, 15, 32, 2)
        mean, variance = (f(pairs, axis=(1, 3), keepdims=True) for f in (jnp.mean, jnp.var))
        y = ((pairs - mean) / jnp.sqrt(variance + 1e-6)).reshape(x.shape)
        y = gain[:, None, None] * y + bias[:, None, None]
        return y * jax.nn.sigmoid(y) if swish else y

    (found, pull), (expected, wanted) = (
        jax.vjp(f, x, gain, bias)
        for f in (lambda *a: normalised(*a, swish, 1e-6), formula)
    )  # fmt: skip
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(pull(slope), wanted(slope), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_patches_are_squares_row_by_row():
    x = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    cut = np.asarray(patches(x, 2))
    assert cut.shape == (2, 6, 12)
    np.testing.assert_array_equal(cut[1, 4], x[1, 2:4, 2:4].ravel())
    np.testing.assert_array_equal(unpatched(cut, (4, 6, 3), 2), x)


def test_rotary_products_on_a_grid_depend_on_both_distances():
    """Equal queries and keys on 3 x 4 places: a function of the distances of rows and columns."""
    rng = np.random.default_rng(1)
    query, key = (
        jnp.broadcast_to(rng.normal(size=8).astype(np.float32), (1, 12, 1, 8)) for _ in range(2)
    )
    turned = (rotate(x, rope=Rope(100.0), grid=(3, 4)) for x in (query, key))
    product = np.einsum("bihd,bjhd->ij", *turned).reshape(3, 4, 3, 4)
    np.testing.assert_allclose(product[1:, :, 1:], product[:-1, :, :-1], atol=1e-5)
    np.testing.assert_allclose(product[:, 1:, :, 1:], product[:, :-1, :, :-1], atol=1e-5)
    for other in (product[0, 0, 1, 0], product[0, 0, 0, 1]):
        assert abs(product[0, 0, 0, 0] - other) > 0.05
    assert abs(product[0, 0, 1, 0] - product[0, 0, 0, 1]) > 0.05


def test_positions_of_the_uvit_tell_rows_from_columns():
    """The slowest waves are 1 where a coordinate is 0; columns have the first half."""
    found = sinusoids((2, 3), 8)
    assert found.shape == (6, 8)
    np.testing.assert_allclose(found[:, 0], np.sin([0, 1, 2, 0, 1, 2]), rtol=1e-6)
    np.testing.assert_allclose(found[:, 4], np.sin([0, 0, 0, 1, 1, 1]), rtol=1e-6)
    np.testing.assert_allclose(found[:, 7], np.cos([0, 0, 0, 0.01, 0.01, 0.01]), rtol=1e-6)


LEVELS = dict(
    vocab_size=9, shape=(4, 4, 2), channels=32, blocks=1, multipliers=(1, 2), attention_at=(2,),
    input="intensity", output="truncated_logistic",
)  # fmt: skip


@pytest.mark.campaign
def test_a_unet_of_two_resolutions_starts_at_the_intensities_it_sees():
    """At the start the head adds nothing: a logistic around tanh(x), 0 at masks."""
    network = UNet(**LEVELS).build()
    params = jax.jit(network.init)(jax.random.key(0))
    assert params["down_1_0"]["conv_1"]["kernel"].shape == (3, 3, 32, 64)
    assert {"conv_down_1", "conv_up_1", "up_1_1_attention"} <= params.keys()
    assert "up_0_0_attention" not in params and "embedding" not in params
    z = jnp.asarray(np.arange(32)[None] % 10)
    place = np.where(z == 9, 0.0, np.tanh(2.0 * z / 8 - 1.0))[..., None]
    found = logits(network, params, z, T[:1])
    np.testing.assert_allclose(found, around(place), atol=1e-5)


def around(place):
    """Log-probabilities of 9 levels at the start; 12 tanh(x / 12) bounds the log-scale -2."""
    scale = jnp.full(place.shape, 12.0 * np.tanh(-2.0 / 12.0), jnp.float32)
    return log_masses(jnp.asarray(place, jnp.float32), scale, 9)


@pytest.mark.campaign
def test_a_dit_of_intensities_starts_at_what_it_sees():
    """A logistic around the input itself, 0 at masks; the same for few positions."""
    options = SIZES_OF[DiT] | dict(vocab_size=9, input="intensity", output="truncated_logistic")
    network = DiT(**options).build()
    params = jax.jit(network.init)(jax.random.key(0))
    assert "embedding" not in params
    length = int(np.prod(options["shape"]))
    z = jnp.asarray(np.arange(length)[None] % 10)
    place = np.where(z == 9, 0.0, 2.0 * z / 8 - 1.0)[..., None]
    np.testing.assert_allclose(logits(network, params, z, T[:1]), around(place), atol=1e-5)
    moved, whole = built(DiT, **options), jnp.asarray([[0, 3, length - 1]])
    denoiser = moved[0].bind(moved[1], {}, None)
    few = denoiser.unembed(denoiser.features(z, T[:1], whole))
    np.testing.assert_allclose(few, denoiser(z, T[:1])[:, whole[0]], atol=1e-5)
    assert np.abs(few - around(place)[:, whole[0]]).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, output",
    [
        (UNet, "truncated_logistic"),
        pytest.param(UViT, "categorical", marks=pytest.mark.campaign),
        pytest.param(DiT, "truncated_logistic", marks=pytest.mark.campaign),
    ],
)
def test_gradients_are_finite_and_reach_every_parameter(make, output):
    network, params = made(make, output=output, classes=3, dropout=0.1, label_dropout=0.5)
    label = jnp.asarray([0, 2, 1])

    def loss(params):
        found = jax.nn.log_softmax(network.bind(params, {"label": label}, KEYS)(Z, T))
        return -jnp.mean(found[..., 1] * jnp.arange(1.0, 7.0))

    for path, slope in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert jnp.isfinite(slope).all() and jnp.abs(slope).max() > 0, path


@pytest.mark.slow
@every_network
@pytest.mark.cases(1)
def test_dropout_has_keys_for_each_image_and_is_off_without(make):
    network, params = made(make, dropout=0.3)
    plain, _ = made(make)
    features = jax.jit(lambda keys, z, t: network.bind(params, {}, keys).features(z, t))
    same = jnp.broadcast_to(Z[:1], Z.shape), jnp.broadcast_to(T[:1], T.shape)
    found = features(KEYS, *same)
    assert (np.abs(found[0] - found[1]) > 1e-3).any()
    alone = features(KEYS[1:2], Z[:1], T[:1])
    np.testing.assert_allclose(alone[0], found[1], rtol=1e-2, atol=1e-3)
    np.testing.assert_array_equal(logits(network, params), logits(plain, params))


@pytest.mark.campaign
def test_dropout_of_a_residual_block_keeps_its_mean():
    """A linear layer follows: the mean of 2,000 draws, to 4.5 standard errors in 96 numbers."""
    options = UNet(**SIZES_OF[UNet], dropout=0.3)
    block, x = ResidualBlock(options, 32), jax.random.normal(KEYS[0], (1, 1, 3, 32))
    params = block.init(KEYS[0], x, None)
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(KEYS[1], p.shape), params)
    whole, _ = block.apply(params, x, None)
    many = jnp.repeat(x, 2000, axis=0)
    found, _ = block.apply(params, many, None, jax.random.split(KEYS[2], 2000))
    error = found.std(axis=0) / np.sqrt(2000)
    assert (np.abs(found.mean(axis=0) - whole[0]) < 4.5 * error).all() and error.min() > 1e-4


@pytest.mark.campaign
@every_network
def test_labels_are_told_hidden_and_refused(make):
    # Of 32 channels each is a group of its own, whose norm takes out what a label adds to it.
    sizes = dict(channels=64) if make is UNet else {}
    network, params = made(make, classes=3, label_dropout=0.5, **sizes)
    label = jnp.asarray([2, 0, 1])
    known, none, other = (
        np.asarray(logits(network, params, label=x))
        for x in (label, jnp.full(3, 3), label.at[1].set(2))
    )
    assert np.abs(other - known)[1].max() > 1e-3
    np.testing.assert_array_equal(other[[0, 2]], known[[0, 2]])
    np.testing.assert_allclose(logits(network, params), none, atol=1e-5)
    keys, same = jax.random.split(jax.random.key(0), 64), jnp.zeros(64, int)
    told = jax.jit(lambda z, t: network.bind(params, {"label": same}, keys)(z, t))
    found = np.asarray(told(Z[same], T[same]))
    kinds = [np.asarray(logits(network, params, label=jnp.full(3, k)))[:1] for k in (0, 3)]
    hidden = np.abs(found - kinds[1]).max((1, 2)) < np.abs(found - kinds[0]).max((1, 2))
    assert abs(hidden.mean() - 0.5) < 4 * 0.5 / 8
    with pytest.raises(UserError, match="inputs label, not 'segments'"):
        network.bind(params, {"segments": Z})
    with pytest.raises(UserError, match="network.classes=0"):
        built(make)[0].bind(built(make)[1], {"label": label})


@pytest.mark.campaign
def test_rows_are_repeated_with_their_labels():
    network, params = made(UNet, classes=3)
    denoiser = network.bind(params, {"label": jnp.asarray([2, 0, 1])}).repeated(2)
    whole = logits(network, params, label=jnp.asarray([2, 0, 1]))
    found = denoiser(jnp.repeat(Z, 2, axis=0), jnp.repeat(T, 2))
    np.testing.assert_allclose(found, np.repeat(whole, 2, axis=0), rtol=1e-4, atol=1e-3)


def layers(params, length):
    return [jax.tree.map(lambda x, n=n: x[n], params) for n in range(length)]


@pytest.mark.campaign
@pytest.mark.parametrize("make", [pytest.param(UNet, marks=pytest.mark.campaign), UViT])
def test_scanned_and_unrolled_blocks_compute_the_same(make):
    scanned, params = made(make, dropout=0.2)
    loop, _ = made(make, dropout=0.2, scan_blocks=False)
    other = {k: v for k, v in params.items() if k not in ("down", "up")}
    for name, length in (("down", 1), ("up", 2)):
        other |= {f"{name}_0_{n}": x for n, x in enumerate(layers(params[name], length))}
    if make is UViT:
        own = layers(params["middle"]["blocks"]["layers"], 2)
        blocks = {f"layers_{n}": x for n, x in enumerate(own)}
        other["middle"] = params["middle"] | {"blocks": blocks}
    one, two = (
        jax.jit(lambda z, t, n=n, p=p: n.bind(p, {}, KEYS)(z, t))(Z, T)
        for n, p in ((scanned, params), (loop, other))
    )
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options",
    [UNet(256, (32, 32, 3), blocks=2), UNet(256, (32, 32, 3), **networks.DDPM),
     UViT(256, (64, 64, 3), blocks=1, depth=2), DiT(256, depth=2, shape=(32, 32, 3))],
    ids=["unet", "ddpm", "uvit", "dit"],
)  # fmt: skip
@pytest.mark.cases(1)
def test_the_formula_counts_what_the_compiler_counts(options):
    """Of the program before compilation, in which a convolution is one operation."""
    options = options.__class__(**{**vars(options), "scan_blocks": False})
    network, length = options.build(), int(np.prod(options.shape))
    params = jax.eval_shape(network.init, jax.random.key(0))
    z = jax.ShapeDtypeStruct((1, length), jnp.int32)
    lowered = jax.jit(lambda p, z, t: network.bind(p)(z, t)).lower(
        params, z, jax.ShapeDtypeStruct((1,), jnp.float32)
    )
    counted = lowered.cost_analysis()["flops"]
    assert network.flops(params, length, 0) * length == pytest.approx(counted, rel=0.1)


def test_operations_of_a_dit_are_counted_of_what_a_patch_takes():
    """As of a plain layer as wide as its experts together, and the router; heads may be wide."""
    keys = dict(vocab_size=5, size=16, depth=2, heads=2, shape=(4, 4, 1), patch=2, embedding=8)

    def flops(**more):
        network = DiT(**keys, **more, time_conditioning=False).build()
        return network.flops(jax.eval_shape(network.init, jax.random.key(0)), 16)

    of_a_patch, number = 2.0 * 2 / 4, 4
    taken = flops(experts=8, expert_hidden=6, experts_per_token=3)
    assert taken == pytest.approx(flops(hidden=18) + of_a_patch * 16 * 8)
    # Twice the features of attention: twice its matrices and scores.
    added = flops(head_dim=16) - flops()
    assert added == pytest.approx(of_a_patch * (4 * 16 * 16 + 2 * number * 16))


@pytest.mark.parametrize(
    "make, options, words",
    [
        (UNet, dict(shape=(256,)), r"network.name='unet' reads images .* shape \(256,\)"),
        (DiT, dict(shape=()), "network.name='dit' reads images"),
        (UNet, dict(channels=48), "network.channels=48 must be a multiple of 32"),
        (UNet, dict(blocks=0), "network.blocks must be at least 1, not 0"),
        (UNet, dict(multipliers=()), "network.multipliers"),
        (UNet, dict(multipliers=(1, 2)), r"multiples of 2, but the images have 2 x 3"),
        (UNet, dict(attention_at=(8,)), "no feature map of height 8. The heights are 2"),
        (UNet, dict(output="truncated_logistic", vocab_size=1), "at least two symbols"),
        (UNet, dict(input="pixels"), "network.input must be embedding or intensity"),
        (UNet, dict(dropout=1.0), r"network.dropout must lie in \[0, 1\), not 1.0"),
        (UViT, dict(patch=2), "network.patch=2 needs .* multiples of 2, .* 2 x 3"),
        (UViT, dict(size=20, heads=2), "network.size=20 must be a multiple of four times"),
        (DiT, dict(patch=3), "network.patch=3 needs .* multiples of 3, .* 2 x 3"),
        (DiT, dict(causal=True), "network.causal=True is only for texts"),
        (DiT, dict(local_width=3), "network.local_width=3 is only for texts"),
        (DiT, dict(size=20, heads=2), "multiple of four times network.heads=2"),
        (DiT, dict(head_size=0), "network.head_size must be at least 1, not 0"),
    ],
)
def test_impossible_options_are_refused(make, options, words):
    with pytest.raises(UserError, match=words):
        make(**(SIZES_OF[make] | options))


def config_of(**changes) -> dict:
    options = {
        "network.name": "unet", "network.blocks": "1", "network.channels": "32",
        "network.classes": "3", "data.length": "48",
    }  # fmt: skip
    return schema.load_config("configs/base.py", options | changes)


def test_the_data_tell_the_shape():
    devices = jax.devices()[:1]
    experiment = build.experiment(config_of(), Pixels((4, 4, 3)), devices)
    params = jax.eval_shape(experiment.network.init, jax.random.key(0))
    assert params["conv_in"]["kernel"].shape == (3, 3, 96, 32)
    with pytest.raises(UserError, match=r"reads images .* shape \(48,\)"):
        build.experiment(config_of(), TextDomain(Text8Symbols(), 48, (0, 1, 2)), devices)
    with pytest.raises(UserError, match="unknown key in network 'shape'"):
        config_of(**{"network.shape": "(4, 4, 3)"})


@pytest.mark.parametrize("rows", [(1, 24), (2, 24), (1, 96), (96,), (1, 5)])
def test_logits_are_those_of_whole_images(rows):
    """Two halves are no image, nor are two images one."""
    experiment = build.experiment(config_of(), Pixels((4, 4, 3)), jax.devices()[:1])
    model = Model(experiment, {}, 0, "", {"commit": "unknown", "results": {}})
    said = rf"images of the shape \(4, 4, 3\), in rows of 48 values, but these rows have {rows[-1]}"
    with pytest.raises(UserError, match=said):
        model.logits(np.zeros(rows, np.int32), 0.5)
    whole = np.zeros((2, 48), np.int32)
    assert model_inputs.checked(experiment, whole, 0.5)[0].shape == whole.shape


@pytest.mark.parametrize(
    "length, shape", [(48, (4, 4, 3)), (784, (28, 28, 1)), (3072, (32, 32, 3)), (50, (50,))]
)
def test_random_tokens_are_square_images_if_they_can_be(length, shape):
    assert RandomTokens(256, length, image=True).shape == shape
    assert RandomTokens(256, length).shape == (length,)


def test_random_tokens_are_images_for_networks_of_images_alone():
    """1024 is 32 x 32, and a text all the same."""
    keys = {"bench.random_tokens": "9", "data.length": "1024", "bench.parts": "train"}
    text = schema.load_config("configs/base.py", keys)
    assert inputs.random_tokens(text, "bench").shape == (1024,)
    assert inputs.random_tokens(text, "plan") is None
    images = schema.load_config("configs/base.py", {**keys, "network.name": "unet"})
    assert inputs.random_tokens(images, "bench").shape == (32, 32, 1)
