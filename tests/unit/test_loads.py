"""How many tokens each expert is given, and how large the scores of the router are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from several_devices import on_eight_devices
from tiny_networks import perturbed

from md4_jax.networks import experts
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.md4 import MD4
from md4_jax.options import MeshOptions, TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Needs, UserError, batch_of
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.sharding import shardings_of
from md4_jax.training import loads
from md4_jax.training.step import init_state, make_train_step

FIGURES = ("expert_load", "expert_load_max", "experts_idle")
# The first layer has no experts. Two tokens of eight experts a token.
SMALL = Transformer(
    5, size=16, depth=3, heads=2, hidden=24, experts=8, expert_hidden=4, dense_layers=1,
    time_conditioning=False,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 5, (8, 6))


def begun(options=SMALL, rate=0.0):
    """(network, state before the first step) with parameters far from zero."""
    network = options.build()
    state = jax.jit(lambda: init_state(jax.random.key(0), network, Masking(5), optax.sgd(rate)))()
    return network, state._replace(params=perturbed(state.params))


@functools.cache
def plain():
    """(network, state, what a step of it gives)."""
    network, state = begun()
    return network, state, stepped(network, state, rate=0.1)


def stepped(network, state, rate=0.0, **options):
    options = TrainOptions(batch_size=len(TOKENS), **options)
    step = jax.jit(make_train_step(network, MD4(), optax.sgd(rate), options))
    return step(state, batch_of(TOKENS))


def test_the_figures_of_counts_by_hand():
    """Eight choices of four experts: one layer is even, of the other two experts take all."""
    scanned = jnp.array([[2.0, 2, 2, 2], [0, 6, 2, 0]])
    found = loads.figures({"a": {"load": scanned}, "b": jnp.array([8.0, 0, 0, 0])})
    assert {name: float(x) for name, x in found.items()} == pytest.approx(
        {"expert_load": (1 + 3 + 4) / 3, "expert_load_max": 4.0, "experts_idle": 5 / 12}
    )
    assert loads.figures({}) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"remat": "full"}, {"scan_blocks": False, "router": "sigmoid", "router_bias": True}],
    ids=["scan", "loop"],
)
@pytest.mark.cases(1)
def test_a_step_logs_the_choices_that_the_routers_make(changes, monkeypatch):
    """Those of all layers in its one pass, which a callback sees."""
    network, state = begun(dataclasses.replace(SMALL, **changes))
    seen, real = [], experts.choices

    def watched(index, count):
        jax.debug.callback(lambda x: seen.append(np.bincount(x.ravel(), minlength=count)), index)
        return real(index, count)

    monkeypatch.setattr(experts, "choices", watched)
    after, metrics = jax.block_until_ready(stepped(network, state))
    jax.effects_barrier()
    layers = {tuple(x): np.array(x) for x in seen}  # a block that is recomputed is seen twice
    assert len(layers) == 2 and all(x.sum() == 2 * TOKENS.size for x in layers.values())
    own = [8 * x.max() / x.sum() for x in layers.values()]
    idle = np.mean([x == 0 for x in layers.values()])
    np.testing.assert_allclose(
        [metrics[name] for name in FIGURES], [np.mean(own), max(own), idle], rtol=1e-6
    )
    assert jax.tree.structure(after.params) == jax.tree.structure(state.params)


@pytest.mark.campaign
def test_counting_changes_no_number_and_no_network_without_experts(monkeypatch):
    network, state, told = plain()
    monkeypatch.setattr(loads, "meters", lambda params: {})
    silent = stepped(network, state, rate=0.1)
    assert set(told[1]) - set(silent[1]) == set(FIGURES)
    jax.tree.map(np.testing.assert_array_equal, told[0], silent[0])
    np.testing.assert_array_equal(told[1]["nats"], silent[1]["nats"])
    monkeypatch.undo()
    layers = {"feed_forward": {name: {"kernel": jnp.zeros((2, 3))} for name in ("gate", "up")}}
    assert loads.meters({"network": layers, "process": {}, "other": jnp.zeros(2)}) == {}


@pytest.mark.campaign
def test_microbatches_count_the_whole_batch():
    network, state, (_, whole) = plain()
    parts = stepped(network, state, microbatches=4)[1]
    for name in FIGURES:
        np.testing.assert_allclose(whole[name], parts[name], rtol=1e-6)


@pytest.mark.campaign
def test_frozen_routers_are_counted_too():
    """Of adapters, beside which all of them are frozen."""
    options = dataclasses.replace(SMALL, lora_rank=2)
    network, state = begun(options)
    assert state.frozen["network"]["blocks"]["feed_forward"]["router"]
    _, metrics = stepped(network, state)
    assert 1.0 < float(metrics["expert_load"]) <= 4.0


def test_the_size_of_logits_by_hand():
    logits = np.log(np.array([[[1.0, 2, 3], [0.5, 0.25, 0.25]]]))
    assert float(experts.size_of_logits(logits)) == pytest.approx(np.log(6.0) ** 2 / 2, rel=1e-6)


class OfTokens:
    """A loss of what the network says of the tokens, whichever of them count."""

    needs = Needs((Masking,))

    def __call__(self, denoiser, process, batch, u, keys):
        del process, keys
        return jnp.sum(jnp.sin(denoiser.features(batch.tokens, u)), axis=(1, 2)), {}


@pytest.mark.campaign
def test_the_balance_is_as_strong_where_few_tokens_count():
    """What it adds to the gradient of a router is the same if 1 of 6 tokens counts."""
    options = TrainOptions(batch_size=len(TOKENS))
    few = np.zeros(TOKENS.shape, bool)
    few[:, 2] = True

    def routers(balance):
        network, state = begun(dataclasses.replace(SMALL, balance=balance))
        step = jax.jit(make_train_step(network, OfTokens(), optax.sgd(1.0), options))
        for mask in (few | True, few):
            after, _ = step(state, batch_of(TOKENS, loss_mask=mask))
            change = jax.tree.map(jnp.subtract, state.params, after.params)
            yield change["network"]["blocks"]["feed_forward"]["router"]["kernel"]

    whole, part = (pulled - free for pulled, free in zip(routers(0.3), routers(0.0), strict=True))
    assert np.abs(whole).max() > 1e-3
    np.testing.assert_allclose(part, whole, atol=2e-5)


@pytest.mark.campaign
def test_router_z_is_in_the_gradient_of_training_and_in_no_loss():
    """Of one token, whose experts have no weights: the gradient of log^2 (sum of exp), by hand."""
    options = dataclasses.replace(SMALL, router_z=0.5).resolved("cpu")
    router, x = experts.Router(options), np.random.default_rng(1).normal(size=(1, 1, 16))
    kernel = np.random.default_rng(2).normal(size=(16, 8))

    def weights(kernel, keys):
        return 0.0 * jnp.sum(router.apply({"params": {"kernel": kernel}}, x, keys)[1])

    found = jax.grad(weights)(kernel.astype(np.float32), jax.random.split(jax.random.key(0), 1))
    told = np.exp(x[0, 0] @ kernel)
    expected = 0.5 / 2 * 2 * np.log(told.sum()) * np.outer(x[0, 0], told / told.sum())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not np.any(jax.grad(weights)(kernel.astype(np.float32), None))
    _, state, (_, alone) = plain()
    _, pulled = stepped(dataclasses.replace(SMALL, router_z=0.5).build(), state, rate=0.1)
    np.testing.assert_allclose(pulled["nats"], alone["nats"], rtol=1e-6)
    assert abs(pulled["grad_norm"] - alone["grad_norm"]) > 1e-3


def test_the_gradients_move_towards_balance_and_small_logits():
    """The terms alone, of a router whose first expert is the favourite of all tokens."""
    options = dataclasses.replace(SMALL, depth=1, dense_layers=0, balance=1.0, router_z=0.01)
    layer = experts.Experts(options.resolved("cpu"), False)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(4, 16, 16)) + 1.0, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4)
    rest = (0, lambda x: x)
    params = perturbed(layer.init(jax.random.key(0), x, None, *rest)["params"], 0.1)
    params["router"]["kernel"] = params["router"]["kernel"] + 0.3 * (np.arange(8) == 0)

    def one(params):
        out = layer.apply({"params": params}, x, keys, *rest)
        return 0.0 * jnp.sum(out)

    @jax.jit
    def measured(params):
        metered = params | {"router": params["router"] | {"load": jnp.zeros(8)}}
        counts = jax.grad(one)(metered)["router"]["load"]
        logits = x @ params["router"]["kernel"]
        return loads.figures({"load": counts})["expert_load"], experts.size_of_logits(logits)

    (load, size), slope = measured(params), jax.jit(jax.grad(one))
    for _ in range(60):
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, slope(params))
    after = measured(params)
    assert float(load) > 3.5 and float(after[0]) < 0.6 * float(load)
    assert float(after[1]) < 0.8 * float(size)


def test_the_weight_of_the_size_of_logits_must_fit():
    with pytest.raises(UserError, match="router_z"):
        dataclasses.replace(SMALL, router_z=-0.1)
    with pytest.raises(UserError, match="router_z=0.1 is only for mixture-of-experts"):
        dataclasses.replace(SMALL, experts=0, dense_layers=0, router_z=0.1)


def on_meshes() -> None:
    """Figures, balance and size of logits are those of the global batch."""
    network, state = begun(dataclasses.replace(SMALL, depth=2, balance=0.1, router_z=0.1))
    after, expected = stepped(network, state, rate=0.1)
    mesh = make_mesh(MeshOptions(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        split = jax.device_put(state, shardings_of(state, mesh))
        there, found = stepped(network, split, rate=0.1)
    for name in FIGURES:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4),
        there.params, after.params,
    )  # fmt: skip
    print("meshes agree")


@pytest.mark.slow
@pytest.mark.campaign
def test_meshes_count_the_same():
    assert "meshes agree" in on_eight_devices("test_loads", "on_meshes")
