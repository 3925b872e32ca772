"""Images of a source as rows: encoded once, stored on disk, mirrored at random in training."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from md4_jax.data import packing
from md4_jax.data.pixels import PixelDomain
from md4_jax.data.sequences import Rows
from md4_jax.protocols import UserError

AT_ONCE = 512  # images


class ImageSource:
    """Methods that all sources of images share. Each source has

    shape           (H, W, C)
    names           names of its classes, in order; () without classes
    levels, labels  options: number of levels (`PixelDomain`), and whether classes are used
    flip            whether training mirrors each image, left to right, with probability 1/2
    fingerprint()   a hash of the images and their splits
    images(split)   the images in pieces, uint8 [N, H, W, C]; no piece is empty
    numbers(split)  the classes of the images, int [N]
    """

    flip = False

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def domain(self) -> PixelDomain:
        """Returns the meaning of the symbols."""
        return PixelDomain(self.shape, self.levels, self.names if self.labels else ())

    def rows(self, split: str) -> Rows:
        """Returns the images of a split as rows of symbols, memory-mapped, with their classes.

        They are encoded once and stored, one byte per symbol. UserError if an image has no class.
        """
        domain = self.domain()

        def symbols() -> Iterator[np.ndarray]:
            return (domain.encode(piece).ravel() for piece in self.images(split))

        tokens = self.kept("images", split, domain.levels, symbols)
        tokens = tokens.reshape(-1, math.prod(domain.shape))
        mirror = Mirror(domain.shape) if self.flip else None
        return Rows(tokens, self.context(split, len(tokens)), augment=mirror)

    def context(self, split: str, count: int) -> dict[str, np.ndarray]:
        """Returns the classes of the `count` images of a split, memory-mapped, as 'label'.

        {} without classes. UserError if an image has no class.
        """
        size = len(self.domain().labels)
        if not size:
            return {}
        found = self.kept("labels", split, size, lambda: [self._classes(split, size)])
        if len(found) != count:
            raise UserError(f"the {split} split has {count:,} images and {len(found):,} labels")
        return {"label": found}

    def kept(self, what: str, split: str, size: int, pieces: packing.Pieces) -> np.ndarray:
        """Returns integers below `size` of a split, memory-mapped, computed once and stored."""
        described = [self._fingerprint, split, what, size]
        return packing.opened(*packing.kept(self, described, size, split, pieces))

    def _classes(self, split: str, count: int) -> np.ndarray:
        """Returns the classes of a split; UserError for an invalid class, such as -1."""
        found = np.asarray(self.numbers(split))
        if wrong := found[(found < 0) | (found >= count)].tolist():
            raise UserError(
                f"{len(wrong):,} of {len(found):,} images of the {split} split have an invalid "
                f"class: the first of these is {wrong[0]}, and classes must lie in "
                f"0..{count - 1}. Set data.labels=False to use the images without classes, or "
                "use another split"
            )
        return found

    @functools.cached_property
    def _fingerprint(self) -> str:
        return self.fingerprint()


class Mirror(NamedTuple):
    """Mirrors images of shape (H, W, C), left to right, where a random bit is set."""

    shape: tuple[int, ...]

    def __call__(self, tokens: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Returns tokens [B, L], mirroring the rows with odd bits; bits: uint64 [B]."""
        images = tokens.reshape(-1, *self.shape)
        chosen = (bits % 2 == 1)[:, None, None, None]
        return np.where(chosen, images[:, :, ::-1], images).reshape(tokens.shape)


def from_planes(planes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns images [N, H, W, C] from rows [N, C H W], which are channel-first."""
    height, width, channels = shape
    return planes.reshape(-1, channels, height, width).transpose(0, 2, 3, 1)


def in_pieces(images: Any) -> Iterator[np.ndarray]:
    """Yields consecutive pieces of an array of images."""
    for first in range(0, len(images), AT_ONCE):
        yield images[first : first + AT_ONCE]
