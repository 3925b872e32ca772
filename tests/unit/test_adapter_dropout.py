"""Dropout of what low-rank adapters read: in training alone, with the mean kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import SIZES, T, Z, random_parameters

from md4_jax.networks import dropout
from md4_jax.networks.dropout import for_adapter
from md4_jax.networks.feed_forward import FeedForward
from md4_jax.networks.layers import whole
from md4_jax.networks.linear import Linear
from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import UserError

RATE, MANY = 0.3, 4000
OPTIONS = Transformer(**SIZES, lora_rank=2, lora_alpha=6.0, lora_dropout=RATE)
KEYS = jax.random.split(jax.random.key(3), 3)


def built(**changes):
    """A network with dropout of its adapters' inputs, one without, and parameters of both."""
    options = dataclasses.replace(OPTIONS, **changes)
    network = options.build()
    params = random_parameters(network)
    return network, dataclasses.replace(options, lora_dropout=0.0).build(), params


def features(network, params, keys, index=None) -> np.ndarray:
    def run(params, keys):
        return network.bind(params, {}, keys).accelerator.features_at(Z, T, index)

    return np.asarray(jax.jit(run)(params, keys))


def adapted_layer():
    """x, a layer's parameters, and what its adapter adds to each input, [in, out], in float64."""
    rng = np.random.default_rng(0)
    x, w, a, b = (rng.standard_normal(s) for s in ((2, 5), (5, 4), (5, 2), (2, 4)))
    params = {"kernel": w, "lora_a": {"kernel": a}, "lora_b": {"kernel": b}}
    return x, w, jax.tree.map(jnp.float32, params), 6.0 / 2.0 * a @ b


def test_the_mean_and_the_spread_are_those_of_dropped_inputs():
    """With s A B = C the mean of x W + y C is x (W + C), its variance p / (1 - p) sum x^2 C^2.

    Over 4,000 draws, within 5 standard errors; W reads all of x.
    """
    x, w, params, c = adapted_layer()
    many = jnp.asarray(np.broadcast_to(x, (MANY, *x.shape)), jnp.float32)
    keys = jax.random.split(jax.random.key(1), MANY)
    layer = Linear(4, jnp.float32, rank=2, alpha=6.0)
    read = for_adapter(OPTIONS, "query", many, keys, 2, whole)
    found = np.asarray(layer.apply({"params": params}, many, read), np.float64)
    share = np.mean(np.asarray(read) == 0)
    assert abs(share - RATE) < 5 * np.sqrt(RATE * (1 - RATE) / read.size)
    error = found.std(axis=0) / np.sqrt(MANY)
    assert (np.abs(found.mean(axis=0) - x @ (w + c)) < 5 * error).all()
    spread = RATE / (1 - RATE) * x**2 @ c**2
    own = (found - found.mean(axis=0)) ** 2
    assert (np.abs(own.mean(axis=0) - spread) < 5 * own.std(axis=0) / np.sqrt(MANY)).all()
    nothing = {**params, "lora_b": {"kernel": jnp.zeros((2, 4))}}
    plain = layer.apply({"params": nothing}, many)
    np.testing.assert_array_equal(layer.apply({"params": nothing}, many, read), plain)


def test_the_mean_of_a_feed_forward_layer_is_kept():
    """Where its last adapter alone adds something, since the others are within its activation."""
    o = OPTIONS.resolved("cpu")
    module, x = FeedForward(o, False), jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 16)))
    params = module.init(jax.random.key(0), x, None, 3, whole)["params"]
    params["down"]["lora_b"]["kernel"] = jax.random.normal(jax.random.key(2), (2, 16))
    plain = module.apply({"params": params}, x, None, 3, whole)
    many, keys = jnp.repeat(x, MANY, axis=0), jax.random.split(jax.random.key(5), MANY)
    found = np.asarray(module.apply({"params": params}, many, keys, 3, whole), np.float64)
    error = found.std(axis=0) / np.sqrt(MANY)
    assert error.min() > 0
    assert (np.abs(found.mean(axis=0) - plain[0]) < 5 * error).all()


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.cases(1)
def test_it_is_off_without_keys(scan):
    """In evaluation, sampling and the judgement of the moving average no keys are given."""
    network, plain, params = built(scan_blocks=scan)
    expected = features(plain, params, None)
    assert features(network, params, None).tobytes() == expected.tobytes()
    assert features(plain, params, KEYS).tobytes() == expected.tobytes()
    assert np.abs(features(network, params, KEYS) - expected).max() > 0.1


def test_without_effect_of_the_adapters_nothing_changes():
    network, plain, params = built()
    zero = lambda p, x: jnp.zeros_like(x) if "lora_b" in str(p) else x  # noqa: E731
    params = jax.tree_util.tree_map_with_path(zero, params)
    np.testing.assert_array_equal(features(network, params, KEYS), features(plain, params, None))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.campaign
def test_the_positions_that_are_asked_for_change_no_draw(scan):
    network, _, params = built(scan_blocks=scan)
    index = jnp.asarray([[5, 0], [2, 3], [1, 1]])
    found, all_of_them = features(network, params, KEYS, index), features(network, params, KEYS)
    expected = np.take_along_axis(all_of_them, np.asarray(index)[..., None], 1)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    alone = jax.jit(lambda keys: network.bind(params, {}, keys).features(Z[1:2], T[1:2]))
    np.testing.assert_allclose(alone(KEYS[1:2])[0], all_of_them[1], atol=1e-4)
    assert np.abs(alone(KEYS[:1])[0] - all_of_them[1]).max() > 0.1


@pytest.mark.campaign
def test_block_diffusion_drops_too():
    network, plain, params = built(time_conditioning=False)
    times, clean = jnp.zeros((3, 3)), jnp.zeros_like(Z)

    def run(network, keys):
        made = lambda keys: network.bind(params, {}, keys).blocks.features(Z, times, clean, 2)  # noqa: E731
        return jax.jit(made)(keys)

    np.testing.assert_array_equal(run(network, None), run(plain, None))
    assert np.abs(run(network, KEYS) - run(plain, None)).max() > 0.1


def test_every_adapter_has_draws_of_its_own(monkeypatch):
    """Seven in each of two layers, besides one that drops a branch."""
    network, _, params = built(scan_blocks=False, dropout=RATE)
    found, real = [], dropout.kept

    def kept(keys, rate, shape):
        found.append(np.asarray(jax.random.key_data(keys)))
        return real(keys, rate, shape)

    for module in ("layers", "dropout"):  # of branches, and of what adapters read
        monkeypatch.setattr(f"md4_jax.networks.{module}.kept", kept)
    network.bind(params, {}, KEYS).features(Z, T)
    assert len(found) == 2 * (7 + 2)
    every = np.concatenate([*found, np.asarray(jax.random.key_data(KEYS))])
    assert len({tuple(row) for row in every}) == len(every)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(lora_dropout=1.0), r"network.lora_dropout must lie in \[0, 1\), not 1.0"),
        (dict(lora_dropout=-0.1), r"network.lora_dropout must lie in \[0, 1\), not -0.1"),
        (
            dict(lora_rank=0),
            "lora_dropout=0.3 applies to the inputs of adapters, but network.lora_r",
        ),
    ],
)
def test_rates_that_are_none(changes, said):
    with pytest.raises(UserError, match=said):
        dataclasses.replace(OPTIONS, **changes)
