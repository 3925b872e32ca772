"""CIFAR-10: colour images of 32 x 32 pixels in the binary format."""

import dataclasses
import functools
import tarfile
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from md4_jax.data import contents, download
from md4_jax.data.images import ImageSource, from_planes, in_pieces
from md4_jax.data.pixels import VALUES
from md4_jax.data.sources.mnist import LARGEST, unpacked
from md4_jax.data.sources.splits import digest, with_test
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, cache_root, exists, place

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
BYTES = 170_052_171
RECORD = 1 + 3 * 32 * 32  # a byte for the class, then the red, green and blue planes
IN_A_FILE = 10_000
SECTIONS = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}


@dataclasses.dataclass(frozen=True)
class Cifar10(ImageSource):
    """60,000 colour images of 10 classes: 50,000 for training, 10,000 for test.

    path        the archive cifar-10-binary.tar.gz, a directory of its .bin files, or one .bin or
                .bin.gz file; None: the archive in the cache directory, downloaded if missing
    levels      levels of each channel; 256 keeps the values as they are
    labels      whether images have classes
    flip        whether training mirrors each image, left to right, with probability 1/2
    validation  images at the end of the training files that are held out: a fraction below 1,
                otherwise their number
    test        0: the published test file. Otherwise the size of a test split, cut in the same
                way from the end of the training files; required for a single file

    Raises UserError for a missing or damaged file, and when the download fails.
    """

    path: str | None = None
    levels: int = VALUES
    labels: bool = True
    flip: bool = False
    validation: float = 0.0
    test: float = 0.0

    shape = (32, 32, 3)
    names = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self._is_single:
            return ()
        count = len(self._read("train"))
        words = (
            f"{self._path} holds {count:,} images: results on them are not comparable with "
            "published CIFAR-10 results."
        )
        return (words,)

    def fingerprint(self) -> str:
        """Returns a hash of the files and of the sizes of the splits."""
        path = self._path
        names = [name for names in SECTIONS.values() for name in names]
        files = [path / name for name in names if exists(path / name)] if path.is_dir() else [path]
        return digest("cifar10", contents.of_texts(files), self.validation, self.test)

    def images(self, split: str) -> Iterator[np.ndarray]:
        """Yields the images of a split."""
        for records in self._split(split):
            for piece in in_pieces(records):
                yield from_planes(piece[:, 1:], self.shape)

    def numbers(self, split: str) -> np.ndarray:
        """Returns the classes of a split."""
        return np.concatenate([records[:, 0] for records in self._split(split)])

    def _split(self, split: str) -> list[np.ndarray]:
        amounts = {"validation": self.validation, "test": self.test}
        train = self._read("train")
        parts = with_test(len(train), split, unit="images", **amounts)
        whole = {name: train if name == "train" else self._read(name) for name, _, _ in parts}
        return [whole[name][start:stop] for name, start, stop in parts]

    def _read(self, section: str) -> np.ndarray:
        """Returns the records of a section, uint8 [N, RECORD]."""
        path = self._path
        if not self._is_single:
            names = SECTIONS[section]
            files = _members(path, names) if path.suffix == ".gz" else _directory(path, names)
            return np.concatenate([_records(*file, IN_A_FILE) for file in files.items()])
        if section == "test":
            raise UserError(
                f"data.test=0 means the published test file, and {path} is a single file: set "
                "data.test to the number of images to hold out"
            )
        return _records(str(path), unpacked(path), 0)

    @property
    def _is_single(self) -> bool:
        return self._path.name.endswith((".bin", ".bin.gz"))

    @functools.cached_property
    def _path(self) -> Place:
        if self.path is not None:
            path = place(self.path, "data.path")
            if not exists(path):
                raise UserError(f"data.path: there is no file or directory {path}")
            if not path.is_dir() and not path.name.endswith((".bin", ".bin.gz", ".tar.gz")):
                raise UserError(
                    f"data.path={path}: for CIFAR-10 it must be cifar-10-binary.tar.gz, a "
                    "directory with its .bin files, or one .bin or .bin.gz file"
                )
            return path
        path = cache_root() / "cifar-10-binary.tar.gz"
        advice = f"Fetch it elsewhere, then either put it at {path} or set data.path to it."
        return place(download.fetch(URL, path, sha256=SHA256, size=BYTES, instead=advice))


def _directory(path: Place, names: tuple[str, ...]) -> Mapping[str, bytes]:
    for name in names:
        if not exists(path / name):
            raise UserError(f"data.path: there is no {name} in {path}")
    return {str(path / name): unpacked(path / name) for name in names}


def _members(path: Place, names: tuple[str, ...]) -> Mapping[str, bytes]:
    """Reads files of the archive: {name without directories: content}."""
    found = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:gz") as archive:
            for member in archive:
                name = member.name.rsplit("/", 1)[-1]
                if member.isfile() and name in names:
                    found[f"{name} in {path}"] = archive.extractfile(member).read(LARGEST)
    except (tarfile.TarError, EOFError, zlib.error, OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not a whole .tar.gz file ({error}); delete it and fetch {URL} again"
        ) from error
    if len(found) != len(names):
        raise UserError(f"{path} is not CIFAR-10's binary archive: it lacks {', '.join(names)}")
    return dict(sorted(found.items()))


def _records(name: str, raw: bytes, count: int) -> np.ndarray:
    """Returns the records of a file; count: the required number, 0 for any."""
    if not raw or len(raw) % RECORD or (count and len(raw) != count * RECORD):
        wanted = f"{count:,} images of {RECORD:,} bytes" if count else f"images of {RECORD:,} bytes"
        raise UserError(f"{name} is cut short or damaged: it has {len(raw):,} bytes, not {wanted}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, RECORD)
    wrong = np.flatnonzero(records[:, 0] >= len(Cifar10.names))
    if len(wrong):
        raise UserError(
            f"{name} is not CIFAR-10: the class of image {wrong[0]} is {records[wrong[0], 0]}, "
            "not 0 to 9"
        )
    return records
