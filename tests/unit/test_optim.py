"""Optimizers: rates at key steps, which leaves decay or are orthogonalised, the clip."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_networks import SIZES_OF

from md4_jax.networks.transformer import Transformer
from md4_jax.networks.unet import UNet
from md4_jax.networks.uvit import UViT
from md4_jax.processes.masking import Masking
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import path_name
from md4_jax.training.optim import (
    OPTIMIZERS,
    AdamW,
    LearningRate,
    Muon,
    Rate,
    clipping,
    decay_mask,
    hidden_matrices,
)

OF_BLOCKS = [make for make in SIZES_OF if make not in (UNet, UViT)]  # these convolve too
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def parameters(**options):
    network = Transformer(5, size=16, depth=2, heads=2, hidden=24, **options).build()
    return {"network": jax.jit(network.init)(jax.random.key(0)), "process": Masking(5)}


SCANNED, UNROLLED = parameters(), parameters(scan_blocks=False, qk_norm=True)


def names(tree, chosen) -> set[str]:
    """The paths at which the tree holds a chosen value."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: not isinstance(x, dict))
    return {path_name(path) for path, leaf in flat if chosen(leaf)}


def noise(params, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)


@pytest.mark.parametrize("decay, middle, last", [
    ("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1.0, 1.0)
])  # fmt: skip
def test_learning_rate_at_key_steps(decay, middle, last):
    """10 steps of warm-up counted from one, the peak, half way (cosine of pi/2), the end."""
    rate = LearningRate(decay=decay, warmup_steps=10, final_fraction=0.1).schedule(2.0, 110)
    np.testing.assert_allclose(rate(0), 0.2, rtol=1e-6)
    np.testing.assert_allclose(rate(4), 1.0, rtol=1e-6)
    np.testing.assert_allclose([rate(9), rate(10)], 2.0, rtol=1e-6)
    np.testing.assert_allclose(rate(60), 2.0 * middle, rtol=1e-5)
    np.testing.assert_allclose(rate(110), 2.0 * last, rtol=1e-5)
    np.testing.assert_allclose(rate(500), 2.0 * last, rtol=1e-5)


def test_a_plain_schedule_is_a_rate_of_steps():
    rate = Rate.of(lambda step: 0.5**step)
    assert float(rate(3)) == float(rate(3, spent=0.9)) == 0.125 and not rate.follows_seconds
    assert Rate.of(rate) is rate


def test_a_rate_that_follows_seconds():
    """Linear to a tenth after 10 of 110 steps: ahead of the steps only after the warm-up."""
    options = LearningRate(clock="seconds", decay="linear", warmup_steps=10, final_fraction=0.1)
    rate, plain = options.followed(2.0, 110), options.schedule(2.0, 110)
    assert rate.follows_seconds and not LearningRate().followed(1.0, 3000).follows_seconds
    for step, spent, reached in [
        (60, 0.0, 60), (60, 0.3, 60), (60, 0.75, 82.5), (60, 1.0, 110), (60, 9.0, 110),
        (5, 0.75, 5), (10, 0.75, 82.5),
    ]:  # fmt: skip
        np.testing.assert_allclose(rate(step, spent), plain(reached), rtol=1e-5)
        np.testing.assert_allclose(rate.pace(step, spent), plain(reached) / plain(step), rtol=1e-5)


def test_the_last_steps_of_a_cosine_that_follows_seconds_are_finite():
    """There the rate by steps alone is 0 in float32, of which nothing can be a multiple."""
    rate = LearningRate(clock="seconds", decay="cosine", warmup_steps=10).followed(1.0, 300_000)
    last = np.arange(299_970, 300_001)
    pace = np.asarray(jax.vmap(lambda step: rate.pace(step, 0.5))(last))
    assert (np.asarray(jax.vmap(rate.shape)(last)) == 0).sum() > 5
    assert np.isfinite(pace).all() and (pace <= 1).all()


@pytest.mark.quick(1)
@every_optimizer
@pytest.mark.cases(1)
def test_an_update_at_half_the_pace_is_that_of_half_the_rates(make):
    """Of network and process, decayed weights included."""
    grads = noise(UNROLLED)
    rates = {k: v for k, v in vars(make()).items() if k.endswith("learning_rate")}
    whole, half = (
        make(weight_decay=0.1, **{k: factor * v for k, v in rates.items()}).build(5000)[0]
        for factor in (1.0, 0.5)
    )
    updates = [o.update(grads, o.init(UNROLLED), UNROLLED)[0] for o in (whole, half)]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(0.5 * a, b, rtol=1e-4, atol=1e-10), *updates
    )


