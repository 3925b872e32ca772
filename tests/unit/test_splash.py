"""The TPU's attention kernel, interpreted here, against the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.networks.attention import attend
from md4_jax.networks.blocks import block_diffusion_attention
from md4_jax.networks.splash import BlockDiffusionMask, fits, kernel_of, splash

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("segmented", [False, True], ids=["", "segments"])
@pytest.mark.cases(2)
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


@pytest.mark.parametrize("asks", [512, 256], ids=["both", "first"])
@pytest.mark.parametrize("block", [4, pytest.param(64, marks=pytest.mark.campaign), 256])
@pytest.mark.parametrize("segmented", [False, True], ids=["", "segments"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.cases(1)
def test_halves_are_those_of_the_tiled_form(asks, block, segmented, causal, monkeypatch):
    """Block diffusion's attention on [z, x], 2 x 256 positions: outputs and gradients to 3e-5."""
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(2, 512, 2, 16)), jnp.float32) for _ in range(3)]
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, 256)), axis=1)) if segmented else None
    qkv[0] = qkv[0][:, :asks]
    weight = jnp.asarray(rng.normal(size=qkv[0].shape), jnp.float32)
    used = []

    def interpreted(*arguments, **options):
        used.append(options)
        return splash(*arguments, **options, interpret=True)

    monkeypatch.setattr("md4_jax.networks.blocks.splash", interpreted)

    def both(kernel):
        def loss(qkv):
            options = dict(block=block, causal=causal)
            out = block_diffusion_attention(*qkv, segments=segments, kernel=kernel, **options)
            return jnp.sum(out * weight), out

        return jax.jit(jax.grad(loss, has_aux=True))(qkv)

    found = both("splash")
    assert used == [dict(block=block, causal=causal)]
    expected = both("plain")
    assert len(used) == 1 and all(np.abs(x).max() > 0.5 for x in jax.tree.leaves(expected))
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5)  # noqa: E731
    jax.tree.map(close, found, expected)


@pytest.mark.parametrize("length, size", [(512, 128), (1024, 256), (4096, 512)])
def test_tiles_without_an_entry_are_not_computed(length, size):
    """Of the (2 L / T)^2 tiles those of L (L + 2 T) / T^2: what is allowed, in whole tiles."""
    count = length // size
    for asks, tiles in ((2 * length, count * (count + 2)), (length, count * (count + 3) // 2)):
        info = kernel_of(asks, 2 * length, 1, causal=False, block=16).fwd_mask_info
        assert int(np.sum(np.asarray(info.block_mask) > 0)) == tiles
    # What the entries of a tile are is kept once for all tiles that are alike.
    assert len(info.partial_mask_blocks) <= 3


def test_the_mask_of_halves_counts_as_one_by_its_sizes():
    four, eight = BlockDiffusionMask(256, 4, 512), BlockDiffusionMask(256, 8, 512)
    assert BlockDiffusionMask(256, 4, 512) == four != eight
    assert BlockDiffusionMask(256, 4, 512, True) != four


def test_lengths():
    assert fits(1024) and fits(128) and not fits(100)
