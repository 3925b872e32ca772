"""Low-rank adapters: what they add, their gradient, and what stays frozen beside them."""

import dataclasses
import functools

import chex
import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from md4_jax.networks.adapters import merged
from md4_jax.networks.dit import DiT
from md4_jax.networks.linear import Linear
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives import OBJECTIVES
from md4_jax.options import TrainOptions
from md4_jax.perf import bench
from md4_jax.processes.masking import Masking
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import path_name
from md4_jax.training.optim import OPTIMIZERS
from md4_jax.training.step import init_state, make_train_step
from md4_jax.training.trainable import divided, joined, matching

V, RANK, ALPHA = 5, 2, 3.0
PLAIN = Transformer(V, size=16, depth=2, heads=2, hidden=24, kv_heads=1, feed_forward="swiglu")
ADAPTED = dataclasses.replace(PLAIN, lora_rank=RANK, lora_alpha=ALPHA)
IMAGE = DiT(3, size=16, depth=2, heads=2, hidden=16, shape=(4, 4, 1), head_size=8)
X = np.random.default_rng(0).integers(0, V, (8, 6))
OPTIONS = TrainOptions(batch_size=8, ema=0.5, seed=3)
LAYERS = ("query", "key", "value", "out", "gate", "up", "down")


def paths(tree) -> dict[str, jax.Array]:
    return {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


@functools.cache
def fresh(options):
    """The first parameters of a network, by one program instead of one for each operation."""
    return jax.jit(options.build().init)(jax.random.key(0))


def shaken(params, seed=0):
    """The parameters, with noise on all of them: fresh ones have heads and branches of zeros."""
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    noisy = [x + 0.3 * rng.standard_normal(x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(structure, noisy)


def logits(options, params, z, t=0.4) -> np.ndarray:
    network = options.build()
    told = {"network": params, "process": Masking(options.vocab_size)}
    found = jax.jit(lambda told, z, t: network.denoiser(told)(z, t))
    return np.asarray(found(told, jnp.asarray(z), jnp.full(len(z), t)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("plain", [PLAIN, IMAGE], ids=["transformer", "dit"])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.cases(1)
def test_fresh_adapters_change_no_bit(plain, scan):
    """Of the parameters beside them, nor of the logits. Every linear layer of a block has one."""
    plain = dataclasses.replace(plain, scan_blocks=scan)
    adapted = dataclasses.replace(plain, lora_rank=RANK)
    before, after = fresh(plain), fresh(adapted)
    rest = matching(after, adapted.adapters, matches=False)
    chex.assert_trees_all_equal(rest, before)
    pairs = {name for name in paths(after) if "lora" in name}
    blocks = ["blocks"] if scan else ["blocks_0", "blocks_1"]
    assert len(pairs) == 2 * len(LAYERS) * len(blocks)
    assert all(any(f"/{layer}/lora_a" in name for name in pairs) for layer in LAYERS)
    shapes = paths(after)
    for name in pairs:
        values = np.asarray(shapes[name])
        assert (values == 0).all() if "lora_b" in name else (values != 0).all()
    base = shaken(rest)
    z = np.random.default_rng(1).integers(0, plain.vocab_size + 1, (3, 16))
    found = logits(adapted, joined(base, matching(after, adapted.adapters)), z)
    expected = logits(plain, base, z)
    assert found.tobytes() == expected.tobytes() and np.ptp(expected) > 1


def test_the_initial_values_of_an_adapter():
    """A is uniform with variance 1 / (3 in), as torch's linear layers."""
    layer = Linear(7, jnp.float32, rank=64, alpha=1.0)
    a = np.asarray(layer.init(jax.random.key(1), jnp.ones((1, 400)))["params"]["lora_a"]["kernel"])
    assert a.shape == (400, 64) and np.abs(a).max() <= 400**-0.5
    # The variance of a uniform variable's square is 4/45 of the fourth power of its bound.
    error = (4 / 45) ** 0.5 / 400 / a.size**0.5
    assert abs(np.mean(a.astype(np.float64) ** 2) - 1 / 1200) < 4 * error


def test_a_layer_and_its_gradient_are_those_of_the_dense_formula():
    """y = x W + alpha / rank (x A) B, and by the chain rule in float64."""
    rng = np.random.default_rng(2)
    x, w, a, b, g = (rng.standard_normal(s) for s in ((9, 4), (4, 6), (4, 2), (2, 6), (9, 6)))
    layer, scale = Linear(6, jnp.float32, rank=2, alpha=5.0), 2.5
    params = {"kernel": w, "lora_a": {"kernel": a}, "lora_b": {"kernel": b}}
    params = jax.tree.map(jnp.float32, params)

    def loss(params):
        return jnp.sum(layer.apply({"params": params}, jnp.float32(x)) * g)

    y = layer.apply({"params": params}, jnp.float32(x))
    np.testing.assert_allclose(y, x @ w + scale * x @ a @ b, rtol=1e-5, atol=1e-5)
    found = jax.grad(loss)(params)
    np.testing.assert_allclose(found["lora_a"]["kernel"], scale * x.T @ g @ b.T, rtol=1e-4)
    np.testing.assert_allclose(found["lora_b"]["kernel"], scale * a.T @ x.T @ g, rtol=1e-4)
    np.testing.assert_allclose(found["kernel"], x.T @ g, rtol=1e-4)


def loss_of(options, params):
    network = options.build()

    def loss(params):
        whole = {"network": params, "process": Masking(V)}
        u, keys = (jnp.arange(8) + 0.5) / 8, jax.random.split(jax.random.key(7), 8)
        denoiser = network.denoiser(whole)
        nats, _ = OBJECTIVES["any_order"]()(denoiser, Masking(V), exact.batch_of(X), u, keys)
        return jnp.mean(nats)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.cases(1)
def test_merged_matrices_give_the_same_logits_and_the_gradient(scan):
    """With G the gradient of the merged W: that of A is s G B^T, and that of B is s A^T G."""
    adapted = dataclasses.replace(ADAPTED, scan_blocks=scan)
    plain = dataclasses.replace(PLAIN, scan_blocks=scan)
    params = shaken(fresh(adapted))
    scale = ALPHA / RANK
    dense = merged(params, scale)
    chex.assert_trees_all_equal_shapes(dense, fresh(plain))
    z = np.random.default_rng(1).integers(0, V + 1, (3, 6))
    found, expected = logits(adapted, params, z), logits(plain, dense, z)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    without = logits(plain, matching(params, adapted.adapters, matches=False), z)
    assert np.abs(found - without).max() > 0.1
    (value, slopes), (same, of_dense) = loss_of(adapted, params), loss_of(plain, dense)
    np.testing.assert_allclose(value, same, rtol=1e-5)
    slopes, of_dense, values = paths(slopes), paths(of_dense), paths(params)
    checked = 0
    for name in [name for name in slopes if name.endswith("lora_a/kernel")]:
        layer = name.removesuffix("/lora_a/kernel")
        g = np.asarray(of_dense[f"{layer}/kernel"], np.float64)
        a, b = (np.asarray(values[f"{layer}/lora_{x}/kernel"], np.float64) for x in "ab")
        for x, wanted in (("a", g @ b.swapaxes(-1, -2)), ("b", a.swapaxes(-1, -2) @ g)):
            own = np.asarray(slopes[f"{layer}/lora_{x}/kernel"])
            size = np.abs(wanted).max()
            np.testing.assert_allclose(own, scale * wanted, atol=1e-3 * size, err_msg=name)
            checked += size > 0
    assert checked == 2 * len(LAYERS) * (1 if scan else 2)


def started(options=ADAPTED, optimizer=None, trainable=""):
    """A state whose frozen parameters are those of a network that is no longer fresh."""
    optimizer = optimizer or OPTIMIZERS["adamw"](warmup_steps=0, learning_rate=0.1).build(10)[0]
    network = options.build()
    make = lambda: init_state(jax.random.key(0), network, Masking(V), optimizer, trainable)  # noqa: E731
    state = jax.jit(make)()
    frozen = jax.tree.map(lambda x, y: x.astype(y.dtype), shaken(state.frozen), state.frozen)
    return network, optimizer, state._replace(frozen=frozen)


def trained(network, optimizer, state, steps=3, **changes):
    options = dataclasses.replace(OPTIONS, **changes)
    step = jax.jit(make_train_step(network, OBJECTIVES["any_order"](), optimizer, options))
    for _ in range(steps):
        state, metrics = step(state, exact.batch_of(X))
    return state, metrics


def sizes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype, scan", [("adamw", "float32", True), ("muon", "bfloat16", False)]
)
@pytest.mark.cases(1)
def test_steps_move_the_adapters_alone(name, dtype, scan):
    """What is frozen stays bit for bit, has one copy, and no part in average and optimizer."""
    options = dataclasses.replace(ADAPTED, parameters=dtype, scan_blocks=scan)
    network, optimizer, state = started(options, OPTIMIZERS[name](warmup_steps=0).build(10)[0])
    after, metrics = trained(network, optimizer, state)
    assert int(metrics["skipped"]) == 0 and float(metrics["grad_norm"]) > 0.01
    chex.assert_trees_all_equal(after.frozen, state.frozen)
    before, moved = paths(state.params), paths(after.params)
    assert before.keys() == {n for n in paths(state.whole) if "lora" in n}
    assert all((moved[n] != before[n]).any() for n in before)
    assert paths(after.ema).keys() == before.keys()
    assert not [n for n in paths(after.opt_state) if "kernel" in n and "lora" not in n]
    # Parameters, average and moments of what is trained, all float32, and a few counts.
    assert {x.dtype for x in before.values()} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(after.frozen)} == {jnp.dtype(dtype)}
    copies = {"adamw": 4, "muon": 3}[name]  # Muon has no second moment
    rest = sizes(after) - sizes(after.frozen) - copies * sizes(after.params)
    assert 0 <= rest < 300
    whole = sum(x.size for x in jax.tree.leaves(fresh(PLAIN)))
    assert sizes(after.frozen) == whole * jnp.dtype(dtype).itemsize


@pytest.mark.campaign
def test_the_step_computes_with_what_is_frozen():
    """Its loss is that of all parameters, and its first update that of their gradient."""
    network, optimizer, state = started(optimizer=optax.sgd(1.0))
    state = state._replace(params={**state.params, "network": shaken(state.params["network"])})
    after, metrics = trained(network, optimizer, state, steps=1)
    unadapted = network._replace(adapters="")
    plain = jax.jit(lambda: init_state(jax.random.key(0), unadapted, Masking(V), optimizer))()
    all_trained = plain._replace(params=state.whole, ema=state.whole)
    other, expected = trained(unadapted, optimizer, all_trained, steps=1)
    np.testing.assert_allclose(metrics["nats"], expected["nats"], rtol=1e-6)
    wanted = matching(other.params["network"], network.adapters)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        after.params["network"], wanted,
    )  # fmt: skip
    average, frozen = (tree["network"] for tree in (after.averaged, state.frozen))
    chex.assert_trees_all_equal(matching(average, "lora", matches=False), frozen)


@pytest.mark.campaign
def test_the_step_drops_what_adapters_read():
    """Its loss is another one, of the same parameters and the same noise."""
    network, optimizer, state = started(optimizer=optax.sgd(0.0))
    state = state._replace(params={**state.params, "network": shaken(state.params["network"])})
    dropping = dataclasses.replace(ADAPTED, lora_dropout=0.5).build()
    found, expected = (
        float(trained(made, optimizer, state, steps=1)[1]["nats"]) for made in (dropping, network)
    )
    assert np.isfinite(found) and abs(found - expected) > 1e-3


@pytest.mark.campaign
def test_microbatches_change_nothing_but_rounding():
    network, optimizer, state = started(optimizer=optax.sgd(0.1))
    whole, _ = trained(network, optimizer, state, steps=2)
    parts, _ = trained(network, optimizer, state, steps=2, microbatches=4)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # noqa: E731
    jax.tree.map(close, parts.params["network"], whole.params["network"])
    chex.assert_trees_all_equal(parts.frozen, state.frozen)


def test_an_expression_chooses_what_is_trained():
    """Of any network; what the process learns is trained beside it."""
    network = PLAIN.build()
    params = {"network": fresh(PLAIN), "process": {"raw_power": jnp.ones(5)}}
    params_of, frozen = divided(params, network, "head|norm/")
    names = set(paths(params_of["network"]))
    assert names == {n for n in paths(params["network"]) if "head" in n or "norm/" in n}
    assert set(paths(frozen["network"])) == set(paths(params["network"])) - names
    assert params_of["process"] is params["process"] and frozen.keys() == {"network"}
    chex.assert_trees_all_equal(joined(params_of, frozen), params)
    assert divided(params, network, "") == (params, ())
    assert divided(params, network, ".") == (params, ())
    # Some layers' adapters alone, as PEFT's target_modules.
    network = ADAPTED.build()
    params = {"network": fresh(ADAPTED), "process": Masking(V)}
    chosen, _ = divided(params, network, "attention/(query|value)/lora")
    assert len(paths(chosen["network"])) == 4


@pytest.mark.parametrize(
    "trainable, options, said",
    [
        ("lora", PLAIN, r"trainable='lora' matches none of the network's \d+ parameters.*blocks/"),
        ("head", ADAPTED, r"trainable='head' matches none of the adapters of network.lora_rank"),
        (".", ADAPTED, r"trainable='.' matches all \d+ parameters, but adapters are only useful"),
    ],
)
def test_expressions_that_divide_nothing_are_refused(trainable, options, said):
    network = options.build()
    shapes = jax.eval_shape(lambda: {"network": network.init(jax.random.key(0)), "process": {}})
    with pytest.raises(UserError, match=said):
        divided(shapes, network, trainable)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(lora_rank=-1), "network.lora_rank must not be negative, not -1"),
        (dict(lora_rank=17), "network.lora_rank=17 must be at most network.size=16"),
        (dict(lora_alpha=0.0), "network.lora_alpha must be above 0, not 0.0"),
        (dict(parameters="float16"), "network.parameters must be float32 or bfloat16"),
    ],
)
def test_options_that_are_wrong(changes, said):
    with pytest.raises(UserError, match=said):
        dataclasses.replace(PLAIN, **changes)


def test_an_expression_that_is_none():
    with pytest.raises(
        UserError, match=r"train.trainable='\(' is not a regular expression: missing"
    ):
        TrainOptions(trainable="(")


def test_a_frozen_matrix_costs_two_thirds_of_the_products():
    """It has no gradient; all matrices with one cost three times a forward pass."""
    network, _, state = started()
    experiment = type("E", (), {"network": network, "objective": None, "data": OPTIONS})
    experiment.data = type("D", (), {"length": 6})
    forward = lambda params: network.flops(params, 6, 0)  # noqa: E731
    whole = state.whole["network"]
    adapters = sum(x.size for x in jax.tree.leaves(state.params["network"]))
    of_sequence = ("time_in", "time_out", "modulation")
    matrices = sum(
        x.size
        for name, x in paths(whole).items()
        if name.endswith("kernel") and name.split("/")[-2] not in of_sequence
    )
    attention = forward(whole) - 2.0 * matrices
    found = bench.training_flops(experiment, state)
    assert found == pytest.approx(4.0 * matrices + 2.0 * adapters + 3.0 * attention)
    all_trained = state._replace(params=state.whole, frozen=())
    assert bench.training_flops(experiment, all_trained) == pytest.approx(3 * forward(whole))
