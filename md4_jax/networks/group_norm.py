"""Normalisation of groups of channels of images, [B, H, W, C] with C channels last."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.linear import Linear
from md4_jax.protocols import Array

# Groups of channels that are normalised together, as in all U-Nets since DDPM.
GROUPS = 32


class GroupNorm(nn.Module):
    """Normalisation of groups of channels over all pixels, optionally followed by swish.

    swish  computes y sigmoid(y) of the result y

    Gain and bias of each channel are parameters, or linear in a condition [B, D] if one is given.
    """

    swish: bool = True
    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: Array, condition_BxD: Array | None = None) -> Array:
        size = x.shape[-1]
        if condition_BxD is None:
            gain = self.param("scale", nn.initializers.ones, (size,))
            bias = self.param("bias", nn.initializers.zeros, (size,))
        else:
            linear = Linear(2 * size, x.dtype, zeros=True, bias=True, name="modulation")
            scale, bias = jnp.split(linear(condition_BxD).astype(jnp.float32), 2, axis=-1)
            gain = 1.0 + scale
        rows = (x.shape[0], size)
        gain, bias = jnp.broadcast_to(gain, rows), jnp.broadcast_to(bias, rows)
        return normalised(x, gain, bias, self.swish, self.eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalised(x: Array, gain_BxC: Array, bias_BxC: Array, swish: bool, eps: float) -> Array:
    """Normalises groups of channels, y = gain (x - mean) / deviation + bias, then swish.

    The custom gradient sums over pixels twice, on CPUs by matrix products. Forward and backward
    pass take 0.6 + 1.4 ms for 4 x 32 x 32 pixels of 256 channels on 2 cores, and 1.9 + 6.4 ms with
    XLA's own gradient and sums.
    """
    return _forward(x, gain_BxC, bias_BxC, swish, eps)[0]


def _forward(x: Array, gain: Array, bias: Array, swish: bool, eps: float):
    wide = x.astype(jnp.float32)
    mean, square = _of_groups(over_pixels(wide)), _of_groups(over_pixels(wide**2))
    inverse = jax.lax.rsqrt(jnp.maximum(square - mean**2, 0.0) + eps)
    y = _affine(wide, inverse * gain, bias - mean * inverse * gain)
    y = (nn.silu(y) if swish else y).astype(x.dtype)
    return y, (x, gain, bias, mean, inverse)


def _backward(swish: bool, eps: float, kept: tuple, slope: Array) -> tuple[Array, Array, Array]:
    del eps
    x, gain, bias, mean, inverse = kept
    wide, slope = x.astype(jnp.float32), slope.astype(jnp.float32)
    if swish:
        y = _affine(wide, inverse * gain, bias - mean * inverse * gain)
        on = nn.sigmoid(y)
        slope = slope * on * (1.0 + y * (1.0 - on))
    count = x.shape[1] * x.shape[2]
    of_bias = over_pixels(slope) * count
    of_gain = inverse * (over_pixels(slope * wide) * count - mean * of_bias)
    # The statistics depend on x, too: with g = gain slope,
    # slope_x = (g - mean(g) - xhat mean(xhat g)) / deviation.
    along = inverse**2 * _of_groups(gain * of_gain) / count
    shift = inverse * _of_groups(gain * of_bias) / count
    of_x = slope * _spread(inverse * gain) - _affine(wide, along, shift - mean * along)
    return of_x.astype(x.dtype), of_gain, of_bias


normalised.defvjp(_forward, _backward)


def over_pixels(x: Array) -> Array:
    """Returns the mean over pixels, float32 [B, C] of [B, H, W, C]."""

    def by_product(x: Array) -> Array:
        ones = jnp.ones((x.shape[0], 1, x.shape[1] * x.shape[2]), x.dtype)
        pixels = x.reshape(x.shape[0], -1, x.shape[-1])
        return jnp.matmul(ones, pixels)[:, 0] / ones.shape[-1]

    return jax.lax.platform_dependent(x, cpu=by_product, default=lambda x: jnp.mean(x, axis=(1, 2)))


def _of_groups(a_BxC: Array) -> Array:
    """Returns the mean over the channels of the group of each channel, [B, C]."""
    batch, size = a_BxC.shape
    groups = jnp.mean(a_BxC.reshape(batch, GROUPS, -1), axis=-1)
    return jnp.repeat(groups, size // GROUPS, axis=-1)


def _affine(x: Array, factor_BxC: Array, shift_BxC: Array) -> Array:
    return x * _spread(factor_BxC) + _spread(shift_BxC)


def _spread(a_BxC: Array) -> Array:
    return a_BxC[:, None, None, :]
