"""Blocks of the U-Nets. Options are those of `UNet`; names end in shapes, [B, H, W, C] if none."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from md4_jax.networks.attention import attend
from md4_jax.networks.convolution import Convolution
from md4_jax.networks.dropout import kept, scaled
from md4_jax.networks.group_norm import GroupNorm
from md4_jax.networks.linear import Linear
from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, constrain

# What the backward pass of a block reuses, by network.remat. It recomputes normalisations, which
# need no matrix products, so a block stores only its input and the results of two convolutions.
REMAT = {
    "none": jax.checkpoint_policies.save_only_these_names("convolved", "kept"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class ResidualBlock(nn.Module):
    """Residual block of two convolutions, each after normalisation and swish.

    size  number of channels of the result

    The condition shifts the result of the first convolution; with options.adaptive it determines
    gain and bias of both normalisations instead. A skip is concatenated to the channels of the
    input. keys [B] are for dropout before the second convolution. Returns (x, x), as scans need it.
    """

    options: Any
    size: int

    @nn.compact
    def __call__(
        self,
        x: Array,
        condition_BxD: Array | None,
        keys: Array | None = None,
        skip: Array | None = None,
    ) -> tuple[Array, Array]:
        o, dtype = self.options, jnp.dtype(self.options.dtype)
        of_norm = condition_BxD if o.adaptive else None
        if skip is not None:
            x = jnp.concatenate([x, skip], axis=-1)
        y = GroupNorm(name="norm_1")(x, of_norm)
        y = Convolution(self.size, dtype, name="conv_1")(y)
        if condition_BxD is not None and not o.adaptive:
            kernel = nn.initializers.zeros
            shift = nn.Dense(
                self.size, use_bias=False, kernel_init=kernel, dtype=dtype, name="modulation"
            )
            y = y + shift(condition_BxD)[:, None, None, :]
        y = GroupNorm(name="norm_2")(checkpoint_name(y, "convolved"), of_norm)
        if keys is not None and o.dropout:
            keep = checkpoint_name(kept(keys, o.dropout, y.shape[1:]), "kept")
            y = scaled(y, keep, o.dropout)
        y = Convolution(self.size, dtype, zeros=True, name="conv_2")(y)
        if x.shape[-1] != self.size:
            x = Linear(self.size, dtype, bias=True, name="shortcut")(x)
        x = constrain(x + y, BATCH_AXES, None, None, None)
        return x, x


class PixelAttention(nn.Module):
    """Residual self-attention over all pixels, with one head."""

    options: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        batch, *_, size = x.shape
        dtype = jnp.dtype(self.options.dtype)
        y_BxNxC = GroupNorm(swish=False, name="norm")(x).reshape(batch, -1, size)
        query, key, value = (
            Linear(size, dtype, bias=True, name=name)(y_BxNxC)[:, :, None]
            for name in ("query", "key", "value")
        )
        mixed = attend(query, key, value, kernel=self.options.attention).reshape(x.shape)
        return x + Linear(size, dtype, bias=True, name="out")(mixed)


def doubled(x: Array) -> Array:
    """Doubles the resolution: repeats each pixel as a 2 x 2 square."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