def test_the_inverse_square_root_goes_on_from_the_warm_up():
    """D3PM's: peak sqrt(warmup / updates), whatever the number of steps."""
    rate = LearningRate(decay="rsqrt", warmup_steps=10).schedule(2.0, 110)
    np.testing.assert_allclose(
        [rate(count) for count in (4, 9, 10, 30, 80)],
        [1.0, 2.0, 2.0, 2.0 / 3**0.5, 2.0 / 8**0.5],
        rtol=1e-6,
    )


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warm_up_the_first_step_is_at_the_peak(warmup):
    rate = LearningRate(warmup_steps=warmup).schedule(2.0, 10)
    np.testing.assert_allclose(rate(0), 2.0, rtol=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(decay="stairs"), "cosine, linear, constant, rsqrt, not 'stairs'"),
        (dict(warmup_steps=11), "optim.warmup_steps=11 .* train.num_steps=10"),
    ],
)
def test_impossible_rates_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        LearningRate(**options).schedule(1.0, 10)


@pytest.mark.parametrize(
    "make, options, words",
    [
        ("adamw", dict(b2=1.0), r"optim.b2 must lie in \[0, 1\), not 1.0"),
        ("muon", dict(momentum=-0.1), r"optim.momentum must lie in \[0, 1\), not -0.1"),
        ("adamw", dict(eps=0.0), "optim.eps must be above 0, not 0.0"),
        ("adamw", dict(learning_rate=float("inf")), "optim.learning_rate .* at least 0, not inf"),
        ("muon", dict(adam_learning_rate=-1.0), "optim.adam_learning_rate .* not -1.0"),
        ("adamw", dict(process_weight_decay=float("nan")), "optim.process_weight_decay .* not nan"),
        ("muon", dict(clip=-1.0), "optim.clip .* not -1.0"),
    ],
)
def test_numbers_that_break_an_optimizer_are_refused(make, options, words):
    with pytest.raises(UserError, match=words):
        OPTIMIZERS[make](**options)


LEAVES = {
    "network": {"blocks_0": {"kernel": np.array([[0.5, -2.0], [1.0, 3.0]], np.float32)},
                "embedding": np.array([1.0, -1.0, 2.0], np.float32)},
    "process": {"rate": np.array([0.3], np.float32)},
}  # fmt: skip
FLAT = dict(warmup_steps=0, decay="constant", clip=0.0)


def updates_of(options, grads):
    """The updates of LEAVES by each of the gradients in turn."""
    optimizer, found = options.build(100)[0], []
    state, update = optimizer.init(LEAVES), jax.jit(optimizer.update)
    for grad in grads:
        updates, state = update(grad, state, LEAVES)
        found.append(updates)
    return found


def adam(grads, rate, b1, b2, nesterov=False):
    """The last update of Adam, in float64."""
    mean, square = 0.0, 0.0
    for count, grad in enumerate(np.asarray(grads, np.float64), start=1):
        mean = b1 * mean + (1 - b1) * grad
        square = b2 * square + (1 - b2) * grad**2
        first = mean / (1 - b1**count)
        if nesterov:
            ahead, now = mean / (1 - b1 ** (count + 1)), grad / (1 - b1**count)
            first = b1 * ahead + (1 - b1) * now
    return -rate * first / (np.sqrt(square / (1 - b2**count)) + 1e-8)


@pytest.mark.parametrize(
    "options",
    [
        AdamW(b1=0.9, b2=0.5, learning_rate=0.1, **FLAT),
        Muon(b1=0.5, b2=0.9, adam_learning_rate=0.1, **FLAT),
    ],
    ids=OPTIMIZERS,
)
def test_second_updates_of_an_embedding_are_those_by_hand(options):
    grads = [noise(LEAVES, seed) for seed in (0, 1)]
    found = updates_of(options, grads)
    each = [grad["network"]["embedding"] for grad in grads]
    for count in (1, 2):
        nesterov = isinstance(options, Muon)
        expected = adam(each[:count], 0.1, options.b1, options.b2, nesterov)
        np.testing.assert_allclose(found[count - 1]["network"]["embedding"], expected, rtol=1e-4)


def test_muon_decays_the_matrices_that_it_orthogonalises():
    """Without a gradient nothing else moves them."""
    options = Muon(weight_decay=0.1, learning_rate=0.5, **FLAT)
    (found,) = updates_of(options, [jax.tree.map(jnp.zeros_like, LEAVES)])
    kernel = LEAVES["network"]["blocks_0"]["kernel"]
    np.testing.assert_allclose(found["network"]["blocks_0"]["kernel"], -0.05 * kernel, rtol=1e-5)


