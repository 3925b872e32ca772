"""Downsampled ImageNet with classes: images of 64 x 64 or fewer pixels in npz files."""

import contextlib
import dataclasses
import functools
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from md4_jax.data import contents, download
from md4_jax.data.images import AT_ONCE, ImageSource, from_planes
from md4_jax.data.lock import alone
from md4_jax.data.pixels import VALUES
from md4_jax.data.sources.splits import digest, with_test
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, cache_root, exists, place

URL = "http://www.image-net.org/data/downsample"
# Size of an image -> archives: name and SHA-256.
ARCHIVES = {
    32: {
        "Imagenet32_train_npz.zip": (
            "94226337ecc1b0309d9fcd0167127aaadc931587035fbcb53925235edbaec4fc"
        ),
        "Imagenet32_val_npz.zip": (
            "013990e6dec1237dcd1f9beadbab81ead6604cc119af5cacbfb59ae28148377a"
        ),
    },
    64: {
        "Imagenet64_train_part1_npz.zip": (
            "9422dc1dc5d092e9814a70a1cb7fc74880d2db5d88a0cb8a34ee363b12bde3f1"
        ),
        "Imagenet64_train_part2_npz.zip": (
            "9fafc115afb7e6c301e66dc16b2d737152b427bd5dab26e1293487a6819c7f30"
        ),
        "Imagenet64_val_npz.zip": (
            "e1e75133158a1924135a9c6f97a80d2d237b158945e0b34074e58e6c8430eeb8"
        ),
    },
}
SECTIONS = {
    "train": tuple(f"train_data_batch_{number}.npz" for number in range(1, 11)),
    "test": ("val_data.npz",),
}
CLASSES = 1000
KEYS = ("data", "labels", "mean")


@dataclasses.dataclass(frozen=True)
class DownsampledImageNet(ImageSource):
    """Downsampled ImageNet images with their classes (Chrabaszcz, 2017, arXiv:1707.08819).

    path        directory of train_data_batch_1.npz to _10.npz and val_data.npz; None: the cache
                directory; missing archives are downloaded and unpacked there
    size        height and width: 64, 32, 16 or 8
    levels      levels of each channel; 256 keeps the values as they are
    labels      whether images have classes, numbered from 0 (the files count from 1)
    flip        whether training mirrors each image, left to right, with probability 1/2
    validation  images at the end of the training files that are held out: a fraction below 1,
                otherwise their number
    test        0: val_data.npz. Otherwise the size of a test split, cut in the same way from the
                end of the training files

    Published bits per dimension are mostly for an older set of the same size, with other images and
    without classes: `tfds_images` reads it (docs/images.md).

    Raises UserError for a missing or damaged file, and when a download fails.
    """

    path: str | None = None
    size: int = 64
    levels: int = VALUES
    labels: bool = True
    flip: bool = False
    validation: float = 0.0
    test: float = 0.0

    names = tuple(range(CLASSES))

    def __post_init__(self):
        if self.size not in (8, 16, 32, 64):
            raise UserError(f"data.size must be 64, 32, 16 or 8, not {self.size}")

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.size, self.size, 3)

    def fingerprint(self) -> str:
        """Returns a hash of the files and of the sizes of the splits."""
        facts = contents.of_texts([self._file(n) for names in SECTIONS.values() for n in names])
        return digest("imagenet", facts, self.size, self.validation, self.test)

    def images(self, split: str) -> Iterator[np.ndarray]:
        """Yields the images of a split."""
        for path, start, stop in self._split(split):
            for rows in _rows(path, 3 * self.size**2, start, stop):
                yield from_planes(rows, self.shape)

    def numbers(self, split: str) -> np.ndarray:
        """Returns the classes of a split, from 0 on; the files count from 1."""
        parts = [self._labels(path)[start:stop] for path, start, stop in self._split(split)]
        return np.concatenate([np.zeros(0, int), *parts])  # a split may have no images

    def _labels(self, path: Place) -> np.ndarray:
        with _npz(path) as archive:
            found = np.asarray(archive["labels"]).astype(int) - 1
        if found.ndim != 1 or found.min(initial=0) < 0 or found.max(initial=0) >= CLASSES:
            raise UserError(f"{path}: labels must be one number of 1 to {CLASSES} for each image")
        return found

    def _split(self, split: str) -> Iterator[tuple[Place, int, int]]:
        """Yields (file, start, stop) for the rows of a split."""
        files = {name: [self._file(n) for n in SECTIONS[name]] for name in SECTIONS}
        counts = {name: [len(self._labels(path)) for path in files[name]] for name in files}
        amounts = {"validation": self.validation, "test": self.test}
        parts = with_test(sum(counts["train"]), split, unit="images", **amounts)
        for name, start, stop in parts:
            first = 0
            for path, count in zip(files[name], counts[name], strict=True):
                last = count if stop is None else min(count, stop - first)
                if max(0, start - first) < last:
                    yield path, max(0, start - first), last
                first += count

    def _file(self, name: str) -> Place:
        folder = self._folder
        if not exists(folder / name):
            raise UserError(
                f"data.path: there is no {name} in {folder}, which should hold the npz files of "
                f"downsampled ImageNet, {self.size} x {self.size}"
            )
        return folder / name

    @functools.cached_property
    def _folder(self) -> Place:
        if self.path is not None:
            return place(self.path, "data.path")
        folder = cache_root() / f"imagenet{self.size}"
        if self.size not in ARCHIVES:
            raise UserError(f"data.size={self.size} needs data.path, a directory of its npz files")
        for name, sha256 in ARCHIVES[self.size].items():
            done = folder / f"{name}.unpacked"
            if not exists(place(done)):
                advice = f"It needs a login there: fetch it with a browser and put it in {folder}."
                archive = download.fetch(
                    f"{URL}/{name}", folder / name, sha256=sha256, instead=advice
                )
                with alone(folder / f"{done.name}.lock", f"unpacking {name}"):
                    if not done.exists():
                        _unpack(archive, folder)
                        done.touch()
        return place(folder)


