"""Images from TensorFlow Datasets; TensorFlow is needed only for preparing a data set."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from md4_jax.data.images import AT_ONCE, ImageSource
from md4_jax.data.pixels import VALUES
from md4_jax.data.sources.splits import digest
from md4_jax.data.sources.tfds import TfdsText
from md4_jax.protocols import UserError


@dataclasses.dataclass(frozen=True)
class TfdsImages(ImageSource):
    """Images of equal size from a data set prepared by TensorFlow Datasets, such as 'cifar10'.

    dataset, data_dir, validation_split, test_split, validation, test  as in `TfdsText`
    image_key  name of the image feature
    label_key  name of the class feature; "": the images have no classes
    image_shape  (H, W, C); (): that of the image feature, or of the first image if it has none
    levels     levels of each channel; 256 keeps the values as they are
    labels     whether the classes are used
    flip       whether training mirrors each image, left to right, with probability 1/2

    Raises UserError if it is unknown, cannot be prepared, or has no such feature.
    """

    dataset: str
    image_key: str = "image"
    label_key: str = "label"
    image_shape: tuple[int, ...] = ()
    data_dir: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    validation: float = 0.0
    test: float = 0.0
    levels: int = VALUES
    labels: bool = True
    flip: bool = False

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        """Returns the shape of all images."""
        stated = self.image_shape or tuple(self._feature("image_key").shape)
        if None not in stated:
            return tuple(stated)
        record, _ = next(self._reader.records("train"))
        return np.shape(record[self.image_key])

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the classes."""
        if not self.label_key:
            return ()
        found = getattr(self._feature("label_key"), "names", None)
        if not found:
            raise UserError(
                f"{self.dataset}: {self.label_key!r} (data.label_key) is not a class label"
            )
        return tuple(found)

    def fingerprint(self) -> str:
        """Returns a hash of the version, place and split sizes, and of the arguments."""
        return digest("tfds_images", self._reader.fingerprint(), self.label_key)

    def images(self, split: str) -> Iterator[np.ndarray]:
        """Yields the images of a split."""
        piece: list[np.ndarray] = []
        for record, where in self._reader.records(split):
            image = np.asarray(record[self.image_key])
            if image.shape != self.shape or image.dtype != np.uint8:
                raise UserError(
                    f"{where}: the image is {image.dtype} of shape {image.shape}, not uint8 of "
                    f"{self.shape}"
                )
            piece.append(image)
            if len(piece) == AT_ONCE:
                yield np.stack(piece)
                piece = []
        if piece:
            yield np.stack(piece)

    def numbers(self, split: str) -> np.ndarray:
        """Returns the classes of a split."""
        return np.array([int(record[self.label_key]) for record, _ in self._reader.records(split)])

    def _feature(self, key: str) -> Any:
        name, features = getattr(self, key), self._reader.features
        if name not in features:
            raise UserError(
                f"{self.dataset} has no feature {name!r} (data.{key}); it has "
                f"{', '.join(sorted(features))}"
            )
        return features[name]

    @functools.cached_property
    def _reader(self) -> TfdsText:
        names = ("data_dir", "validation_split", "test_split", "validation", "test")
        own = {name: getattr(self, name) for name in names}
        return TfdsText(self.dataset, text_key=self.image_key, **own)
