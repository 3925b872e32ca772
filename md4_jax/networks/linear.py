"""Linear layers, normalisation and their initial values."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.products import product
from md4_jax.protocols import Array
from md4_jax.runtime.reductions import repeated

# Vocabulary sizes are rounded up to a multiple of this, so that mesh axes divide them.
ROW_MULTIPLE = 128
# Initialisations of parameters; see `Transformer`.
INITIAL = ("lecun", "depth_scaled", "torch")
# Regular expression of the paths of adapters' parameters.
ADAPTERS = r"lora_[ab]/kernel$"


def rounded(rows: int) -> int:
    """Returns the number of rows of a table for this many symbols."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def kernel_init(initial: str, scale: float = 1.0) -> nn.initializers.Initializer:
    """Returns the initializer of a matrix [in, out]: truncated normal, or uniform as in PyTorch.

    The variance is scale / in, or 1 / (3 in) in PyTorch.
    """
    if initial == "torch":
        return nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
    return nn.initializers.variance_scaling(scale, "fan_in", "truncated_normal")


def embedding_init(initial: str, size: int) -> nn.initializers.Initializer:
    """Returns the initializer of a table of vectors of this size."""
    if initial == "torch":
        return lambda key, shape: jax.random.uniform(
            key, shape, minval=-(size**-0.5), maxval=size**-0.5
        )
    return nn.initializers.normal(size**-0.5 if initial == "depth_scaled" else 1.0)


class Linear(nn.Module):
    """Linear layer x W + b, computed in dtype; its parameters may be stored in another type.

    zeros: W and b start at zero; else they are initialised by `initial`, W with this scale.
    products: type of the operands of the product, float32 or bfloat16
    rank: rank of a low-rank adapter (arXiv:2106.09685), which adds alpha / rank (x A) B; 0: none.
    A is initially uniform with variance 1 / (3 in) and B zero, so that the adapter adds nothing.
    adapted: input of the adapter, if dropout makes it differ from x.
    """

    size: int
    dtype: jnp.dtype
    zeros: bool = False
    bias: bool = False
    initial: str = "lecun"
    scale: float = 1.0
    products: str = "float32"
    rank: int = 0
    alpha: float = 1.0

    @nn.compact
    def __call__(self, x: Array, adapted: Array | None = None) -> Array:
        fan_in = x.shape[-1]
        init = nn.initializers.zeros if self.zeros else kernel_init(self.initial, self.scale)
        kernel = self.param("kernel", init, (fan_in, self.size)).astype(self.dtype)
        y = product(x.astype(self.dtype), kernel, self.products)
        if self.bias:
            init = nn.initializers.zeros
            if self.initial == "torch" and not self.zeros:
                init = embedding_init("torch", fan_in)
            y = add_bias(y, self.param("bias", init, (self.size,)).astype(self.dtype))
        if self.rank:
            options = dict(dtype=self.dtype, initial="torch", products=self.products)
            read = x if adapted is None else adapted
            down = Linear(self.rank, **options, name="lora_a")(read)
            up = Linear(self.size, **options, zeros=True, name="lora_b")
            y = y + up(self.alpha / self.rank * down)
        return y


@jax.custom_jvp
def add_bias(x: Array, bias: Array) -> Array:
    """Computes x [..., M] + bias [M], with a custom gradient that is fast on CPUs."""
    return x + bias


@add_bias.defjvp
def _bias_tangent(primals: tuple[Array, Array], tangents: tuple[Array, Array]):
    x, bias = tangents
    return add_bias(*primals), x + repeated(bias, x.shape[:-1])


class Normalize(nn.Module):
    """RMSNorm or LayerNorm, with statistics in float32.

    centred  subtracts the mean (LayerNorm); else RMSNorm
    gain     multiplies by a parameter
    bias     adds a parameter
    """

    gain: bool
    centred: bool = False
    bias: bool = False
    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        if self.centred:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        y = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.eps)
        if self.gain:
            y = y * self.param("scale", nn.initializers.ones, (x.shape[-1],))
        if self.bias:
            y = y + self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return y.astype(x.dtype)


def normalized_heads(o: Any, query_BxLxHxDh: Array, key_BxLxHxDh: Array) -> tuple[Array, Array]:
    """Normalises queries and keys: each head with a gain, or all heads together without one."""
    if not o.joint_norm:
        made = partial(Normalize, gain=True, eps=o.norm_eps)
        return made(name="query_norm")(query_BxLxHxDh), made(name="key_norm")(key_BxLxHxDh)
    return tuple(
        Normalize(gain=False, eps=o.norm_eps)(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
        for x in (query_BxLxHxDh, key_BxLxHxDh)
    )