@every_optimizer
def test_the_rate_of_the_process_warms_up_too(make):
    """Adam makes steps of the rate's size of equal gradients: a quarter, then the whole of it."""
    options = make(process_learning_rate=0.02, warmup_steps=4, decay="constant")
    found = updates_of(options, 5 * [jax.tree.map(jnp.ones_like, LEAVES)])
    sizes = [float(updates["process"]["rate"][0]) for updates in found]
    np.testing.assert_allclose([sizes[0], sizes[4]], [-0.005, -0.02], rtol=1e-4)


@pytest.mark.slow
@every_optimizer
def test_an_update_is_finite_keeps_dtypes_and_goes_downhill(make):
    """Also over the process, which has no leaves."""
    optimizer, rate = make(warmup_steps=0).build(10)
    grads = noise(SCANNED)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(SCANNED), SCANNED)
    assert float(rate(0)) > 0
    slope = 0.0
    for grad, update in zip(*map(jax.tree.leaves, (grads, updates)), strict=True):
        assert update.shape == grad.shape and update.dtype == grad.dtype
        assert jnp.isfinite(update).all() and jnp.abs(update).max() > 0
        slope += float(jnp.sum(grad * update))
    assert slope < 0


def test_decay_is_on_the_matrices_of_linear_layers_alone():
    decayed = names(decay_mask(UNROLLED), lambda leaf: leaf is True)
    assert all(name.endswith("kernel") for name in decayed)
    assert "network/head/kernel" in decayed
    assert "network/blocks_1/feed_forward/down/kernel" in decayed
    everything = {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(UNROLLED)}
    assert {name.rsplit("/", 1)[1] for name in everything - decayed} == {
        "bias", "scale", "embedding"
    }  # fmt: skip
    zero = jax.tree.map(jnp.zeros_like, UNROLLED)
    optimizer, _ = AdamW(weight_decay=0.1, learning_rate=0.5, warmup_steps=0).build(10)
    ones = jax.tree.map(jnp.ones_like, UNROLLED)
    updates, _ = jax.jit(optimizer.update)(zero, optimizer.init(ones), ones)
    np.testing.assert_allclose(updates["network"]["head"]["kernel"], -0.05, rtol=1e-6)
    assert (updates["network"]["embedding"] == 0).all()
    every = AdamW(weight_decay=0.1, learning_rate=0.5, warmup_steps=0, decayed="all").build(10)[0]
    updates, _ = jax.jit(every.update)(zero, every.init(ones), ones)
    for leaf in jax.tree.leaves(updates["network"]):
        np.testing.assert_allclose(leaf, -0.05, rtol=1e-6)
    with pytest.raises(UserError, match="optim.decayed must be matrices or all, not 'some'"):
        AdamW(decayed="some")


@pytest.mark.parametrize(
    "form, left", [({}, 0), (dict(ns_steps=3, preconditioning="aol"), 1)], ids=["", "aol"]
)
@pytest.mark.parametrize("params", [SCANNED, UNROLLED])
@pytest.mark.cases(2)
def test_muon_orthogonalises_the_matrices_of_the_blocks_and_nothing_else(params, form, left):
    """With 3 iterations the smallest singular value of 16 is still on its way."""
    options = dict(learning_rate=1.0, adam_learning_rate=1e-3, warmup_steps=0)
    optimizer, _ = Muon(**options, **form).build(10)
    updates, _ = jax.jit(optimizer.update)(noise(params), optimizer.init(params), params)
    hidden = 0
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = path_name(path)
        if "/blocks" in name and name.endswith("kernel"):
            hidden += 1
            values = np.linalg.svd(np.asarray(update), compute_uv=False)
            assert values.max() < 2.5 * np.sort(values)[..., left].min(), name
        else:  # the first step of Adam is the sign of the gradient, 1 + 9/19 of it with Nesterov
            np.testing.assert_allclose(np.abs(update), 28 / 19 * 1e-3, rtol=1e-2, err_msg=name)
    assert hidden == 8 * (1 if params is SCANNED else 2)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(ns_steps=0), "optim.ns_steps must be at least 1, not 0"),
        (dict(preconditioning="none"), "one of frobenius, aol, not 'none'"),
    ],
)
def test_muon_refuses_what_would_orthogonalise_nothing(options, words):
    with pytest.raises(UserError, match=words):
        Muon(**options)


