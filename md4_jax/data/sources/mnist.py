"""MNIST and Fashion-MNIST: grey images of 28 x 28 pixels in idx files."""

import dataclasses
import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from md4_jax.data import contents, download
from md4_jax.data.images import ImageSource, in_pieces
from md4_jax.data.pixels import VALUES
from md4_jax.data.sources.splits import digest, with_test
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, cache_root, exists, place

# First bytes of an idx file of uint8 with 3 or 1 dimensions, and what each dimension counts.
IMAGES, LABELS = 0x00000803, 0x00000801
FILES = {
    ("train", IMAGES): "train-images-idx3-ubyte",
    ("train", LABELS): "train-labels-idx1-ubyte",
    ("test", IMAGES): "t10k-images-idx3-ubyte",
    ("test", LABELS): "t10k-labels-idx1-ubyte",
}
LARGEST = 1 << 28  # bytes of an unpacked file
WORDS = {IMAGES: "images", LABELS: "labels"}


@dataclasses.dataclass(frozen=True)
class Mnist(ImageSource):
    """70,000 handwritten digits: 60,000 for training, 10,000 for test.

    path        directory of the four idx files, compressed (.gz) or not; None: the cache
                directory; missing files are downloaded there
    levels      grey levels; 256 keeps the values as they are
    labels      whether the digit is the class of an image
    validation  images at the end of the training files that are held out: a fraction below 1,
                otherwise their number
    test        0: the published test files. Otherwise the size of a test split, cut in the same
                way from the end of the training files; the test files are then not needed

    Raises UserError for a missing or damaged file, and when a download fails.
    """

    path: str | None = None
    levels: int = VALUES
    labels: bool = True
    validation: float = 0.0
    test: float = 0.0

    shape = (28, 28, 1)
    names: ClassVar[tuple[str | int, ...]] = tuple(range(10))
    title: ClassVar[str] = "mnist"
    url: ClassVar[str] = "https://storage.googleapis.com/cvdf-datasets/mnist"
    sha256: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
        ),
        "train-labels-idx1-ubyte": (
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
        ),
        "t10k-images-idx3-ubyte": (
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        "t10k-labels-idx1-ubyte": (
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
        ),
    }

    def fingerprint(self) -> str:
        """Returns a hash of the files and of the sizes of the splits."""
        sections = ("train",) if self.test else ("train", "test")
        files = [self._file(name) for key, name in FILES.items() if key[0] in sections]
        return digest("mnist", contents.of_texts(files), self.validation, self.test)

    def images(self, split: str) -> Iterator[np.ndarray]:
        """Yields the images of a split."""
        return in_pieces(self._split(split, IMAGES)[..., None])

    def numbers(self, split: str) -> np.ndarray:
        """Returns the classes of a split."""
        return self._split(split, LABELS)

    def _split(self, split: str, kind: int) -> np.ndarray:
        amounts = {"validation": self.validation, "test": self.test}
        train = self._read("train", kind)
        parts = with_test(len(train), split, unit="images", **amounts)
        whole = {name: train if name == "train" else self._read(name, kind) for name, _, _ in parts}
        return np.concatenate([whole[name][start:stop] for name, start, stop in parts])

    def _read(self, section: str, kind: int) -> np.ndarray:
        path = self._file(FILES[section, kind])
        found = read_idx(path, kind)
        if kind == IMAGES and found.shape[1:] != self.shape[:2]:
            size = " x ".join(map(str, found.shape[1:]))
            raise UserError(f"{path} holds images of {size} pixels, not 28 x 28")
        if kind == LABELS and found.max(initial=0) >= len(self.names):
            wrong = int(np.argmax(found >= len(self.names)))
            raise UserError(f"{path}: the label of image {wrong} is {found[wrong]}, not 0 to 9")
        return found

    def _file(self, name: str) -> Place:
        if self.path is None:
            folder, packed = cache_root() / self.title, f"{name}.gz"
            advice = f"Fetch {packed} elsewhere and put it in {folder}, or set data.path."
            url = f"{self.url}/{packed}"
            return download.fetch(url, folder / packed, sha256=self.sha256[name], instead=advice)
        folder = place(self.path, "data.path")
        for path in (folder / name, folder / f"{name}.gz"):
            if exists(path):
                return path
        hint = "" if name.startswith("train") else ". Or cut the test split from it by data.test=N"
        raise UserError(f"data.path: there is no {name} or {name}.gz in {folder}{hint}")


@dataclasses.dataclass(frozen=True)
class FashionMnist(Mnist):
    """70,000 images of clothes; files and keys as in `Mnist`."""

    names = (
        "t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
        "ankle boot",
    )  # fmt: skip
    title = "fashion_mnist"
    url = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    sha256: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
        ),
        "train-labels-idx1-ubyte": (
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
        ),
        "t10k-images-idx3-ubyte": (
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
        ),
        "t10k-labels-idx1-ubyte": (
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
        ),
    }


def read_idx(path: Place, kind: int) -> np.ndarray:
    """Reads an idx file of images uint8 [N, H, W] or labels uint8 [N], compressed (.gz) or not."""
    raw = unpacked(path)
    dimensions = kind & 0xFF
    head = 4 + 4 * dimensions
    begin = int.from_bytes(raw[:4], "big")
    if begin != kind:
        raise UserError(
            f"{path} is not an idx file of {WORDS[kind]}: it begins with "
            f"{begin:08x}, not {kind:08x}"
        )
    if len(raw) < head:
        raise UserError(f"{path} is cut short: it ends within its first {head} bytes")
    sizes = struct.unpack_from(f">{dimensions}I", raw, 4)
    if len(raw) - head != math.prod(sizes):
        raise UserError(
            f"{path} is cut short or damaged: according to its header "
            f"{' x '.join(map(str, sizes))} = {math.prod(sizes):,} bytes must follow, but there "
            f"are {len(raw) - head:,}"
        )
    return np.frombuffer(raw, np.uint8, offset=head).reshape(sizes)


def unpacked(path: Place) -> bytes:
    """Reads a file, decompressing .gz; UserError if it is missing or damaged."""
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with path.open("rb") as file, gzip.open(file) as content:
            raw = content.read(LARGEST + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is not a whole gzip file ({error}): fetch it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if len(raw) > LARGEST:
        raise UserError(f"{path} has more than {LARGEST:,} bytes after decompression")
    return raw
