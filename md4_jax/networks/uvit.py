"""U-ViT for images: residual blocks of convolutions around a transformer on patches."""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from md4_jax.networks.condition import FinalModulation, activations
from md4_jax.networks.context import check_least
from md4_jax.networks.depth import stack
from md4_jax.networks.images import check_images, patches, unpatched
from md4_jax.networks.layers import FIRST, norm
from md4_jax.networks.linear import Linear
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.unet import UNet
from md4_jax.networks.unet_module import BlockKeys, UNetModule
from md4_jax.protocols import Array, UserError
from md4_jax.runtime.sharding import BATCH_AXES, constrain


@dataclasses.dataclass(frozen=True)
class UViT(UNet):
    """Options of the U-ViT, a U-Net with a DiT in its middle; `build()` makes the network.

    The defaults are those of google-deepmind/md4 for ImageNet 64. The condition determines gain and
    bias of every normalisation. Options are those of UNet, and

    size, depth, heads  of the transformer, with dropout also in softmax weights and hidden features
    patch               side of the square patches of pixels that are its tokens
    """

    adaptive: ClassVar[bool] = True
    name: ClassVar[str] = "uvit"

    channels: int = 256
    blocks: int = 8
    size: int = 768
    depth: int = 20
    heads: int = 12
    patch: int = 2

    def __post_init__(self):
        super().__post_init__()
        check_least(self, patch=1, size=1, depth=1, heads=1)
        smallest = self.patch * 2 ** (len(self.multipliers) - 1)
        check_images(self, self.name, smallest, f"network.patch={self.patch}")
        if self.size % (4 * self.heads):
            raise UserError(
                f"network.size={self.size} must be a multiple of four times "
                f"network.heads={self.heads}"
            )

    @property
    def middle(self) -> "MiddleBlocks":
        """Options of the transformer's blocks."""
        return MiddleBlocks(
            self.vocab_size, self.size, self.depth, self.heads, 4 * self.size, "gelu", self.heads,
            norm="layer" if self.time_conditioning or self.classes else "rms",
            time_conditioning=self.time_conditioning, classes=self.classes,
            dropout=self.dropout, attention_dropout=self.dropout,
            scan_blocks=self.scan_blocks, remat=self.remat, dtype=self.dtype,
            attention=self.attention,
        )  # fmt: skip

    @property
    def attention_size(self) -> int:
        """Features of a head of attention."""
        return self.size // self.heads

    def module(self) -> nn.Module:
        """Makes the module of these options."""
        return UViTModule(self)

    def positions(self, name: str) -> float:
        """Returns the number of pixels or patches that a part of the module is applied to."""
        return super().positions(name) / (self.patch**2 if name == "middle" else 1)


@dataclasses.dataclass(frozen=True)
class MiddleBlocks(Transformer):
    """Options of the blocks in the middle: learned positions, biases, and more dropout."""

    rotary: ClassVar[bool] = False
    shared_places: ClassVar[tuple[int, ...]] = (FIRST,)

    qkv_bias: bool = True

    @property
    def hidden_dropout(self) -> float:
        return self.dropout


class UViTModule(UNetModule):
    """U-Net with a transformer in the middle."""

    def count(self) -> int:
        return super().count() - 2 + self.options.depth

    def _middle(self, x: Array, condition_BxD: Array | None, keys: BlockKeys) -> Array:
        o = self.options
        condition_Bx1xD = None if condition_BxD is None else condition_BxD[:, None]
        middle = Middle(o.middle, o.patch, name="middle")
        return middle(x, condition_Bx1xD, keys.next(o.depth))


class Middle(nn.Module):
    """Transformer on patches of a feature map [B, H, W, C]; returns a new feature map."""

    options: MiddleBlocks
    patch: int

    @nn.compact
    def __call__(self, x: Array, condition_Bx1xD: Array | None, keys: Array | None) -> Array:
        o, dtype, shape = self.options, x.dtype, x.shape[1:]
        x_BxNxD = Linear(o.size, dtype, bias=True, name="patch_in")(patches(x, self.patch))
        sides = shape[0] // self.patch, shape[1] // self.patch
        places = self.param("positions", lambda key: jnp.asarray(sinusoids(sides, o.size)))
        x_BxNxD = constrain(x_BxNxD + places.astype(dtype), BATCH_AXES, None, None)
        blocks = Blocks(o, name="blocks")
        x_BxNxD = norm(o, conditioned=condition_Bx1xD is not None, name="final_norm")(
            blocks(x_BxNxD, condition_Bx1xD, keys)
        )
        if condition_Bx1xD is not None:
            final = FinalModulation(dtype, activations(o)[1], name="final_modulation")
            shift, scale = final(condition_Bx1xD, x_BxNxD.shape)
            x_BxNxD = x_BxNxD * (1.0 + scale) + shift
        size = self.patch**2 * shape[-1]
        x_BxNxD = Linear(size, dtype, zeros=True, bias=True, name="patch_out")(x_BxNxD)
        return constrain(unpatched(x_BxNxD, shape, self.patch), BATCH_AXES, None, None, None)


class Blocks(nn.Module):
    """Sequence of transformer blocks."""

    options: Any

    def setup(self):
        self.layers = stack(self.options)

    def __call__(self, x: Array, condition: Array | None, keys: Array | None) -> Array:
        if self.options.scan_blocks:
            return self.layers(x, condition, None, keys)[0]
        for number, layer in enumerate(self.layers):
            x, _ = layer(x, condition, None, None if keys is None else keys[number])
        return x


def sinusoids(sides: tuple[int, int], size: int) -> np.ndarray:
    """Returns position embeddings of patches, [N, size], row by row: half column, half row."""
    rows, columns = np.unravel_index(np.arange(sides[0] * sides[1]), sides)
    frequency = 10_000.0 ** (-np.arange(size // 4) / (size // 4))
    angles = [place[:, None] * frequency for place in (columns, rows)]
    parts = [wave(angle) for angle in angles for wave in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1).astype(np.float32)