@pytest.mark.parametrize("momentum, b1", [(0.0, 0.9), (0.9, 0.0)])
def test_momentum_is_of_the_matrices_of_blocks_and_b1_of_the_rest(momentum, b1):
    """Whether a second step depends on the sign of the first gradient."""
    options = dict(warmup_steps=0, decay="constant", weight_decay=0.0, momentum=momentum, b1=b1)
    optimizer, _ = Muon(**options).build(10)
    first, last, update = noise(SCANNED), noise(SCANNED, seed=1), jax.jit(optimizer.update)

    def second(first):
        _, state = update(first, optimizer.init(SCANNED), SCANNED)
        return update(last, state, SCANNED)[0]

    found = second(first), second(jax.tree.map(jnp.negative, first))
    hidden = names(hidden_matrices(SCANNED), lambda leaf: isinstance(leaf, tuple))
    leaves = (jax.tree_util.tree_leaves_with_path(tree) for tree in found)
    for (path, one), (_, other) in zip(*leaves, strict=True):
        depends = (momentum if path_name(path) in hidden else b1) > 0
        apart = float(jnp.abs(one - other).max() / jnp.abs(one).max())
        assert apart > 0.1 if depends else apart < 1e-3, path_name(path)


def test_muon_labels():
    chosen = names(hidden_matrices(UNROLLED), lambda leaf: isinstance(leaf, tuple))
    assert "network/blocks_0/attention/query/kernel" in chosen
    assert not any("head" in name or "embedding" in name or "time" in name for name in chosen)


def test_muon_takes_the_matrices_of_every_network_with_blocks():
    """Those of attention and of feed-forward layers, whatever a network calls its blocks."""
    for make in OF_BLOCKS:
        network = make(**SIZES_OF[make]).build()
        params = jax.eval_shape(network.init, jax.random.key(0))
        matrices = names(decay_mask(params), lambda leaf: leaf is True)
        inner = {name for name in matrices if re.search("attention|feed_forward/", name)}
        chosen = names(hidden_matrices(params), lambda leaf: isinstance(leaf, tuple))
        left = {name for name in inner - chosen if not name.startswith("self_conditioning")}
        assert len(inner) >= 6 and not left, (make.__name__, left)


def test_the_clip_is_by_global_norm_and_zero_is_none():
    grads = {"a": jnp.full(9, 1.0), "b": jnp.full(16, 1.0)}
    clipped, _ = clipping(1.0).update(grads, clipping(1.0).init(grads))
    np.testing.assert_allclose(clipped["a"], 0.2, rtol=1e-6)
    for norm in (0.0, 6.0):
        kept, _ = clipping(norm).update(grads, clipping(norm).init(grads))
        np.testing.assert_allclose(kept["b"], 1.0)
    told, _ = clipping(1.0).update(grads, clipping(1.0).init(grads), norm=jnp.float32(10.0))
    np.testing.assert_allclose(told["a"], 0.1, rtol=1e-6)


@pytest.mark.parametrize(
    "options, bounded",
    [
        (AdamW(), True),
        (AdamW(clip=0.0, learning_rate=1e3, weight_decay=1e-4), True),
        (AdamW(eps=1e-30), False),
        (AdamW(eps=1.0, learning_rate=1e11), False),  # the process's Adam has an eps of its own
        (AdamW(process_learning_rate=1e11), False),
        (AdamW(learning_rate=1.0, weight_decay=2.0), False),
        (Muon(), True),
        (Muon(clip=0.0), False),
        (Muon(adam_learning_rate=1e11), False),
    ],
)
def test_which_optimizers_make_finite_updates_of_all_finite_gradients(options, bounded):
    assert options.build(10**6)[1].bounded == bounded
    assert not Rate.of(options.build(10**6)[0]).bounded  # of others nothing is known


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e19])
@pytest.mark.parametrize("options", [AdamW(clip=0.0), AdamW(learning_rate=1e9), Muon()])
@pytest.mark.cases(2)
def test_a_bounded_update_is_finite_at_the_ends_of_float32(options, size):
    optimizer, rate = options.build(10**6)
    assert rate.bounded
    grads = jax.tree.map(lambda x: jnp.zeros_like(x).at[(0,) * x.ndim].set(size), SCANNED)
    state, params = optimizer.init(SCANNED), SCANNED
    for _ in range(3):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))


@pytest.mark.slow
@every_optimizer
def test_a_clip_below_the_noise_changes_the_step_of_a_later_gradient(make):
    """The clip stands before the moments: a spike counts no more than any other step."""
    small, spike = noise(SCANNED), jax.tree.map(lambda x: 1e4 * x, noise(SCANNED, seed=1))

    def second(clip):
        optimizer, _ = make(warmup_steps=0, clip=clip).build(10)
        update = jax.jit(optimizer.update)
        _, state = update(spike, optimizer.init(SCANNED), SCANNED)
        return update(small, state, SCANNED)[0]

    def embedding(updates):
        return np.abs(updates["network"]["embedding"]).mean()

    assert np.abs(embedding(second(1.0)) - embedding(second(0.0))) > 1e-5