def _unpack(archive: Any, folder: Any) -> None:
    """Unpacks the npz files of an archive, ignoring its directories."""
    try:
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                if member.filename.endswith(".npz"):
                    member.filename = member.filename.rsplit("/", 1)[-1]
                    packed.extract(member, folder)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{archive} is not a whole zip file ({error}); delete it") from error


@contextlib.contextmanager
def _npz(path: Place) -> Iterator[Any]:
    """Opens an npz file; UserError if it is damaged or lacks a key."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [key for key in KEYS[:2] if key not in archive]
            if missing:
                raise UserError(
                    f"{path} has no {missing[0]!r}: a file of downsampled ImageNet has "
                    f"{', '.join(KEYS)}, and this one {', '.join(archive.files) or 'nothing'}"
                )
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError) as error:
        raise UserError(f"{path} is not a whole npz file ({error}): fetch it again") from error


def _rows(path: Place, width: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yields the rows start..stop-1 of `data`, uint8 [N, width], in pieces that are not empty."""
    with _npz(path) as archive, archive.zip.open("data.npy") as file:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
            version, np.lib.format.read_array_header_2_0
        )
        shape, by_columns, dtype = read(file)
        if len(shape) != 2 or shape[1] != width or dtype != np.uint8 or by_columns:
            raise UserError(
                f"{path}: the array 'data' is {dtype} of shape {shape}, but must be uint8 with "
                f"rows of {width:,} values, one image of data.size each"
            )
        if shape[0] < stop:
            raise UserError(f"{path} has {stop:,} labels and {shape[0]:,} images")
        for first in range(0, stop, AT_ONCE):
            count = min(AT_ONCE, stop - first)
            raw = file.read(count * width)
            if len(raw) < count * width:
                raise UserError(
                    f"{path} is cut short: the data end in the middle of image {first + 1:,}"
                )
            rows = np.frombuffer(raw, np.uint8).reshape(count, width)[max(0, start - first) :]
            if len(rows):
                yield rows
