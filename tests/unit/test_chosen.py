"""The last block at chosen positions: the same features, loss and gradient, with fewer products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import SIZES, perturbed

from md4_jax.networks import chosen
from md4_jax.networks.lfm2 import Lfm2
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.head import HALF, most_masked
from md4_jax.objectives.md4 import MD4
from md4_jax.perf.hlo import traffic
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import SCHEDULES
from md4_jax.protocols import batch_of

B, L, V = 4, 8, 5
UNROLLED = SIZES | dict(scan_blocks=False)
Z = jax.random.randint(jax.random.key(0), (B, L), 0, V + 1)
T = jnp.linspace(0.1, 0.9, B)
SEGMENTS = jnp.asarray(np.arange(L) // 5 + np.zeros((B, 1), int), jnp.int32)
OPTIONS = {
    "plain": {},
    "time-free, with gains": dict(time_conditioning=False, qk_norm=True),
    "grouped, with a class": dict(kv_heads=1, classes=3, feed_forward="gelu"),
    "dropout and adapters": dict(dropout=0.3, attention_dropout=0.2, lora_rank=2, lora_dropout=0.2),
    "convolution": dict(local_width=3),
    "short convolution": dict(attention_layers=(0,), dropout=0.3, lora_rank=2, lora_dropout=0.2),
}


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch):
    monkeypatch.setattr(chosen, "LEAST", 0)


def marked(count: int):
    """A mask of so many positions of [B, L]."""
    order = jax.random.permutation(jax.random.key(1), B * L)
    return (order < count).reshape(B, L)


def both(options: dict, where):
    """(features, gradient) at the marked positions, computed there alone and everywhere."""
    make = Lfm2 if "attention_layers" in options else Transformer
    network = make(**UNROLLED | options).build()
    params = perturbed(network.init(jax.random.key(0)))
    weight = jnp.where(where[..., None], jax.random.normal(jax.random.key(2), (B, L, 16)), 0.0)
    context = {"segments": SEGMENTS}
    if options.get("classes"):
        context["label"] = jnp.arange(B) % 4
    keys = jax.random.split(jax.random.key(3), B) if options.get("dropout") else None

    def of(name: str):
        def loss(params):
            denoiser = network.bind(params, context, keys)
            h = denoiser.features(Z, T)
            if name == "chosen":
                h = denoiser.features_where(Z, T, where)
            return jnp.sum(weight * h), jnp.where(where[..., None], h, 0.0)

        (_, h), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return h, gradient

    return of("chosen"), of("all")


@pytest.mark.quick(1)
@pytest.mark.parametrize("count", [0, 16, 17, 18, B * L])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.cases(3)
def test_features_and_gradients_are_those_of_all_positions(options, count):
    """17 of 32 positions fit into the first part; with more, the second is computed as well."""
    (h, gradient), (expected, its_gradient) = both(options, marked(count))
    np.testing.assert_allclose(h, expected, rtol=1e-5, atol=1e-5)
    for found, other in zip(*map(jax.tree.leaves, (gradient, its_gradient)), strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=3e-5 * (1 + np.abs(other).max()))


def test_the_last_block_computes_its_products_at_17_of_32_positions():
    """Counted in the compiled program: 15 of 32 fewer in three of the last block's layers.

    These are query and output, 2 x 16 x 16, and feed-forward, 3 x 16 x 24 multiplications a token.
    """
    network = Transformer(**UNROLLED | dict(time_conditioning=False)).build()
    params = network.init(jax.random.key(0))

    def flops(name: str) -> float:
        def run(z, where):
            denoiser = network.bind(params)
            if name == "all":
                return denoiser.features(z, T)
            return denoiser.features_where(z, T, where)

        return traffic(jax.jit(run).lower(Z, marked(16)).compile().as_text()).products

    saved = 2 * (2 * 16 * 16 + 3 * 16 * 24) * 15
    assert flops("all") - flops("chosen") == pytest.approx(saved, rel=0.01)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name, used", [("linear", True), ("polynomial", True), ("cosine", False)])
@pytest.mark.cases(1)
def test_a_loss_uses_it_if_at_most_half_of_the_tokens_are_masked(name, used):
    """At times t and 1 - t: (t^2 + (1 - t)^2) / 2 <= 1/2, but 1 - cos(pi/4) = 0.29 is clean."""
    network, process = Transformer(**UNROLLED).build(), Masking(V, SCHEDULES[name]())
    params = perturbed(network.init(jax.random.key(0)))
    denoiser, asked = network.bind(params), []

    def where(z, t, marks):
        asked.append(marks.shape)
        return denoiser.features(z, t)

    watched = denoiser._replace(accelerator=denoiser.accelerator._replace(features_where=where))
    batch = batch_of(jnp.asarray(Z % V))
    keys = jax.random.split(jax.random.key(4), B)
    MD4()(watched, process, batch, T, keys)
    assert asked == [(B, L)] * used
    assert (most_masked(process) <= HALF) == used
    loss, _ = MD4()(denoiser, process, batch, T, keys)
    plain = denoiser._replace(accelerator=denoiser.accelerator._replace(features_where=None))
    np.testing.assert_allclose(loss, MD4()(plain, process, batch, T, keys)[0], rtol=1e-5)


def test_the_most_that_schedules_mask():
    """Of tokens at times t and 1 - t: 1/2 for alpha = 1 - t; 1 - cos(pi/4) at t = 1/2 if cosine."""
    assert most_masked(Masking(V, SCHEDULES["linear"]())) == pytest.approx(0.5)
    assert most_masked(Masking(V, SCHEDULES["cosine"]())) == pytest.approx(
        np.sin(np.pi / 4), rel=1e-3
    )


@pytest.mark.parametrize(
    "key, value", [("scan_blocks", True), ("remat", "dots"), ("shifted", True)]
)
def test_networks_that_compute_all_positions(key, value):
    options = SIZES | dict(scan_blocks=False) | {key: value}
    network = Transformer(**options).build()
    denoiser = network.bind(network.init(jax.random.key(0)))
    assert denoiser.accelerator.features_where is None


def test_small_batches_compute_all_positions(monkeypatch):
    monkeypatch.setattr(chosen, "LEAST", B * L * 16 + 1)
    network = Transformer(**UNROLLED).build()
    params = perturbed(network.init(jax.random.key(0)))
    denoiser = network.bind(params)
    h = denoiser.features_where(Z, T, jnp.zeros((B, L), bool))
    np.testing.assert_array_equal(h, denoiser.features(Z, T))


def test_another_time_input_reaches_it_too():
    network = Transformer(**UNROLLED).build()
    denoiser = network.bind(perturbed(network.init(jax.random.key(0))))
    found = denoiser.with_signal(lambda t: 1 - t).features_where(Z, T, marked(16))
    expected = jnp.where(marked(16)[..., None], denoiser.features(Z, 1 - T), 0.0)
    np.testing.assert_allclose(
        jnp.where(marked(16)[..., None], found, 0.0), expected, rtol=1e-5, atol=1e-5
    )
