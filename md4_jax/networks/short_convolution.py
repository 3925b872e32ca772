"""Gated short convolution of LFM2 (arXiv:2511.23404). Array names end in shapes: B, L, D, W."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from md4_jax.networks.dropout import for_adapter
from md4_jax.networks.linear import Linear
from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, CONTEXT, constrain


class ShortConvolution(nn.Module):
    """Mixes each token with its neighbours: out(c * convolution(b * value)), with gates b and c.

    b, c and value are linear layers of x. The convolution is depthwise, over `convolution` tokens
    centred at the token, or that end with it if `causal`. Beyond the ends of the sequence, and in
    other segments, it reads zeros.

    needed: selects the positions whose output is asked for.
    """

    options: Any
    zero_output: bool

    @nn.compact
    def __call__(
        self,
        x_BxLxD: Array,
        segments: Array | None,
        needed: Callable[[Array], Array],
        keys: Array | None = None,
    ) -> Array:
        o, (length, size) = self.options, x_BxLxD.shape[1:]

        def layer(name: str, x: Array, part: Callable, zeros: bool = False) -> Array:
            made = Linear(
                size, jnp.dtype(o.dtype), zeros, initial=o.initial, products=o.products,
                rank=o.lora_rank, alpha=o.lora_alpha, name=name,
            )  # fmt: skip
            return made(x, for_adapter(o, name, x, keys, length, part))

        value, gate = (layer(name, x_BxLxD, lambda x: x) for name in ("value", "input_gate"))
        y_BxLxD = constrain(gate * value, BATCH_AXES, CONTEXT, "tensor")
        init = nn.initializers.normal(o.convolution**-0.5)
        taps_WxD = self.param("taps", init, (o.convolution, size)).astype(y_BxLxD.dtype)
        y_BxLxD = convolved(y_BxLxD, taps_WxD, segments, causal=o.causal)
        y_BxPxD = layer("output_gate", needed(x_BxLxD), needed) * needed(y_BxLxD)
        return layer("out", y_BxPxD, needed, self.zero_output)


def convolved(
    x_BxLxD: Array, taps_WxD: Array, segments: Array | None, *, causal: bool = False
) -> Array:
    """Computes y_l = sum_w taps_w x_(l + w - W // 2); tokens of another segment count as zero.

    With `causal` the last tap is that of the token itself: y_l = sum_w taps_w x_(l + w - W + 1).
    """
    width = len(taps_WxD)
    before = width - 1 if causal else width // 2
    around = (before, width - 1 - before)
    padded = jnp.pad(x_BxLxD, ((0, 0), around, (0, 0)))
    return with_neighbours(jnp.zeros_like(x_BxLxD), padded, taps_WxD, segments, around)


def with_neighbours(
    x_BxLxD: Array,
    padded: Array,
    taps_WxD: Array,
    segments: Array | None,
    around: tuple[int, int],
) -> Array:
    """Adds to x_l the sum over w of taps_w padded_(l + w), but none of another segment.

    padded   [B, L + W - 1, D]: the inputs, with `around` more before and after them
    """
    length = x_BxLxD.shape[1]
    for tap, weight_D in enumerate(taps_WxD):
        neighbour = padded[:, tap : tap + length]
        if segments is not None:
            other = jnp.pad(segments, ((0, 0), around), constant_values=-1)
            same = other[:, tap : tap + length] == segments
            neighbour = jnp.where(same[..., None], neighbour, 0)
        x_BxLxD = x_BxLxD + neighbour * weight_D
    return x_BxLxD
