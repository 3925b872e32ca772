"""Folders of PNG or JPEG files, with or without one folder per class."""

import dataclasses
import functools
import struct
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps

from md4_jax.data import contents
from md4_jax.data.images import AT_ONCE, ImageSource
from md4_jax.data.pixels import VALUES
from md4_jax.data.sources.splits import bounds, check_split, digest
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists, place

ENDINGS = (".png", ".jpg", ".jpeg")
MODES = {"L": 1, "RGB": 3}
# Modes of other files -> the mode that holds the same colours, where no pixel is transparent.
EQUAL = {"1": "L", "P": "RGB", "LA": "L", "RGBA": "RGB"}


@dataclasses.dataclass(frozen=True)
class ImageFolder(ImageSource):
    """PNG and JPEG files below a directory, all grey or all RGB, 8 bits per channel.

    Palettes are read as RGB, black and white as grey, and alpha channels are dropped if all pixels
    are opaque: the colours stay the same.

    path        a directory of files, or of one folder per class; or a directory with the folders
                train, validation (or val) and test, each of this form
    size        side of the squares that images are cut to: their shorter side is scaled to it, and
                the middle is kept. 0: all images must have the same size
    levels      levels of each channel; 256 keeps the values as they are
    labels      whether class folders give the classes, numbered in the order of their names
    flip        whether training mirrors each image, left to right, with probability 1/2
    validation  fraction of the images if below 1, otherwise their number
    test        likewise; both are cut from the training images, shuffled once with seed 0. A split
                with its own folder is not cut

    Raises UserError, with the file, for an image that cannot be read or differs from the first.
    """

    path: str
    levels: int = VALUES
    labels: bool = True
    flip: bool = False
    validation: float = 0.05
    test: float = 0.05
    size: int = 0

    def __post_init__(self):
        if self.size < 0:
            raise UserError(f"data.size must be at least 1, or 0 for no change, not {self.size}")

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        """Returns the shape of the first image, which all others must have."""
        return self._image(self._sections["train"][0]).shape

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the class folders of the training images; () if there are none."""
        return tuple(_classes(self._roots["train"]))

    def fingerprint(self) -> str:
        """Returns a hash of the files, their classes and the sizes of the splits."""
        files = [path for paths in self._sections.values() for path in paths]
        facts = [contents.of_texts(files), [[path.parent.name, path.name] for path in files]]
        cut = [self.size] if self.size else []
        return digest("images", facts, [*self._sections], self.validation, self.test, *cut)

    def images(self, split: str) -> Iterator[np.ndarray]:
        """Yields the images of a split."""
        files = self._split(split)
        for first in range(0, len(files), AT_ONCE):
            yield np.stack([self._alike(path) for path in files[first : first + AT_ONCE]])

    def numbers(self, split: str) -> np.ndarray:
        """Returns the classes of a split."""
        number = {name: k for k, name in enumerate(self.names)}
        for path in self._split(split):
            if path.parent.name not in number:
                if path.parent == self._roots.get(split):
                    raise UserError(
                        f"{path.parent} holds images outside folders, but the training images lie "
                        "in folders of their classes: do the same here, or set data.labels=False"
                    )
                raise UserError(
                    f"{path.parent} is the folder of a class that does not occur in the training "
                    "images"
                )
        return np.array([number[path.parent.name] for path in self._split(split)], int)

    def _alike(self, path: Place) -> np.ndarray:
        found = self._image(path)
        if found.shape != self.shape:
            first = self._sections["train"][0]
            advice = "" if self.size else ". With data.size=N all images are cut to N x N pixels"
            raise UserError(
                f"{path} is {_said(found.shape)}, but {first} is {_said(self.shape)}{advice}"
            )
        return found

    def _image(self, path: Place) -> np.ndarray:
        return _image(path, self.size)

    def _split(self, split: str) -> list[Place]:
        check_split(split)
        if split in self._sections and split != "train":
            return self._sections[split]
        cut = {name: getattr(self, name) for name in ("validation", "test")}
        cut |= {name: 0 for name in self._sections if name != "train"}
        files = self._sections["train"]
        # Files are ordered by class. RandomState is the same in every version of NumPy.
        order = np.random.RandomState(0).permutation(len(files))
        start, stop = bounds(len(files), split, unit="images", **cut)
        found = [files[i] for i in order[start:stop]]
        if split == "all":
            found += [p for name, paths in self._sections.items() if name != "train" for p in paths]
        return found

    @functools.cached_property
    def _roots(self) -> dict[str, Place]:
        """Returns {split: its directory}; without split folders, {"train": `path`}."""
        root = place(self.path, "data.path")
        if not exists(root):
            raise UserError(f"data.path: there is no directory {root}")
        if not root.is_dir():
            raise UserError(
                f"data.path: {root} is a file, but data.name='images' reads a directory of images "
                f"({', '.join(ENDINGS)})"
            )
        return _splits(root) if exists(root / "train") else {"train": root}

    @functools.cached_property
    def _sections(self) -> dict[str, list[Place]]:
        return {name: _files(root) for name, root in self._roots.items()}


def _splits(root: Place) -> dict[str, Place]:
    """Returns the folders of splits beside `train`; UserError for any other folder with images.

    Folders without images, such as annotations, and names that begin with _ or a dot are ignored.
    """
    own = "val" if exists(root / "val") else "validation"
    named = {"train": root / "train", "validation": root / own, "test": root / "test"}
    others = [name for name in _classes(root) if root / name not in named.values()]
    if others := [name for name in others if name[0] != "_" and _has_images(root / name)]:
        raise UserError(
            f"{root} contains the folder train and also {', '.join(others[:5])}: beside train "
            "only test and one of validation and val may contain images. If train is the "
            "training split, move the other folders elsewhere. If it is a class, set data.path "
            "to a directory whose only folder, train, holds the folders of all classes"
        )
    return {name: folder for name, folder in named.items() if exists(folder)}


def _classes(root: Place) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] != ".")


def _has_images(folder: Place) -> bool:
    below = (_has_images(folder / name) for name in _classes(folder))
    return bool(_of(folder)) or any(below)


def _files(root: Place) -> list[Place]:
    """Returns the images of a directory, or of its folders; UserError for one without images."""
    classes, loose = _classes(root), _of(root)
    if classes and loose:
        raise UserError(
            f"{root} contains both folders and images, such as {loose[0].name}: put all images "
            "into folders of their classes, or use no folders at all"
        )
    if not classes and not loose:
        raise UserError(f"data.path: {root} has no file with the ending {', '.join(ENDINGS)}")
    for name in classes:
        if not _of(root / name):
            raise UserError(f"{root / name} is empty: the folder of a class must have images")
    return loose or [path for name in classes for path in _of(root / name)]


def _of(folder: Place) -> list[Place]:
    found = [path for path in folder.iterdir() if path.suffix.lower() in ENDINGS]
    return sorted(found, key=lambda path: path.name)


def _image(path: Place, size: int) -> np.ndarray:
    """Reads an image as uint8 [H, W, C]; UserError if it is damaged or of another mode.

    size: side of the square that it is cut to, or 0
    """
    try:
        with path.open("rb") as file, Image.open(file) as image:
            deep = any(";16" in str(tile[-1]) for tile in image.tile)  # RGB;16B becomes RGB
            image.load()
            plain = _plain(path, image, deep)
            values = np.asarray(_square(plain, size) if size else plain)
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from error
    return values.reshape(*values.shape[:2], MODES[plain.mode])


def _plain(path: Place, image: Image.Image, deep: bool) -> Image.Image:
    """Returns an image with the same colours in one of MODES; UserError if that is impossible.

    deep: whether the file has 16 bits per channel
    """
    if deep or image.mode[:1] in "IF":
        raise _other(path, "has 16 bits per channel, not 8", "-depth 8")
    if image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
        if alpha.getextrema()[0] < 255:
            on_white = "-background white -alpha remove -alpha off"
            raise _other(path, "has transparent pixels", on_white, "choose their background")
    if image.mode in MODES:
        return image
    if image.mode not in EQUAL:
        raise _other(path, f"is neither grey nor RGB, but {image.mode}", "-colorspace sRGB")
    opaque = image.convert("RGBA") if image.mode == "P" else image  # which has no transparency
    return opaque.convert(EQUAL[image.mode])


def _other(path: Place, what: str, how: str, advice: str = "convert it first") -> UserError:
    return UserError(f"{path} {what}: {advice}, such as by ImageMagick: magick mogrify {how} FILES")


def _square(image: Image.Image, size: int) -> Image.Image:
    """Scales the shorter side to `size` (with antialiasing, bicubic) and keeps the middle."""
    return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)


def _said(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} x {shape[1]} {'grey' if shape[2] == 1 else 'RGB'}"
