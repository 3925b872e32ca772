"""The first block of few symbols: the same features and gradients, with fewer products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import SIZES, perturbed

from md4_jax.networks import by_symbol
from md4_jax.networks.transformer import Transformer
from md4_jax.perf.hlo import traffic
from md4_jax.protocols import Mixture

B, L, V = 3, 24, 5
UNROLLED = SIZES | dict(scan_blocks=False)
Z = jax.random.randint(jax.random.key(0), (B, L), 0, V + 1)
T = jnp.linspace(0.1, 0.9, B)
SEGMENTS = jnp.asarray(np.arange(L) // 5 + np.zeros((B, 1), int), jnp.int32)
OPTIONS = {
    "plain": {},
    "time-free, with gains": dict(time_conditioning=False, qk_norm=True),
    "causal, grouped, with a class": dict(kv_heads=1, classes=3, causal=True, qkv_bias=True),
    "dropout": dict(dropout=0.3, attention_dropout=0.2),
    "narrow embedding": dict(embedding=8, tied=False, lora_rank=2),
}


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch):
    monkeypatch.setattr(by_symbol, "LEAST", 0)


def network(**options):
    return Transformer(**UNROLLED | options).build()


def without(monkeypatch):
    """Lets the first block read each token."""
    monkeypatch.setattr(by_symbol, "LEAST_TOKENS", L)


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.cases(1)
def test_features_and_gradients_are_those_of_each_token(options, monkeypatch):
    made = network(**options)
    params = perturbed(made.init(jax.random.key(0)))
    weight = jax.random.normal(jax.random.key(2), (B, L, 16))
    context = {"segments": SEGMENTS}
    if options.get("classes"):
        context["label"] = jnp.arange(B) % 4
    keys = jax.random.split(jax.random.key(3), B) if options.get("dropout") else None

    def of(params):
        def loss(params):
            h = made.bind(params, context, keys).features(Z, T)
            return jnp.sum(weight * h), h

        (_, h), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return h, gradient

    h, gradient = of(params)
    without(monkeypatch)
    expected, its_gradient = of(params)
    np.testing.assert_allclose(h, expected, rtol=1e-5, atol=1e-5)
    for found, other in zip(*map(jax.tree.leaves, (gradient, its_gradient)), strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-5 * (1 + np.abs(other).max()))


def flops(made, z) -> float:
    def run(z):
        return made.bind(params).features(z, jnp.zeros(z.shape[0]))

    params = made.init(jax.random.key(0))
    return traffic(jax.jit(run).lower(z).compile().as_text()).products


def test_the_first_block_projects_six_symbols_instead_of_24_tokens(monkeypatch):
    """Counted in the compiled program: 3 x 16 x 16 multiplications for 18 fewer rows of each."""
    made = network(time_conditioning=False)
    found = flops(made, Z)
    without(monkeypatch)
    assert flops(made, Z) - found == pytest.approx(2 * 3 * 16 * 16 * 18 * B, rel=0.01)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    [
        dict(local_width=3),
        dict(positions=L),
        dict(embedding_dropout=0.1),
        dict(scan_blocks=True),
        dict(depth=1),
        dict(remat="dots"),
    ],
    ids=str,
)
@pytest.mark.cases(3)
def test_inputs_that_depend_on_more_than_the_symbol(options, monkeypatch):
    """Then each token is projected, as for a text that is too short."""
    made = network(time_conditioning=False, **options)
    found = flops(made, Z)
    without(monkeypatch)
    assert flops(made, Z) == found


@pytest.mark.slow
def test_a_mixture_of_symbols_is_read_token_by_token():
    made = network()
    params = perturbed(made.init(jax.random.key(0)))
    symbols = jnp.stack([Z, (Z + 1) % V], axis=-1)
    mixture = Mixture(symbols, jnp.broadcast_to(jnp.asarray([1.0, 0.0]), symbols.shape))
    denoiser = made.bind(params)
    np.testing.assert_allclose(
        denoiser.features(mixture, T), denoiser.features(Z, T), rtol=1e-5, atol=1e-5
    )
