"""Reductions over the vocabulary: values and gradients of every form, at every width."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import random_parameters

from md4_jax.networks.linear import Linear
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives import head
from md4_jax.objectives.head import at_positions
from md4_jax.objectives.log_sum_exp import log_sum_exp
from md4_jax.objectives.token_nats import token_nats
from md4_jax.runtime.reductions import FOLDED, repeated, row_max, row_sum, with_entries

WIDTHS = (1, 2, 27, FOLDED, FOLDED + 1, 1027, 5000)


def numbers(*shape, scale=5.0):
    return scale * np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_have_the_largest_number_and_the_sum_that_numpy_finds(width):
    x = numbers(3, 4, width)
    np.testing.assert_array_equal(jax.jit(row_max)(x), x.max(-1, keepdims=True))
    exact = x.astype(np.float64).sum(-1, keepdims=True)
    np.testing.assert_allclose(jax.jit(row_sum)(x), exact, rtol=0, atol=1e-5 * np.abs(x).sum())


@pytest.mark.parametrize("alone", [True, False])
def test_on_a_mesh_the_plain_forms_are_taken(monkeypatch, alone):
    monkeypatch.setattr("md4_jax.runtime.reductions.on_one_device", lambda: alone)
    text = str(jax.make_jaxpr(lambda x: row_sum(x))(numbers(3, 4)))  # not row_sum: traces are kept
    assert ("dot_general" in text) == alone


@pytest.mark.parametrize("place", [0, 1, 512, 513, 1026])
def test_the_largest_number_is_found_in_every_fold(place):
    x = np.full((2, 1027), -np.inf, np.float32)
    x[1, place] = -3.0
    np.testing.assert_array_equal(jax.jit(row_max)(x), [[-np.inf], [-3.0]])


def test_a_repeated_row_has_the_sum_of_all_rows_as_its_gradient():
    row, slope = numbers(1027), numbers(5, 12, 1027)
    out, pull = jax.vjp(lambda row: repeated(row, (5, 12)), row)
    np.testing.assert_array_equal(out, np.broadcast_to(row, (5, 12, 1027)))
    np.testing.assert_allclose(pull(slope)[0], slope.astype(np.float64).sum((0, 1)), atol=1e-4)


def test_entries_are_put_where_they_belong():
    x, index = numbers(2, 3, 50), np.array([[0, 49, 7], [7, 7, 1]])
    expected = x.copy()
    x, index = jnp.asarray(x), jnp.asarray(index)
    np.put_along_axis(expected, index[..., None], -1.0, axis=-1)
    np.testing.assert_array_equal(with_entries(x, index, jnp.full((2, 3), -1.0)), expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.cases(4)
def test_nats_and_their_gradient_are_those_of_float64(width):
    """Symbol 0 has next to no probability, so that the gradient there is next to -1."""
    logits, x = numbers(2, 6, width), np.arange(12).reshape(2, 6) % width
    slope = numbers(2, 6)
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    p = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    at_x = np.take_along_axis(p, x[..., None], -1)
    found, pull = jax.vjp(jax.jit(lambda logits: token_nats(logits, x)), logits)
    np.testing.assert_allclose(found, -np.log(at_x[..., 0]), rtol=2e-6, atol=2e-6)
    expected = p.copy()
    np.put_along_axis(expected, x[..., None], at_x - 1, -1)
    np.testing.assert_allclose(pull(slope)[0], slope[..., None] * expected, rtol=0, atol=2e-5)
    found, pull = jax.vjp(jax.jit(log_sum_exp), logits)
    np.testing.assert_allclose(pull(slope)[0], slope[..., None] * p, rtol=0, atol=2e-5)


def test_symbols_without_probability_change_nothing():
    logits, x = numbers(3, 20), np.array([1, 2, 3])
    longer = np.pad(logits, ((0, 0), (0, 7)), constant_values=-np.inf)
    both = [
        jax.value_and_grad(lambda logits: token_nats(logits, x).sum())(a) for a in (logits, longer)
    ]
    np.testing.assert_allclose(both[1][0], both[0][0], rtol=1e-6)
    np.testing.assert_allclose(both[1][1][:, :20], both[0][1], rtol=1e-5, atol=1e-7)
    assert (np.asarray(both[1][1])[:, 20:] == 0).all()
    assert log_sum_exp(np.full((1, 4), -np.inf))[0] == -np.inf


@pytest.mark.parametrize("kept", [0, 2**26])
def test_the_backward_pass_does_not_sum_the_vocabulary_again(kept, monkeypatch):
    """The forward pass takes one logarithm of a sum; the backward pass takes none."""
    monkeypatch.setattr(head, "LOGITS", head.LOGITS._replace(kept=kept))
    network = Transformer(vocab_size=1030, size=8, depth=1, heads=1, hidden=8).build()
    denoiser = network.bind(random_parameters(network), {}, None)
    x, rows = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool)

    def loss(h):
        found = at_positions(denoiser, h, rows, reduce=token_nats, rows=(x,), padded=True)
        return jnp.sum(found)

    text = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 3, 8))))
    assert text.count(" log ") == 1


@pytest.mark.parametrize("tied", [True, False])
def test_padded_logits_are_those_of_the_symbols_and_minus_infinity(tied):
    transformer = Transformer(vocab_size=1030, size=8, depth=1, heads=1, hidden=8, tied=tied)
    network = transformer.build()
    params = random_parameters(network)
    denoiser = network.bind(params, {}, None)
    h = denoiser.features(jnp.arange(6).reshape(2, 3), jnp.ones(2))
    padded, plain = denoiser.accelerator.padded(h), denoiser.unembed(h)
    np.testing.assert_array_equal(padded[..., :1030], plain)
    assert padded.shape[-1] == 1152 and (np.asarray(padded)[..., 1030:] == -np.inf).all()


def test_small_vocabularies_have_no_padded_logits():
    """27 symbols of 128 entries: sums over all entries would take longer than cutting them off."""
    for symbols in (27, 128, 1024):
        network = Transformer(vocab_size=symbols, size=8, depth=1, heads=1, tied=False).build()
        denoiser = network.bind(random_parameters(network), {}, None)
        assert denoiser.accelerator.padded is None


def test_the_bias_of_a_layer_has_the_sum_of_the_slopes_as_its_gradient():
    layer = Linear(1027, jnp.dtype("float32"), bias=True)
    x, slope = numbers(2, 5, 3), numbers(2, 5, 1027)
    params = layer.init(jax.random.key(0), x)
    chex.assert_shape(layer.apply(params, x), (2, 5, 1027))
    _, pull = jax.vjp(lambda params: layer.apply(params, x), params)
    found = pull(slope)[0]["params"]["bias"]
    np.testing.assert_allclose(found, slope.astype(np.float64).sum((0, 1)), atol=1e-4)
