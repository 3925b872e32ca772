"""Images as symbols: one for each channel of each pixel."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from md4_jax.protocols import Array, UserError

VALUES = 256  # of a channel of 8 bits


@dataclasses.dataclass(frozen=True)
class PixelDomain:
    """Images of 8-bit channels, one symbol for the level of each channel of each pixel.

    shape   (H, W, C), with C = 1 for grey and C = 3 for red, green and blue
    levels  number of symbols. With fewer than 256, the levels are bins of equal width:
            level = floor(value * levels / 256)
    labels  names of the classes: class k is labels[k]. (): no classes

    The symbols are the levels in row-major order of [H, W, C]: the channels of the first pixel,
    then those of the pixel to its right.
    """

    shape: tuple[int, ...]
    levels: int = VALUES
    labels: tuple[str | int, ...] = ()

    unit = "dimension"

    def __post_init__(self):
        if len(self.shape) != 3 or self.shape[2] not in (1, 3):
            raise UserError(f"images have the shape (H, W, 1) or (H, W, 3), not {self.shape}")
        if not 2 <= self.levels <= VALUES:
            raise UserError(f"data.levels={self.levels} must lie in 2..{VALUES}")

    @property
    def vocab_size(self) -> int:
        return self.levels

    @property
    def picture(self) -> tuple[int, ...]:
        """Shape (H, W, C) of the images: the domain's own shape."""
        return self.shape

    def encode(self, images: Array) -> np.ndarray:
        """Returns the symbols [..., L] of images uint8 [..., H, W, C], as uint8."""
        levels = (np.asarray(images).astype(np.uint16) * self.levels) >> 8
        return levels.astype(np.uint8).reshape(*levels.shape[:-3], math.prod(self.shape))

    def decode(self, row: Sequence[int] | Array) -> np.ndarray:
        """Returns images uint8 [..., H, W, C] of symbols [..., L], with the values of `shown`."""
        row = np.asarray(row)
        return shown(self.levels)[row].reshape(*row.shape[:-1], *self.shape)

    def to_json(self) -> str:
        """Returns the JSON object of the domain."""
        return json.dumps({"domain": "pixels", **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], load: Any = None) -> "PixelDomain":
        """Makes the domain from the parsed JSON object."""
        del load
        return cls(tuple(fields["shape"]), fields["levels"], tuple(fields["labels"]))


def shown(levels: int) -> np.ndarray:
    """Returns the value in 0..255 that displays each level: uint8 [levels].

    It is the value in the level's bin that is nearest to 255 level / (levels - 1). So the first
    level is black, the last one is white, and encoding the displayed value returns the level.
    """
    level = np.arange(levels)
    first, last = -(-VALUES * level // levels), -(-VALUES * (level + 1) // levels) - 1
    return np.clip(np.round(255 * level / (levels - 1)), first, last).astype(np.uint8)
