"""Products of linear layers with operands in bfloat16."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import random_parameters

from md4_jax.networks.attention import attend
from md4_jax.networks.blocks import KVCache, attend_cached
from md4_jax.networks.products import product, products_for
from md4_jax.networks.transformer import Transformer
from md4_jax.options import MeshOptions
from md4_jax.protocols import Network, UserError
from md4_jax.runtime import processor
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.mesh import make_mesh

SIZES = dict(vocab_size=5, size=32, depth=2, heads=2, initial="torch")


@pytest.fixture
def factors():
    left, right, slope = (
        jax.random.normal(jax.random.key(n), shape)
        for n, shape in enumerate(((7, 48), (48, 5), (7, 5)))
    )
    return left, right, slope


def rounded(x):
    return np.asarray(x.astype(jnp.bfloat16), np.float64)


def test_operands_are_rounded_and_sums_are_float32(factors):
    left, right, _ = factors
    found = product(left, right, "bfloat16")
    chex.assert_type(found, jnp.float32)
    np.testing.assert_allclose(found, rounded(left) @ rounded(right), rtol=0, atol=2e-6)
    exact = np.asarray(left, np.float64) @ np.asarray(right, np.float64)
    assert np.abs(found - exact).max() > 1e-3  # three digits are lost
    np.testing.assert_allclose(product(left, right, "float32"), exact, rtol=0, atol=1e-5)


def test_the_gradients_are_products_of_rounded_operands(factors):
    left, right, slope = factors
    _, pull = jax.vjp(lambda a, b: product(a, b, "bfloat16"), left, right)
    of_left, of_right = pull(slope)
    np.testing.assert_allclose(of_left, rounded(slope) @ rounded(right).T, rtol=0, atol=2e-6)
    np.testing.assert_allclose(of_right, rounded(left).T @ rounded(slope), rtol=0, atol=2e-6)


def test_what_is_kept_for_the_gradient_is_bfloat16(factors):
    left, right, _ = factors
    _, pull = jax.vjp(lambda a, b: product(a, b, "bfloat16"), left, right)
    assert {leaf.dtype for leaf in jax.tree.leaves(pull)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f avx512_bf16\n", "bfloat16"),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512f avx512_bf16\n", "float32"),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512_bf16 amx_bf16\n", "bfloat16"),
        ("processor : 0\nflags : sse amx_bf16 amx_tile\n", "bfloat16"),
        ("flags : fpu avx512f avx512_vnni\n", "float32"),
        (None, "float32"),
    ],
)
def test_auto_asks_the_processor(tmp_path, monkeypatch, flags, expected):
    facts = tmp_path / "cpuinfo"
    if flags is not None:
        facts.write_text(flags)
    found = processor.multiplies_bfloat16(facts)
    monkeypatch.setattr("md4_jax.networks.products.multiplies_bfloat16", lambda: found)
    assert products_for("auto", "cpu", "float32") == expected
    assert products_for("auto", "gpu", "float32") == "float32"
    assert products_for("auto", "tpu", "float32") == "float32"
    assert products_for("bfloat16", "gpu", "float32") == "bfloat16"
    assert products_for("float32", "cpu", "float32") == "float32"
    assert products_for("auto", "cpu", "bfloat16") == expected
    assert products_for("auto", "gpu", "bfloat16") == "float32"
    assert products_for("float32", "cpu", "bfloat16") == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.cases(1)
def test_a_network_in_bfloat16_has_the_same_products_on_every_processor(monkeypatch, quick):
    """Sums are float32 in both forms; the results are rounded to bfloat16."""
    monkeypatch.setattr("md4_jax.networks.products.multiplies_bfloat16", lambda: quick)
    network = Transformer(**SIZES, dtype="bfloat16", products="auto").build()
    assert network.products == ("bfloat16" if quick else "float32")
    plain = Transformer(**SIZES, dtype="bfloat16", products="float32").build()
    params, z = random_parameters(network), jnp.zeros((2, 6), jnp.int32)

    def slopes(network):
        return jax.grad(lambda p: network.bind(p, {}, None)(z, jnp.ones(2)).sum())(params)

    found, expected = slopes(network), slopes(plain)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= 0.05 * np.abs(b).max() + 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_every_linear_layer_of_tokens_rounds(tied):
    wide, narrow = (
        Transformer(**SIZES, tied=tied, scan_blocks=False, products=products).build()
        for products in ("float32", "bfloat16")
    )
    params = random_parameters(wide)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, random_parameters(narrow))
    z, t = jnp.arange(12).reshape(2, 6) % 6, jnp.full(2, 0.5)
    logits = [np.asarray(network.bind(params, {}, None)(z, t)) for network in (wide, narrow)]
    away = np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max()
    assert 1e-4 < away < 0.03
    assert "bf16" not in str(jax.make_jaxpr(lambda z: wide.bind(params, {}, None)(z, t))(z))
    text = str(jax.make_jaxpr(lambda z: narrow.bind(params, {}, None)(z, t))(z))
    # Seven of each of the two blocks, and the head; attention and the vectors of the symbols have
    # gradients of their own.
    assert text.count("custom_vjp_call[") == 2 * 7 + 1 + 2 + 1
    assert (wide.products, narrow.products) == ("float32", "bfloat16")


def program_of(function, *arguments):
    """Compiles as the package does for a network with products of bfloat16."""
    network = Network(init=None, bind=None, time_free=True, products="bfloat16")
    mesh = make_mesh(MeshOptions(data=1), jax.devices()[:1])
    return jit(function, mesh, network).lower(*arguments).compile()


@pytest.mark.optimized
def test_no_product_of_a_step_widens_its_operands():
    """XLA converts operands that lie in memory otherwise than by rows, and is then slow."""

    def step(x, kernel, query, slope):
        def loss(x, kernel, query):
            mixed = attend(query, query, query, kernel="rounded")
            return jnp.sum(product(x, kernel, "bfloat16") * slope) + jnp.sum(mixed**2)

        return jax.grad(loss, argnums=(0, 1, 2))(x, kernel, query)

    shapes = (512, 64), (64, 96), (2, 64, 2, 32), (512, 96)
    text = program_of(step, *(jnp.ones(shape) for shape in shapes)).as_text()
    operands = re.findall(r"= f32\S* dot\(%\S+, %\S+\)", text)
    assert len(operands) == 2 + 6  # of a product whose value is not asked for, and of attention
    bodies = [body for body in text.split("\n}\n") if " dot(" in body]
    assert all(body.count("bf16[") >= 2 for body in bodies)


@pytest.mark.optimized
@pytest.mark.parametrize("kernel", ["plain", "rounded"])
def test_the_gradient_of_attention_turns_no_scores(kernel):
    """Two of its products sum over queries: their results are turned, [Dh, K], not the scores."""

    def loss(query, key, value):
        return jnp.sum(attend(query, key, value, kernel=kernel) ** 2)

    x = jnp.ones((2, 40, 3, 8))
    text = program_of(jax.grad(loss, argnums=(0, 1, 2)), x, x, x).as_text()
    assert len(re.findall(r"f32\[(?:2,3|6),8,40\]\S* dot\(", text)) == 2
    assert not re.findall(r"\[(?:2,3|6),40,40\]\S* transpose\(", text)


@pytest.mark.parametrize("rows", [1, 2, 3, 64])
@pytest.mark.parametrize("sizes", [(1, 1), (16, 16), (32, 384), (384, 32)])
def test_a_kernel_may_be_a_transposed_table(rows, sizes):
    """As in a head that shares the matrix of the embedding, whose gradients add up."""
    x, table, slope = jnp.ones((rows, sizes[0])), jnp.ones(sizes[::-1]), jnp.ones((rows, sizes[1]))

    def gradients(x, table, slope):
        def loss(x, table):
            return jnp.sum(slope * product(x, table.T, "bfloat16")) + jnp.sum(table)

        return jax.grad(loss, argnums=(0, 1))(x, table)

    of_x, of_table = program_of(gradients, x, table, slope)(x, table, slope)
    np.testing.assert_array_equal(of_x, np.full(x.shape, sizes[1]))
    np.testing.assert_array_equal(of_table, np.full(table.shape, rows + 1))


@pytest.mark.parametrize("masked", [True, False])
def test_attention_rounds_the_operands_of_its_products_alone(masked):
    query, key, value, slope = (
        jax.random.normal(jax.random.key(n), (2, 24, 3, 16)) for n in range(4)
    )
    segments = jnp.arange(48).reshape(2, 24) // 9 if masked else None

    def both(kernel):
        out, pull = jax.vjp(
            lambda *qkv: attend(*qkv, segments=segments, kernel=kernel), query, key, value
        )
        return [out, *pull(slope)]

    for found, exact in zip(both("rounded"), both("plain"), strict=True):
        chex.assert_type(found, jnp.float32)
        away = np.abs(found - exact).max() / np.abs(exact).max()
        assert 1e-4 < away < 0.02
    first = value.at[:, 1:].set(0.0)  # a causal first token sees itself alone, so gets its value
    out = attend(query, key, first, causal=True, kernel="rounded")
    np.testing.assert_array_equal(out[:, 0], np.asarray(first[:, 0].astype(jnp.bfloat16)))


def test_attention_to_cached_tokens_rounds_too():
    query, own, kept = (jax.random.normal(jax.random.key(n), (1, 4, 2, 16)) for n in range(3))
    cache = KVCache(kept, kept, jnp.int32(4))
    exact, found = (
        np.asarray(attend_cached(query, (own, own), cache, kernel=kernel))
        for kernel in ("plain", "rounded")
    )
    assert 1e-4 < np.abs(found - exact).max() / np.abs(exact).max() < 0.02


@pytest.mark.optimized
def test_the_program_calls_the_library_that_is_quick_at_it():
    network = Network(init=None, bind=None, time_free=True)
    mesh, a = make_mesh(MeshOptions(data=1), jax.devices()[:1]), jnp.ones((256, 256))
    texts = {}
    for products in ("float32", "bfloat16"):
        program = jit(
            lambda a, p=products: product(a, a, p), mesh, network._replace(products=products)
        )
        texts[products] = program.lower(a).compile().as_text()
    assert "ynn" in texts["bfloat16"]
    assert "ynn" not in texts["float32"]


def test_other_names_are_refused():
    with pytest.raises(UserError, match="network.products must be auto, float32 or bfloat16"):
        Transformer(**SIZES, products="half")
