"""Linen module of the U-Nets. Names end in their shapes; [B, H, W, C] where they have none."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from md4_jax.networks.condition import TIME_EMBEDDINGS, TimeEmbedding
from md4_jax.networks.context import label_rows
from md4_jax.networks.convolution import Convolution
from md4_jax.networks.dropout import layer_keys
from md4_jax.networks.group_norm import GroupNorm
from md4_jax.networks.linear import embedding_init, rounded
from md4_jax.networks.ordinal import around_input, intensity
from md4_jax.networks.residual import REMAT, PixelAttention, ResidualBlock, doubled
from md4_jax.networks.vectors import vectors_of
from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, constrain


class UNetModule(nn.Module):
    """Maps levels z [B, L] and times t [B] to features [B, L, V], or [B, L, 2] if ordinal.

    options  those of `UNet`
    label    int32 [B]: a class in 0..classes-1; any other number: no class
    keys     [B]: for dropout; None: nothing is dropped
    """

    options: Any

    @nn.compact
    def __call__(
        self, z_BxL: Array, t_B: Array, label: Array | None = None, keys: Array | None = None
    ) -> Array:
        o = self.options
        z = z_BxL.reshape(-1, *o.shape)
        condition_BxD = self._condition(t_B, label)
        each = BlockKeys(keys, self.count())
        x = self._convolution(o.channels, "conv_in")(self._pixels(z))
        x, skips = self._down(x, condition_BxD, each)
        x = self._middle(x, condition_BxD, each)
        x = self._up(x, skips, condition_BxD, each)
        x = GroupNorm(name="norm_out")(x, condition_BxD if o.adaptive else None)
        return self._head(x, z)

    def count(self) -> int:
        """Returns the number of blocks with dropout."""
        o = self.options
        return len(o.multipliers) * (2 * o.blocks + 1) + 2

    def _condition(self, t_B: Array, label_B: Array | None) -> Array | None:
        """Embeds the time, plus the class: [B, D]."""
        o, dtype, condition_BxD = self.options, jnp.dtype(self.options.dtype), None
        if o.time_conditioning:
            time = TimeEmbedding(o.channels, TIME_EMBEDDINGS["md4"], dtype, "lecun", name="time")
            condition_BxD = time(t_B[:, None])[:, 0]
        if o.classes:
            shape = (o.classes + 1, o.channels)
            table = self.param("label_table", nn.initializers.normal(1.0), shape)
            row_BxD = label_rows(table, label_B, len(t_B)).astype(dtype)
            condition_BxD = row_BxD if condition_BxD is None else condition_BxD + row_BxD
        return condition_BxD

    def _pixels(self, z: Array) -> Array:
        """Embeds levels; the vectors of a pixel's channels are concatenated."""
        o, dtype = self.options, jnp.dtype(self.options.dtype)
        if o.input == "intensity":
            masked = (z == o.vocab_size).astype(dtype)
            x = jnp.concatenate([intensity(z, o.vocab_size).astype(dtype), masked], axis=-1)
            return constrain(x, BATCH_AXES, None, None, None)
        shape = (rounded(o.vocab_size + 1), o.channels)
        table = self.param("embedding", embedding_init("depth_scaled", o.channels), shape)
        x = vectors_of(table, z, dtype, o.vocab_size)
        return constrain(x.reshape(*z.shape[:3], -1), BATCH_AXES, None, None, None)

    def _convolution(self, size: int, name: str, **more: Any) -> Convolution:
        return Convolution(size, jnp.dtype(self.options.dtype), name=name, **more)

    def _block(self, size: int, name: str) -> nn.Module:
        remat = nn.remat(ResidualBlock, policy=REMAT[self.options.remat])
        return remat(self.options, size, name=name)

    def _scanned(self, name: str, length: int, skips: bool) -> nn.Module:
        """Makes equal blocks as one scanned module, with a leading layer axis in parameters."""
        o = self.options
        axes = (nn.broadcast, 0, 0) if skips else (nn.broadcast, 0)
        block = nn.scan(
            nn.remat(ResidualBlock, prevent_cse=False, policy=REMAT[o.remat]),
            variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=axes, length=length,
        )  # fmt: skip
        return block(o, o.channels * o.multipliers[0], name=name)

    def _attended(self, x: Array, name: str) -> Array:
        if x.shape[1] not in self.options.attention_at:
            return x
        return PixelAttention(self.options, name=name)(x)

    def _down(self, x: Array, condition_BxD: Array | None, keys: "BlockKeys") -> tuple[Array, Any]:
        """Returns x and the skip connections for the up path, newest last."""
        o, skips = self.options, [x]
        if o.scans:
            x, found = self._scanned("down", o.blocks, False)(x, condition_BxD, keys.next(o.blocks))
            skips = jnp.concatenate([skips[0][None], found])
            # Without this constraint XLA splits layers or channels here, with wrong results on a
            # mesh that has all three axes.
            return x, constrain(skips, None, BATCH_AXES, None, None, None)
        for level, multiplier in enumerate(o.multipliers):
            if level:
                x = self._convolution(x.shape[-1], f"conv_down_{level}", stride=2)(x)
                skips.append(x)
            for n in range(o.blocks):
                block = self._block(o.channels * multiplier, f"down_{level}_{n}")
                x, _ = block(x, condition_BxD, keys.next())
                x = self._attended(x, f"down_{level}_{n}_attention")
                skips.append(x)
        return x, skips

    def _middle(self, x: Array, condition_BxD: Array | None, keys: "BlockKeys") -> Array:
        size = self.options.channels * self.options.multipliers[-1]
        x, _ = self._block(size, "middle_0")(x, condition_BxD, keys.next())
        x = PixelAttention(self.options, name="middle_attention")(x)
        return self._block(size, "middle_1")(x, condition_BxD, keys.next())[0]

    def _up(self, x: Array, skips: Any, condition_BxD: Array | None, keys: "BlockKeys") -> Array:
        o = self.options
        if o.scans:
            block = self._scanned("up", o.blocks + 1, True)
            skips = constrain(skips[::-1], None, BATCH_AXES, None, None, None)
            return block(x, condition_BxD, keys.next(o.blocks + 1), skips)[0]
        for level in reversed(range(len(o.multipliers))):
            for n in range(o.blocks + 1):
                block = self._block(o.channels * o.multipliers[level], f"up_{level}_{n}")
                x, _ = block(x, condition_BxD, keys.next(), skips.pop())
                x = self._attended(x, f"up_{level}_{n}_attention")
            if level:
                x = self._convolution(x.shape[-1], f"conv_up_{level}")(doubled(x))
        return x

    def _head(self, x: Array, z: Array) -> Array:
        """Returns the features of each dimension of the image, [B, L, V or 2]."""
        o = self.options
        each = 2 if o.is_ordinal else o.vocab_size
        dtype = jnp.dtype("float32" if o.is_ordinal else o.dtype)
        head = Convolution(z.shape[-1] * each, dtype, zeros=True, name="conv_out")
        h_BxLxD = head(x).reshape(len(z), -1, each)
        if o.is_ordinal and o.input == "intensity":
            h_BxLxD = around_input(h_BxLxD, z.reshape(len(z), -1), o.vocab_size, bounded=True)
        return constrain(h_BxLxD, BATCH_AXES, None, None)


class BlockKeys:
    """Iterator over the dropout keys of the blocks."""

    def __init__(self, keys: Array | None, count: int):
        self.each_NxB, self.used = layer_keys(keys, count), 0

    def next(self, count: int = 0) -> Array | None:
        """Returns the keys of the next block [B], or of the next `count` blocks [count, B]."""
        first, self.used = self.used, self.used + max(count, 1)
        if self.each_NxB is None:
            return None
        return self.each_NxB[first : self.used] if count else self.each_NxB[first]
