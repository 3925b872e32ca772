"""Layers of the encoder and the decoder of a VQGAN (arXiv:2012.09841), as functions of arrays.

Arrays have the names of `VQModel` in the library diffusers, and its layout: a convolution's weight
is [out, in, height, width]. Features are [B, H, W, C].
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array

EPSILON = 1e-6  # of the group norms
# Names of the projections of attention today, and in older files.
QUERY, KEY, VALUE, OUT = (
    ("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn"),
)  # fmt: skip


class Stack(NamedTuple):
    """Shape of the encoder or the decoder.

    attends  for each level of resolution, in the order of computation, whether it has attention
    layers   residual blocks of a level
    middle   whether the part at the lowest resolution has attention
    groups   groups of channels of a group norm
    """

    attends: tuple[bool, ...]
    layers: int
    middle: bool
    groups: int


def encoded(arrays: Mapping[str, Array], x: Array, stack: Stack) -> Array:
    """Computes the vectors [B, h, w, D] of images [B, H, W, C], before quantisation."""
    layers = Layers(arrays, stack.groups)
    x = layers.convolution("encoder.conv_in", x)
    for level, attends in enumerate(stack.attends):
        x = _level(layers, f"encoder.down_blocks.{level}", x, stack.layers, attends)
        if level < len(stack.attends) - 1:
            x = layers.halved(f"encoder.down_blocks.{level}.downsamplers.0.conv", x)
    x = _middle(layers, "encoder.mid_block", x, stack.middle)
    x = layers.convolution("encoder.conv_out", layers.normalised("encoder.conv_norm_out", x))
    return layers.convolution("quant_conv", x)


def decoded(arrays: Mapping[str, Array], vectors: Array, stack: Stack) -> Array:
    """Computes images [B, H, W, C] from the vectors [B, h, w, D] of codes."""
    layers = Layers(arrays, stack.groups)
    x = layers.convolution("decoder.conv_in", layers.convolution("post_quant_conv", vectors))
    x = _middle(layers, "decoder.mid_block", x, stack.middle)
    for level, attends in enumerate(stack.attends):
        x = _level(layers, f"decoder.up_blocks.{level}", x, stack.layers + 1, attends)
        if level < len(stack.attends) - 1:
            x = x.repeat(2, axis=1).repeat(2, axis=2)
            x = layers.convolution(f"decoder.up_blocks.{level}.upsamplers.0.conv", x)
    return layers.convolution("decoder.conv_out", layers.normalised("decoder.conv_norm_out", x))


def nearest(vectors: Array, codebook: Array) -> Array:
    """Returns the number of the nearest code, in Euclidean distance, of each vector [..., D]."""
    # Squared distances, less the squared length of the vector, which all codes have in common.
    distances = jnp.sum(codebook**2, axis=1) - 2.0 * vectors @ codebook.T
    return jnp.argmin(distances, axis=-1)


def unit(vectors: Array) -> Array:
    """Divides vectors [..., D] by their length, or by 1e-12 if it is less."""
    length = jnp.sqrt(jnp.sum(vectors**2, axis=-1, keepdims=True))
    return vectors / jnp.maximum(length, 1e-12)


class Layers(NamedTuple):
    """Layers of one kind each, by the name of their arrays."""

    arrays: Mapping[str, Array]
    groups: int

    def convolution(self, name: str, x: Array) -> Array:
        """Applies a convolution that keeps height and width."""
        return self._convolved(name, x, 1, "SAME")

    def halved(self, name: str, x: Array) -> Array:
        """Halves height and width by a convolution, with padding below and to the right only."""
        return self._convolved(name, x, 2, ((0, 1), (0, 1)))

    def normalised(self, name: str, x: Array) -> Array:
        """Applies a group norm and swish."""
        return jax.nn.silu(self._group_norm(name, x))

    def residual(self, name: str, x: Array) -> Array:
        """Applies a residual block of two convolutions."""
        h = self.convolution(f"{name}.conv1", self.normalised(f"{name}.norm1", x))
        h = self.convolution(f"{name}.conv2", self.normalised(f"{name}.norm2", h))
        if f"{name}.conv_shortcut.weight" in self.arrays:
            x = self.convolution(f"{name}.conv_shortcut", x)
        return x + h

    def attention(self, name: str, x: Array) -> Array:
        """Applies residual self-attention over all positions, with one head."""
        h = self._group_norm(f"{name}.group_norm", x)
        h = h.reshape(len(h), -1, h.shape[-1])
        query, key, value = (self._linear(name, names, h) for names in (QUERY, KEY, VALUE))
        scores = jnp.einsum("bqd,bkd->bqk", query, key) * query.shape[-1] ** -0.5
        h = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores, axis=-1), value)
        return x + self._linear(name, OUT, h).reshape(x.shape)

    def _convolved(
        self, name: str, x: Array, stride: int, padding: str | Sequence[tuple[int, int]]
    ) -> Array:
        kernel = self.arrays[f"{name}.weight"].transpose(2, 3, 1, 0)
        out = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return out + self.arrays[f"{name}.bias"]

    def _group_norm(self, name: str, x: Array) -> Array:
        grouped = x.reshape(*x.shape[:3], self.groups, -1)
        mean = grouped.mean(axis=(1, 2, 4), keepdims=True)
        variance = grouped.var(axis=(1, 2, 4), keepdims=True)
        scaled = ((grouped - mean) * jax.lax.rsqrt(variance + EPSILON)).reshape(x.shape)
        return scaled * self.arrays[f"{name}.weight"] + self.arrays[f"{name}.bias"]

    def _linear(self, name: str, names: Sequence[str], x: Array) -> Array:
        own = next(n for n in names if f"{name}.{n}.weight" in self.arrays)
        # Older files hold 1 x 1 convolutions.
        weight = self.arrays[f"{name}.{own}.weight"].reshape(-1, x.shape[-1])
        return x @ weight.T + self.arrays[f"{name}.{own}.bias"]


def _level(layers: Layers, name: str, x: Array, count: int, attends: bool) -> Array:
    """Applies the residual blocks of one resolution, each followed by attention if it attends."""
    for number in range(count):
        x = layers.residual(f"{name}.resnets.{number}", x)
        if attends:
            x = layers.attention(f"{name}.attentions.{number}", x)
    return x


def _middle(layers: Layers, name: str, x: Array, attends: bool) -> Array:
    x = layers.residual(f"{name}.resnets.0", x)
    if attends:
        x = layers.attention(f"{name}.attentions.0", x)
    return layers.residual(f"{name}.resnets.1", x)
