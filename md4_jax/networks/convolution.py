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
CONVOLUTIONS = ("auto", "direct", "winograd")


def convolution_for(name: str, platform: str, dtype: str) -> str:
    """Returns the form to use; auto is winograd on CPUs in float32, else direct."""
    if name != "auto":
        return name
    return "winograd" if platform == "cpu" and dtype == "float32" else "direct"


class Convolution(nn.Module):
    """Convolution with 3 x 3 weights and a bias, over neighbours that are zero outside the image.

    size    channels of the result
    form    direct, the platform's own; winograd, see `winograd`
    stride  2: of every second pixel alone
    zeros   starts at zero
    """

    size: int
    dtype: jnp.dtype
    form: str
    stride: int = 1
    zeros: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.initializers.zeros if self.zeros else kernel_init("lecun")
        shape = (3, 3, x.shape[-1], self.size)
        kernel = self.param("kernel", init, shape).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.size,)).astype(self.dtype)
        even = x.shape[1] % 2 == 0 and x.shape[2] % 2 == 0
        if self.form == "winograd" and self.stride == 1 and even:
            y = winograd(x.astype(self.dtype), kernel)
        else:
            y = direct(x.astype(self.dtype), kernel, self.stride)
        return constrain(y + bias, BATCH_AXES, None, None, None)


def direct(x: Array, kernel: Array, stride: int = 1) -> Array:
    """Convolves by the platform's own function."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# Transforms of Winograd's F(2 x 2, 3 x 3) along one side: of 4 pixels, 3 weights and 4 products.
OF_PIXELS = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
OF_WEIGHTS = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
OF_PRODUCTS = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])


def winograd(x: Array, kernel: Array) -> Array:
    """Convolves with 16 instead of 36 products for 2 x 2 pixels (arXiv:1509.09308), H and W even.

    The products of all tiles of 2 x 2 are 16 products of matrices [tiles, C] x [C, size].
    """
    batch, height, width, channels = x.shape
    rows, columns, size = height // 2, width // 2, kernel.shape[-1]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    tiles = [
        [padded[:, i : i + 2 * rows - 1 : 2, j : j + 2 * columns - 1 : 2] for j in range(4)]
        for i in range(4)
    ]
    pixels = jnp.stack(_transformed(OF_PIXELS, tiles)).reshape(16, -1, channels)
    both = np.einsum("ai,bj->abij", OF_WEIGHTS, OF_WEIGHTS).reshape(16, 9)
    weights = jnp.asarray(both, x.dtype) @ kernel.reshape(9, -1)
    products = jnp.einsum("ktc,kcd->ktd", pixels, weights.reshape(16, channels, size))
    products = products.reshape(4, 4, batch, rows, columns, size)
    four = _transformed(OF_PRODUCTS, [list(row) for row in products])
    y = jnp.stack(four, axis=3).reshape(batch, rows, columns, 2, 2, size)
    return jnp.swapaxes(y, 2, 3).reshape(batch, height, width, size)


def _transformed(matrix: np.ndarray, grid: list[list[Array]]) -> list[Array]:
    """Returns matrix . grid . matrix^T, row by row."""
    down = [[_combined(row, column) for column in zip(*grid, strict=True)] for row in matrix]
    return [_combined(row, across) for across in down for row in matrix]


def _combined(row: np.ndarray, arrays) -> Array:
    """Sums the arrays with factors of 0, 1 and -1."""
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
