"""Conditioning of the layers: time embedding, and the shifts, scales and gates of adaLN."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from md4_jax.networks.linear import Linear
from md4_jax.protocols import Array


class Sinusoids(NamedTuple):
    """Form of a time embedding.

    width   number of sinusoids; 0: the width of the condition
    hidden  width of the first layer, as a multiple of the condition's
    scale   factor by which the time is multiplied
    last    whether the lowest frequency is exactly 1 / 10,000
    """

    width: int
    hidden: int
    scale: float
    last: bool


# md4: google-deepmind/md4. dit: the DiT of SEDD, MDLM and their successors.
TIME_EMBEDDINGS = {
    "plain": Sinusoids(0, 1, 1000.0, True),
    "md4": Sinusoids(0, 4, 1000.0, True),
    "dit": Sinusoids(256, 1, 1.0, False),
}


class TimeEmbedding(nn.Module):
    """Two linear layers on sinusoids of the time: t [B, G] -> condition [B, G, size]."""

    size: int
    form: Sinusoids
    dtype: jnp.dtype
    initial: str

    @nn.compact
    def __call__(self, t_BxG: Array) -> Array:
        half = (self.form.width or self.size) // 2
        steps = half - 1 if self.form.last else half
        frequency = jnp.exp(-jnp.log(10_000.0) * jnp.arange(half) / steps)
        angle_BxGxW = self.form.scale * t_BxG.astype(jnp.float32)[..., None] * frequency
        x = jnp.concatenate([jnp.sin(angle_BxGxW), jnp.cos(angle_BxGxW)], axis=-1)
        for name, width in (("time_in", self.form.hidden * self.size), ("time_out", self.size)):
            x = x if name == "time_in" else nn.silu(x)
            x = Linear(width, self.dtype, bias=True, initial=self.initial, name=name)(x)
        return x


Activation = Callable[[Array], Array]
# Input of the activation: the sum of the vectors of time and class, or each of them.
ACTIVATED = ("sum", "each")


def activations(options: Any) -> tuple[Activation, Activation]:
    """Returns the activations of each vector of a condition, and of their sum.

    options  has feed_forward and condition_activation. One of the two is the identity
    """
    own = nn.sigmoid if options.feed_forward == "glu" else nn.silu
    return (own, unchanged) if options.condition_activation == "each" else (unchanged, own)


def unchanged(x: Array) -> Array:
    return x


def modulation(
    count: int,
    shape: tuple[int, ...],
    condition_BxGxC: Array,
    dtype: jnp.dtype,
    activation: Activation,
) -> list[Array]:
    """Computes `count` arrays that shift, scale or gate x, of shape [B, L, D], initially zero.

    Each is [B, 1, D] if a sequence has one condition, else [B, L, D], equal within a group.
    activation: applied to the condition before the linear layer.
    """
    layer = Linear(count * shape[-1], dtype, zeros=True, bias=True, name="modulation")
    y_BxGxN = layer(activation(condition_BxGxC))
    batch, groups = y_BxGxN.shape[:2]
    if groups > 1:
        spread = (batch, groups, shape[1] // groups, y_BxGxN.shape[-1])
        y_BxGxN = jnp.broadcast_to(y_BxGxN[:, :, None], spread).reshape(batch, shape[1], -1)
    return jnp.split(y_BxGxN, count, axis=-1)


class FinalModulation(nn.Module):
    """Shift and scale before the head, initially zero."""

    dtype: jnp.dtype
    activation: Activation

    @nn.compact
    def __call__(self, condition_BxGxC: Array, shape: tuple[int, ...]) -> list[Array]:
        return modulation(2, shape, condition_BxGxC, self.dtype, self.activation)
