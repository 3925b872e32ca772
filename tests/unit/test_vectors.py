"""Vectors of symbols: values, and gradients that are summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import SIZES, perturbed

from md4_jax.networks import vectors
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.vectors import vectors_of

FORMS = pytest.mark.parametrize("gpu", [False, True], ids=["others", "gpu"])
SIZE = pytest.mark.parametrize("rows", [vectors.SMALL, vectors.SMALL + 1], ids=["small", "large"])


def gradient(rows, index, slope, frequent=7):
    """Of the sum of slope times the vectors, in the slope's type."""

    def loss(table):
        x = vectors_of(table, index, slope.dtype, frequent)
        return jnp.sum((x * slope).astype(jnp.float32))

    return np.asarray(jax.jit(jax.grad(loss))(jnp.ones((rows, slope.shape[-1]))))


@pytest.fixture
def as_if(monkeypatch):
    """Takes the form of GPUs, or of other platforms."""

    def choose(gpu):
        pick = lambda quick, plain, *arrays: (quick if gpu else plain)(*arrays)  # noqa: E731
        monkeypatch.setattr(vectors, "on_gpu", pick)

    return choose


@FORMS
@SIZE
def test_the_gradient_is_the_sum_over_places(rows, gpu, as_if):
    """Against numpy in float64; a fifth of 600 places ask for the frequent row."""
    as_if(gpu)
    rng = np.random.default_rng(0)
    index = np.where(rng.random((20, 30)) < 0.2, 7, rng.integers(0, rows, (20, 30)))
    slope = rng.normal(size=(20, 30, 3)).astype(np.float32)
    expected = np.zeros((rows, 3))
    np.add.at(expected, index, slope.astype(np.float64))
    found = gradient(rows, jnp.asarray(index), jnp.asarray(slope))
    np.testing.assert_allclose(found, expected, atol=2e-5)


@FORMS
@SIZE
@pytest.mark.parametrize("row", [7, 8], ids=["frequent", "another"])
def test_thousands_of_bfloat16_numbers_are_summed_without_loss(rows, gpu, row, as_if):
    """4,096 ones are 4,096. In bfloat16 a sum of ones stops at 256."""
    as_if(gpu)
    index, slope = jnp.full((64, 64), row), jnp.ones((64, 64, 2), jnp.bfloat16)
    found = gradient(rows, index, slope)
    assert (found[row] == 4096).all() and np.delete(found, row, axis=0).sum() == 0


@pytest.mark.campaign
def test_the_mask_of_a_narrow_network_learns_like_that_of_a_wide_one():
    """Its gradient over 32 x 256 masks: the angle to that of float32."""
    z, t = jnp.full((32, 256), SIZES["vocab_size"]), jnp.linspace(0.1, 1.0, 32)
    found = {}
    for dtype in ("float32", "bfloat16"):
        network = Transformer(**SIZES, dtype=dtype).build()
        params = perturbed(jax.jit(network.init)(jax.random.key(0)))

        def loss(params, network=network):
            return jnp.sum(network.bind(params)(z, t)[..., 0].astype(jnp.float32))

        found[dtype] = np.asarray(jax.jit(jax.grad(loss))(params)["embedding"][SIZES["vocab_size"]])
    wide, narrow = found["float32"], found["bfloat16"]
    cosine = wide @ narrow / np.linalg.norm(wide) / np.linalg.norm(narrow)
    assert cosine > 0.999


@SIZE
def test_gpus_have_forms_of_their_own(rows):
    """Looked up in the lowered programs: a scatter of all slopes, or a product."""
    index, slope = jnp.zeros((4, 6), jnp.int32), jnp.ones((4, 6, 2))
    loss = lambda table: jnp.sum(vectors_of(table, index, jnp.float32, 7) * slope)  # noqa: E731
    traced = jax.jit(jax.grad(loss)).trace(jnp.ones((rows, 2)))
    texts = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "tpu", "cuda")}
    products = {platform: "dot_general" in text for platform, text in texts.items()}
    assert products == {"cpu": False, "tpu": False, "cuda": True}
    assert ("scatter" in texts["cuda"]) == (rows > vectors.SMALL)
