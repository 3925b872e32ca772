"""Handwritten digits of 8 x 8 pixels, a small data set shipped with the package."""

import dataclasses
import gzip
import importlib.resources
import io
from collections.abc import Iterator

import numpy as np

from md4_jax.data.images import ImageSource, in_pieces
from md4_jax.data.pixels import shown
from md4_jax.data.sources.splits import bounds, digest

GREYS = 17


@dataclasses.dataclass(frozen=True)
class Digits(ImageSource):
    """1,797 digits of 8 x 8 pixels in 17 grey levels, from scikit-learn's load_digits.

    levels      number of grey levels; 17 keeps the original ones
    labels      whether the digit is the class of an image
    validation  fraction of the images if below 1, otherwise their number
    test        likewise

    The images are shuffled once, with seed 0. The last ones are test, those before them validation.
    """

    levels: int = GREYS
    labels: bool = True
    validation: float = 0.1
    test: float = 0.1

    shape = (8, 8, 1)
    names = tuple(range(10))

    def fingerprint(self) -> str:
        """Returns a hash of the images and their splits."""
        return digest("digits", _table().tolist(), self.validation, self.test)

    def images(self, split: str) -> Iterator[np.ndarray]:
        """Yields the images of a split."""
        return in_pieces(shown(GREYS)[self._split(split)[:, :-1]].reshape(-1, *self.shape))

    def numbers(self, split: str) -> np.ndarray:
        """Returns the digits that the images show."""
        return self._split(split)[:, -1]

    def _split(self, split: str) -> np.ndarray:
        table = _table()
        # The numbers of RandomState never change with the version of numpy.
        order = np.random.RandomState(0).permutation(len(table))
        amounts = {"validation": self.validation, "test": self.test}
        start, stop = bounds(len(table), split, unit="images", **amounts)
        return table[order[start:stop]]


def _table() -> np.ndarray:
    """Returns the 64 grey levels and the digit of each image, int [1797, 65]."""
    packed = importlib.resources.files("md4_jax.data") / "corpus" / "digits.csv.gz"
    text = gzip.decompress(packed.read_bytes()).decode("ascii")
    return np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.int64)
