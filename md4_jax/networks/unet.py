"""U-Nets for images: that of MD4 with one resolution, and those with several resolutions."""

import dataclasses
import math
import re
from typing import ClassVar

import flax.linen as nn
import jax

from md4_jax.networks.attention import KERNELS, kernel_for
from md4_jax.networks.context import check_options
from md4_jax.networks.group_norm import GROUPS
from md4_jax.networks.images import INPUTS, check_images, image_network
from md4_jax.networks.linear import rounded
from md4_jax.networks.ordinal import log_probabilities
from md4_jax.networks.residual import REMAT
from md4_jax.networks.unet_module import UNetModule
from md4_jax.protocols import Array, Network, Params, UserError

CHOICES = {
    "attention": KERNELS,
    "dtype": ("float32", "bfloat16"),
    "input": INPUTS,
    "output": ("categorical", "truncated_logistic"),
    "remat": tuple(REMAT),
}


@dataclasses.dataclass(frozen=True)
class UNet:
    """Options of the U-Net; `build()` makes the network.

    The defaults are those of google-deepmind/md4 for CIFAR-10.

    shape              height, width and channels of the images, from the data
    channels           of the residual blocks; a multiple of 32. With 32 itself each channel is
                       normalised separately, which removes the shift by the time embedding
    blocks             residual blocks of each resolution in the down path; the up path has one more
    multipliers        of `channels`, one for each resolution, full resolution first
    attention_at       heights of feature maps at which self-attention follows each block
    input              embedding, a vector for each level; intensity, for ordered levels: the
                       number between -1 and 1, and whether it is masked
    output             categorical, a logit for each level; truncated_logistic, a location and a
                       scale. With input=intensity the location is added to the input
    time_conditioning  conditions every block on t; False: no time input
    classes            number of class labels, which condition blocks like the time
    label_dropout      probability of hiding a training sequence's label
    dropout            dropout rate before the second convolution of a block
    scan_blocks        compiles one block of each kind; needs a single resolution. On CPUs a
                       training step of 8 blocks on 4 images then takes 331 instead of 800 MiB of
                       temporaries, and 1.7 times the processor time
    attention          kernel: plain, splash (TPU), cudnn (NVIDIA), or auto, the platform's best
    remat              what the backward pass recomputes: none, only normalisation; full, blocks
    """

    adaptive: ClassVar[bool] = False  # whether the condition determines the norms' gain and bias
    name: ClassVar[str] = "unet"

    vocab_size: int
    shape: tuple[int, ...] = ()
    channels: int = 128
    blocks: int = 32
    multipliers: tuple[int, ...] = (1,)
    attention_at: tuple[int, ...] = ()
    input: str = "embedding"
    output: str = "categorical"
    time_conditioning: bool = True
    classes: int = 0
    label_dropout: float = 0.0
    dropout: float = 0.0
    scan_blocks: bool = True
    attention: str = "auto"
    remat: str = "none"
    dtype: str = "float32"

    def __post_init__(self):
        check_options(self, CHOICES, ("dropout", "label_dropout"), blocks=1, classes=0)
        if self.channels % GROUPS or self.channels < GROUPS:
            raise UserError(
                f"network.channels={self.channels} must be a multiple of {GROUPS}, the number of "
                "groups of channels that are normalised together"
            )
        if not self.multipliers or min(self.multipliers) < 1:
            raise UserError(
                f"network.multipliers={self.multipliers} must be whole numbers of at least 1, one "
                "for each resolution"
            )
        divisor = 2 ** (len(self.multipliers) - 1)
        check_images(self, self.name, divisor, f"network.multipliers={self.multipliers}")
        heights = [self.shape[0] >> level for level in range(len(self.multipliers))]
        if lost := set(self.attention_at) - set(heights):
            raise UserError(
                f"network.attention_at={self.attention_at}: there is no feature map of height "
                f"{min(lost)}. The heights are {', '.join(map(str, heights))}"
            )

    @property
    def is_ordinal(self) -> bool:
        """Whether the head treats the levels as ordered."""
        return self.output == "truncated_logistic"

    @property
    def scans(self) -> bool:
        """Whether equal blocks are one scanned module."""
        return self.scan_blocks and len(self.multipliers) == 1 and not self.attention_at

    @property
    def attention_size(self) -> int:
        """Features of a head of attention."""
        return self.channels * max(self.multipliers)

    def resolved(self, platform: str) -> "UNet":
        """Returns the options with the platform's kernels in place of auto."""
        return dataclasses.replace(
            self,
            attention=kernel_for(self.attention, platform, self.attention_size, self.dtype),
        )

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        return image_network(self.resolved(platform))

    def module(self) -> nn.Module:
        """Makes the module of these options."""
        return UNetModule(self)

    def unembed(self, h: Array) -> Array:
        """Returns float32 logits [..., V]: the features, or computed from location and scale."""
        h = h.astype("float32")
        return log_probabilities(h, self.vocab_size) if self.is_ordinal else h

    def forward_flops(self, params: Params, length: int, block: int = 0) -> float:
        """Returns the FLOPs of a forward pass per dimension of an image.

        They are 2 for each weight and pixel of its feature map, plus 4 N^2 C for attention over N
        pixels.
        """
        del block
        total = 0.0
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            names = [key.key for key in path]
            places = self.positions(names[0])
            if names[-1] == "kernel" and names[-2] not in OF_AN_IMAGE:
                total += 2.0 * places * math.prod(leaf.shape)
            if names[-1] == "kernel" and names[-2] == "query":  # of all layers, if scanned
                total += 4.0 * places**2 * math.prod(leaf.shape) / leaf.shape[-2]
        return total / length

    def padding(self) -> int:
        """Returns the number of entries of the embedding that stand for no level."""
        if self.input == "intensity":
            return 0
        return (rounded(self.vocab_size + 1) - self.vocab_size - 1) * self.channels

    def positions(self, name: str) -> float:
        """Returns the number of pixels that a part of the module is applied to."""
        halvings = _halvings(name, len(self.multipliers) - 1)
        return self.shape[0] * self.shape[1] / 4**halvings


# Layers that read only the condition of an image, not its pixels.
OF_AN_IMAGE = ("modulation", "time_in", "time_out")


def _halvings(name: str, last: int) -> int:
    """Returns the number of times that the feature map of a module has been halved."""
    if name.startswith("middle"):
        return last
    found = re.match(r"(conv_)?(down|up)_(\d+)", name)
    if not found:
        return 0
    return int(found[3]) - (found[1] is not None and found[2] == "up")
