"""Features of images, for comparing sets of images: docs/quality.md.

A kind of features is a frozen dataclass of its options with a line in FEATURES below, or in a
config as package.module:attribute. It has

    distance          class attribute: name of the Frechet distance in results
    __call__(images)  features [N, D] of images, uint8 [N, H, W, C]
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.evals import inception
from md4_jax.protocols import Array, UserError

AT_ONCE = 100  # images


@dataclasses.dataclass(frozen=True)
class RandomFeatures:
    """Features from three random convolutional layers, the same on every machine.

    3 x 3 convolutions with ReLU and `channels`, 2 `channels` and 4 `channels`; each of the first
    two is followed by downsampling by 2. Features are the means of the last channels over the four
    quarters of the image, 16 `channels` in all. Distances are comparable for images of one size and
    data set, but not with published ones.
    """

    distance: ClassVar[str] = "random_feature_distance"

    channels: int = 16

    def __post_init__(self):
        if self.channels < 1:
            raise UserError(f"features.channels must be at least 1, not {self.channels}")

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Returns features float32 [N, 16 channels] of images, uint8 [N, H, W, C]."""
        return in_batches(_random, self._filters(images.shape[-1]), images)

    def _filters(self, channels: int) -> list[np.ndarray]:
        """Draws the filters [3, 3, in, out], scaled to map unit inputs to outputs of about one."""
        draw = np.random.RandomState(0)  # its numbers are the same in every version of NumPy
        sizes = [channels, *(self.channels * 2**layer for layer in range(3))]
        return [
            (draw.standard_normal((3, 3, m, n)) * math.sqrt(2 / (9 * m))).astype(np.float32)
            for m, n in itertools.pairwise(sizes)
        ]


@dataclasses.dataclass(frozen=True)
class InceptionFeatures:
    """The 2048 features of the Inception network of FID.

    weights  safetensors file of its weights with the names of pytorch-fid, or OWNER/NAME/FILE on
             the Hugging Face hub: see docs/quality.md
    """

    distance: ClassVar[str] = "fid"

    weights: str = ""

    def __post_init__(self):
        if not self.weights:
            raise UserError(
                "features.weights must name the weights of Inception: a safetensors file, or "
                "OWNER/NAME/FILE of the hub. features.name='random' needs no weights"
            )

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Returns features float32 [N, 2048] of images, uint8 [N, H, W, 1 or 3]."""
        return in_batches(inception.features, inception.loaded(self.weights), images)


FEATURES = {"random": RandomFeatures, "inception": InceptionFeatures}


def in_batches(
    function: Callable[[Any, Array], Array], parameters: Any, images: np.ndarray
) -> np.ndarray:
    """Applies a compiled function of parameters and images to batches: [N, ...] -> [N, D]."""
    size, found = min(AT_ONCE, len(images)), []
    for first in range(0, len(images), size):
        rows = np.minimum(np.arange(first, first + size), len(images) - 1)
        found.append(np.asarray(function(parameters, images[rows]))[: len(images) - first])
    return np.concatenate(found)


@jax.jit
def _random(filters: list[np.ndarray], images: Array) -> Array:
    h = images.astype(jnp.float32) / 127.5 - 1.0
    for layer, kernel in enumerate(filters):
        h = jax.nn.relu(
            jax.lax.conv_general_dilated(
                h, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
        sides = (2, 2) if layer == 2 else tuple(-(-side // 2) for side in h.shape[1:3])
        h = jax.image.resize(h, (len(h), *sides, h.shape[-1]), "linear")
    return h.reshape(len(h), -1)
