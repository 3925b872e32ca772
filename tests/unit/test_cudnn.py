"""Attention on NVIDIA's GPUs: lowered for one, since there may be none to run it on."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AbstractMesh

from md4_jax.networks.attention import kernel_for
from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import AXES

AUTO = (jax.sharding.AxisType.Auto,) * len(AXES)
SIZES = dict(vocab_size=5, size=32, depth=1, heads=2, hidden=32, dtype="bfloat16")


def lowered(monkeypatch, segments=None, block=0, **options) -> tuple[list[str], str]:
    """The names of the kernels in a network's gradient, and all of its text."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    network = Transformer(**(SIZES | options)).build("gpu")
    context = {} if segments is None else {"segments": segments}

    def loss(params):
        z, denoiser = jnp.zeros((2, 64), jnp.int32), network.bind(params, context)
        if block:
            h = denoiser.blocks.features(z, jnp.zeros((2, 64 // block)), z, block)
            return jnp.sum(denoiser.unembed(h))
        return jnp.sum(denoiser(z, jnp.zeros(2)))

    shapes = jax.eval_shape(lambda: network.init(jax.random.key(0)))
    traced = jax.jit(jax.grad(loss)).trace(shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"@(__cudnn\S*?)\(", text), text


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_a_gpu_gets_the_kernel_in_both_passes(causal, monkeypatch):
    found, text = lowered(monkeypatch, causal=causal)
    assert found == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert (text.count("CAUSAL") > 0) == causal


def test_segments_are_a_mask_of_it(monkeypatch):
    found, _ = lowered(monkeypatch, segments=jnp.zeros((2, 64), jnp.int32))
    assert found == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]


def test_a_part_of_the_queries_asks_all_keys(monkeypatch):
    """Four devices share 64 positions, two the heads; a causal mask is then a matrix."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 1, 4, 2), AXES, axis_types=AUTO)):
        plain, text = lowered(monkeypatch)
        causal, _ = lowered(monkeypatch, causal=True)
    assert plain == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert causal == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 1, 64, 1), AXES, axis_types=AUTO)):
        odd, _ = lowered(monkeypatch, causal=True)  # a query for each device
    assert odd == []
    arrays = "(tensor<2x16x1x16xbf16>, tensor<2x64x1x16xbf16>, tensor<2x64x1x16xbf16>)"
    assert arrays in text


@pytest.mark.parametrize("block, tiles", [(1, 8), (16, 4), (64, 1)])
@pytest.mark.cases(1)
def test_block_diffusion_asks_it_for_the_tiles_of_both_halves(block, tiles, monkeypatch):
    """8 tiles at most of each half, with an even number of keys even in blocks of one."""
    options = dict(depth=2, scan_blocks=False)
    found, text = lowered(monkeypatch, block=block, **options)
    assert len(found) == (4 + 2) * tiles  # the last layer of the first half alone
    assert text.count("dot_general") == lowered(monkeypatch, depth=2, scan_blocks=False)[1].count(
        "dot_general"
    )


def test_where_it_cannot_be_the_formula_is():
    assert kernel_for("auto", "gpu", 64, "bfloat16") == "cudnn"
    for size, dtype in ((64, "float32"), (12, "bfloat16"), (256, "bfloat16")):
        assert kernel_for("auto", "gpu", size, dtype) == "plain"
        with pytest.raises(UserError, match=f"not {dtype}.*not {size}"):
            kernel_for("cudnn", "gpu", size, dtype)
    assert kernel_for("auto", "cpu", 64, "bfloat16") == "plain"
