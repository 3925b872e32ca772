"""The TPU's attention kernel, interpreted here, against the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.networks.attention import attend
from md4_jax.networks.splash import fits, splash


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("segmented", [False, True], ids=["", "segments"])
def test_output_and_gradients_are_those_of_the_formula(causal, segmented):
    """Heads of 16, two tiles; float32 to 2e-5 of outputs and gradients of size 1."""
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(2, 256, 2, 16)), jnp.float32) for _ in range(3)]
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, 256)), axis=1)) if segmented else None
    weight = jnp.asarray(rng.normal(size=qkv[0].shape), jnp.float32)

    def both(fn):
        def loss(qkv):
            out = fn(qkv)
            return jnp.sum(out * weight), out

        return jax.jit(jax.grad(loss, has_aux=True))(qkv)

    found = both(lambda qkv: splash(*qkv, segments, causal=causal, interpret=True))
    expected = both(lambda qkv: attend(*qkv, segments=segments, causal=causal))
    assert all(np.abs(x).max() > 0.5 for x in jax.tree.leaves(expected))
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5)  # noqa: E731
    jax.tree.map(close, found, expected)


def test_lengths():
    assert fits(1024) and fits(128) and not fits(100)
