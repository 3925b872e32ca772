"""Convolutions and normalisation of images, [B, H, W, C] with C channels last."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.networks.linear import Linear, kernel_init
from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, constrain

# Groups of channels that are normalised together, as in all U-Nets since DDPM.
GROUPS = 32


class Convolution(nn.Module):
    """Convolution with 3 x 3 weights and a bias, over neighbours that are zero outside the image.

    size    channels of the result
    stride  2: of every second pixel alone
    zeros   starts at zero
    """

    size: int
    dtype: jnp.dtype
    stride: int = 1
    zeros: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.initializers.zeros if self.zeros else kernel_init("lecun")
        shape = (3, 3, x.shape[-1], self.size)
        kernel = self.param("kernel", init, shape).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.size,)).astype(self.dtype)
        is_even = x.shape[1] % 2 == 0 and x.shape[2] % 2 == 0
        quick = is_even and self.stride == 1 and kernel.dtype == jnp.float32
        x = x.astype(self.dtype)
        y = convolve(x, kernel) if quick else plainly(x, kernel, self.stride)
        return constrain(y + bias, BATCH_AXES, None, None, None)


def plainly(x: Array, kernel: Array, stride: int = 1) -> Array:
    """Convolves by XLA's function."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@jax.custom_vjp
def convolve(x: Array, kernel: Array) -> Array:
    """Convolves as `plainly`, with H and W even. On CPUs it has its own gradient of the weights.

    XLA's takes 4 times as long as the convolution itself on 2 CPU cores, and `slope_of_weights`
    as long: 27 and 7 ms for 4 x 32 x 32 pixels of 128 channels.
    """
    return plainly(x, kernel)


def _backward(kept: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    x, kernel = kept
    (of_x,) = jax.linear_transpose(lambda x: plainly(x, kernel), x)(slope)

    def by_xla(x: Array, slope: Array) -> Array:
        return jax.linear_transpose(lambda kernel: plainly(x, kernel), kernel)(slope)[0]

    return of_x, jax.lax.platform_dependent(x, slope, cpu=slope_of_weights, default=by_xla)


convolve.defvjp(lambda x, kernel: (plainly(x, kernel), (x, kernel)), _backward)

# Transforms of Winograd's F(2 x 2, 3 x 3) along one side: of 4 pixels, 3 weights and 2 results.
OF_PIXELS = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
OF_WEIGHTS = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
OF_RESULTS = np.array([[1, 0], [1, 1], [1, -1], [0, -1]])


def slope_of_weights(x: Array, slope: Array) -> Array:
    """Computes the gradient [3, 3, C, D] in the weights from x [B, H, W, C] and slope [B, H, W, D].

    It is that of Winograd's form of the convolution (arXiv:1509.09308), whose products are 16
    products of matrices of all tiles of 2 x 2 pixels, 4 / 9 of the work of the convolution.
    """
    batch, height, width, channels = x.shape
    rows, columns, size = height // 2, width // 2, slope.shape[-1]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    pairs = padded.reshape(batch, rows + 1, 2, columns + 1, 2, channels)
    # Pixel (i, j) of the 4 x 4 around each tile, and result (i, j) of each tile.
    pixels = [
        [
            pairs[:, i // 2 : rows + i // 2, i % 2, j // 2 : columns + j // 2, j % 2]
            for j in range(4)
        ]
        for i in range(4)
    ]
    slopes = slope.reshape(batch, rows, 2, columns, 2, size)
    results = [[slopes[:, :, i, :, j] for j in range(2)] for i in range(2)]
    products = [
        a.reshape(-1, channels).T @ b.reshape(-1, size)
        for a, b in zip(
            transformed(OF_PIXELS, pixels), transformed(OF_RESULTS, results), strict=True
        )
    ]
    products = jnp.stack(products).reshape(4, 4, channels, size)
    of_weights = jnp.asarray(OF_WEIGHTS, x.dtype)
    return jnp.einsum("ai,bj,abcd->ijcd", of_weights, of_weights, products)


def transformed(matrix: np.ndarray, grid: list[list[Array]]) -> list[Array]:
    """Returns the entries of matrix . grid . matrix^T row by row, for factors 0, 1 and -1."""
    half = [[_combined(row, column) for column in zip(*grid, strict=True)] for row in matrix]
    return [_combined(row, entries) for entries in half for row in matrix]


def _combined(row: np.ndarray, arrays) -> Array:
    total = None
    for factor, array in zip(row, arrays, strict=True):
        if factor and total is None:
            total = array if factor > 0 else -array
        elif factor:
            total = total + array if factor > 0 else total - array
    return total


class GroupNorm(nn.Module):
    """Normalisation of groups of channels over all pixels, then swish if asked for.

    swish  computes y sigmoid(y) of the result y

    Gain and bias of each channel are parameters, or linear in a condition [B, D] if one is given.
    """

    swish: bool = True
    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: Array, condition_BxD: Array | None = None) -> Array:
        size = x.shape[-1]
        if condition_BxD is None:
            gain = self.param("scale", nn.initializers.ones, (size,))[None]
            bias = self.param("bias", nn.initializers.zeros, (size,))[None]
        else:
            linear = Linear(2 * size, x.dtype, zeros=True, bias=True, name="modulation")
            scale, bias = jnp.split(linear(condition_BxD).astype(jnp.float32), 2, axis=-1)
            gain = 1.0 + scale
        mean, inverse = _statistics(x, self.eps)
        factor = inverse * gain
        y = x.astype(jnp.float32) * _spread(factor) + _spread(bias - mean * factor)
        return (nn.silu(y) if self.swish else y).astype(x.dtype)


def _statistics(x: Array, eps: float) -> tuple[Array, Array]:
    """Returns mean and 1 / standard deviation of the group of each channel, float32 [B, C]."""
    batch, size = x.shape[0], x.shape[-1]
    wide = x.astype(jnp.float32)
    pair = jnp.stack([jnp.mean(wide, axis=(1, 2)), jnp.mean(wide**2, axis=(1, 2))])
    groups = jnp.mean(pair.reshape(2, batch, GROUPS, -1), axis=-1)
    mean, square = jnp.repeat(groups, size // GROUPS, axis=-1)
    return mean, jax.lax.rsqrt(jnp.maximum(square - mean**2, 0.0) + eps)


def _spread(a_BxC: Array) -> Array:
    return a_BxC[:, None, None, :]
