"""Rare symbols are drawn as often as they should be; n and the tolerance are in each test."""

import functools

import exact
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from md4_jax.samplers import draw

pytestmark = pytest.mark.slow

GPT2 = 50257


def with_tail(vocabulary: int, each: float) -> tuple[jnp.ndarray, float]:
    """(logits, probability of the tail): all symbols but number 7 have probability `each`."""
    tail = each * (vocabulary - 1)
    logits = np.full(vocabulary, np.log(each))
    logits[7] = np.log1p(-tail)
    return jnp.asarray(logits, jnp.float32), tail


def tails(fn, logits, rows: int, chunk: int) -> int:
    """How many of so many draws are not symbol 7, a chunk at a time."""

    @functools.partial(jax.jit, static_argnames="size")
    def count(key, size):
        return jnp.sum(jax.vmap(fn, (0, None))(jax.random.split(key, size), logits) != 7)

    keys = jax.random.split(jax.random.key(5), rows // chunk)
    return sum(int(count(key, chunk)) for key in keys)


def right(found: int, rows: int, tail: float) -> bool:
    """Within 4 standard errors."""
    return abs(found - rows * tail) < 4 * np.sqrt(rows * tail)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    """Takes the place of the fixture for all files: here it is the noise that takes the time."""


@pytest.mark.parametrize(
    "each, rows", [pytest.param(0.9e-8, 360_000, marks=pytest.mark.campaign), (5e-8, 36_000)]
)
@pytest.mark.campaign
def test_a_tail_of_gpt2_size(each, rows):
    """50,256 symbols of probability 0.9e-8 or 5e-8: 163 or 90 draws in the tail, 4 errors."""
    logits, tail = with_tail(GPT2, each)
    assert rows * tail > 80
    assert right(tails(draw.categorical, logits, rows, 9000), rows, tail)


@pytest.mark.campaign
def test_noise_of_few_bits_has_no_such_tail():
    """The test above has power: JAX's default noise is refused, n = 11,264, 28 expected."""
    logits, tail = with_tail(GPT2, 5e-8)
    plain = lambda key, logits: jax.random.categorical(key, logits, mode="low")  # noqa: E731
    found = tails(plain, logits, 11_264, 1024)
    assert not right(found, 11_264, tail) and found < 0.5 * 11_264 * tail


def test_one_stage_draws_with_all_bits_too():
    """A tail of 1,000 symbols would need 1e9 draws: the same tokens as from noise of all bits."""
    logits = with_tail(1000, 5e-8)[0] * jnp.linspace(0.0, 0.01, 512)[:, None]
    assert logits.shape[-1] < draw.TWO_STAGES
    key = jax.random.key(1)
    found = draw.categorical(key, logits)
    np.testing.assert_array_equal(found, jax.random.categorical(key, logits, mode="high"))
    assert (found != jax.random.categorical(key, logits, mode="low")).any()


@pytest.mark.parametrize("vocabulary", [4, 5, 10, 16, 21])
@pytest.mark.cases(3)
def test_two_stages_have_the_law_of_one(vocabulary, monkeypatch):
    """Blocks of 2, 4 and 8 symbols, the last one short: chi-squared, n = 40,000, p > 1e-4.

    Symbols at -inf are never drawn, be they a part of a block or all of it.
    """
    monkeypatch.setattr(draw, "TWO_STAGES", 4)
    logits = np.sin(3.0 * np.arange(vocabulary)) * 2.0
    whole = logits.copy()
    logits[[1, vocabulary - 1]] = -np.inf
    logits[4:8] = -np.inf if vocabulary > 8 else logits[4:8]
    for values in (whole, logits):
        law = np.exp(values)
        rows = jnp.broadcast_to(jnp.asarray(values, jnp.float32), (laws.N, 2, vocabulary))
        tokens = np.asarray(jax.jit(draw.draw_token)(exact.keys_for(2, laws.N), rows))
        assert tokens.dtype == np.int32
        assert laws.accepted(np.bincount(tokens.ravel(), minlength=vocabulary), law)
        pairs = np.bincount(tokens @ np.array([vocabulary, 1]), minlength=vocabulary**2)
        assert laws.accepted(pairs, np.outer(law, law))
