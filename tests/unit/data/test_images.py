"""Sources of images: what they read, how they are split, and which bad file is named."""

import functools
import gzip
import hashlib
import io
import shutil
import struct
import tarfile
import types
import zipfile
from zlib import compress, crc32

import autoencoder_folders
import numpy as np
import pytest
from PIL import Image

from md4_jax import autoencoders
from md4_jax.data import Cifar10, Digits, DownsampledImageNet, FashionMnist, ImageFolder, Mnist
from md4_jax.data.codes import CodedImages
from md4_jax.data.corpus import Corpus
from md4_jax.data.sources import cifar10, imagenet
from md4_jax.data.sources.splits import SPLITS
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.locks import take
from md4_jax.runtime.paths import place

# Python 3.11 has it since 3.11.4.
SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

RNG = np.random.default_rng(0)


def pictures(source, split):
    """The images of a split as they are shown, from its rows."""
    rows = source.rows(split)
    return source.domain().decode(rows.take(np.arange(len(rows))).tokens)


def labels(source, split):
    return source.rows(split).context["label"].tolist()


@pytest.mark.parametrize("name", ["digits", "folder", "mnist", "cifar-10", "imagenet"])
def test_other_amounts_are_other_splits_in_the_same_cache(name, request, tmp_path):
    """Else a run would train on what the run before it held out."""
    if name == "folder":
        for number in range(9):
            write(tmp_path / "pictures" / f"{number}.png", number)
    make = {
        "digits": lambda: Digits,
        "folder": lambda: functools.partial(ImageFolder, str(tmp_path / "pictures")),
        "mnist": lambda: functools.partial(Mnist, str(request.getfixturevalue("mnist")[0])),
        "cifar-10": lambda: functools.partial(Cifar10, str(request.getfixturevalue("archive"))),
        "imagenet": lambda: functools.partial(
            DownsampledImageNet, path=str(request.getfixturevalue("npz")), size=8
        ),
    }[name]()
    total = {"digits": 1797, "folder": 9, "mnist": 6, "cifar-10": 10, "imagenet": 10}[name]
    for validation, test in ((1, 2), (2, 2), (1, 3)):
        source = make(validation=validation, test=test)
        parts = [source.rows(split).tokens for split in SPLITS]
        assert [len(part) for part in parts] == [total - validation - test, validation, test]
        assert len(np.unique(np.concatenate(parts), axis=0)) == total


# Digits


def test_digits_are_those_of_scikit_learn():
    """Sums that are known of load_digits: 1797 images, 561718 in all; 178 zeros."""
    source = Digits()
    greys = source.rows("all").tokens
    assert greys.shape == (1797, 64) and greys.dtype == np.uint8
    assert (int(greys.sum()), int(greys.max())) == (561718, 16)
    assert np.bincount(labels(source, "all")).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180
    ]  # fmt: skip


def test_digits_are_split_once_and_alike_in_every_run():
    source = Digits()
    parts = [source.rows(split) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [1437, 180, 180]
    joined = np.concatenate([part.tokens for part in parts])
    np.testing.assert_array_equal(joined, source.rows("all").tokens)
    assert labels(source, "test")[:10] == [8, 6, 1, 7, 4, 1, 4, 7, 0, 1]
    assert min(np.bincount(labels(source, "test"))) >= 10
    assert "label" not in Digits(labels=False).rows("test").context
    assert Digits(labels=False).domain().labels == ()
    for given in (True, False):
        data = Corpus(Digits(labels=given), Digits(labels=given).domain(), DataOptions(64))
        assert data.has_labels("test") == given


def test_fewer_levels_than_the_digits_have():
    shown = pictures(Digits(levels=2), "test")
    assert set(np.unique(shown)) == {0, 255}
    np.testing.assert_array_equal(shown > 0, pictures(Digits(), "test") >= 128)


def test_rows_are_bytes_on_disk_that_are_made_once(cache):
    first = Digits().rows("train").tokens
    assert isinstance(first, np.memmap) and first.dtype == np.uint8
    files = sorted(cache.rglob("train-*"))
    kept = [(path.name, path.stat().st_mtime_ns) for path in files]
    Digits(labels=False).rows("train")
    assert [(p.name, p.stat().st_mtime_ns) for p in sorted(cache.rglob("train-*"))] == kept


def test_as_many_classes_as_levels_are_no_images():
    """Both are numbers of one type in the cache."""
    source = Digits(levels=10)
    assert labels(source, "test")[:10] == [8, 6, 1, 7, 4, 1, 4, 7, 0, 1]
    assert source.rows("test").tokens.shape == (180, 64)


@pytest.mark.parametrize("wrong, classes", [(-1, 256), (256, 256), (3, 3)])
def test_numbers_that_are_no_classes(wrong, classes, monkeypatch):
    """-1 would become the last of 256 classes in a byte."""
    monkeypatch.setattr(Digits, "names", tuple(range(classes)))
    monkeypatch.setattr(Digits, "numbers", lambda self, split: np.full(180, wrong))
    said = (
        f"180 of 180 images of the test split have an invalid .* {wrong}, and .* 0..{classes - 1}"
    )
    with pytest.raises(UserError, match=f"{said}. Set data.labels=False"):
        Digits().rows("test")


# MNIST


def idx(array):
    magic = 0x800 + array.ndim
    return struct.pack(f">{array.ndim + 1}I", magic, *array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
    """A directory in MNIST's format: 6 training and 3 test images, one file of them packed."""
    found = {}
    for name, count in (("train", 6), ("t10k", 3)):
        found[name] = RNG.integers(0, 256, (count, 28, 28), np.uint8)
        classes = np.arange(count, dtype=np.uint8)
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(idx(found[name]))
        packed = gzip.compress(idx(classes))
        (tmp_path / f"{name}-labels-idx1-ubyte.gz").write_bytes(packed)
    return tmp_path, found


def test_mnist_has_published_test_files_or_is_cut(mnist):
    path, found = mnist
    source = Mnist(path=str(path), validation=2)
    np.testing.assert_array_equal(pictures(source, "train")[..., 0], found["train"][:4])
    np.testing.assert_array_equal(pictures(source, "validation")[..., 0], found["train"][4:])
    np.testing.assert_array_equal(pictures(source, "test")[..., 0], found["t10k"])
    assert labels(source, "validation") == [4, 5] and labels(source, "test") == [0, 1, 2]
    assert labels(source, "all") == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    (path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(UserError, match="no t10k-images-idx3-ubyte .*cut .*data.test=N"):
        Mnist(path=str(path), validation=2).rows("test")
    cut = Mnist(path=str(path), validation=2, test=1)
    assert [labels(cut, s) for s in ("train", "validation", "test")] == [[0, 1, 2], [3, 4], [5]]
    assert cut.fingerprint() != Mnist(path=str(path), validation=1, test=1).fingerprint()


def test_mnist_as_it_is_published(shared):
    """Facts of the real file: its first digits, and the mean 0.1307 that everyone divides by."""
    path = shared("mnist/train-labels-idx1-ubyte.gz").parent
    source = Mnist(path=str(path), test=10_000)
    rows = source.rows("train")
    assert rows.tokens.shape == (50_000, 784) and len(source.rows("test")) == 10_000
    assert labels(source, "train")[:8] == [5, 0, 4, 1, 9, 2, 1, 3]
    both = (rows.tokens.sum(dtype=int) + source.rows("test").tokens.sum(dtype=int)) / 255
    assert both / (60_000 * 784) == pytest.approx(0.1307, abs=5e-5)
    packed = (path / "train-labels-idx1-ubyte.gz").read_bytes()
    assert hashlib.sha256(packed).hexdigest() == Mnist.sha256["train-labels-idx1-ubyte"]


def test_mnist_is_downloaded_with_its_checksums(mnist, cache, server, monkeypatch):
    path, found = mnist
    for name in Mnist.sha256:
        file = path / name if "images" in name else path / f"{name}.gz"
        raw = file.read_bytes()
        raw = raw if file.suffix else gzip.compress(raw)
        server.files[f"/mnist/{name}.gz"] = raw
        monkeypatch.setitem(Mnist.sha256, name, hashlib.sha256(raw).hexdigest())
    monkeypatch.setattr(Mnist, "url", f"{server.url}/mnist")
    np.testing.assert_array_equal(pictures(Mnist(), "test")[..., 0], found["t10k"])
    assert len(list((cache / "mnist").glob("*.gz"))) == 4
    del server.files["/mnist/train-images-idx3-ubyte.gz"]
    (cache / "mnist" / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(UserError, match=f"404.* put it in {cache / 'mnist'}, or set data.path"):
        Mnist().rows("train")


def test_fashion_mnist_has_names():
    assert FashionMnist().domain().labels[9] == "ankle boot"
    assert FashionMnist.sha256 != Mnist.sha256 and FashionMnist.sha256.keys() == Mnist.sha256.keys()


def spoil(change):
    """Returns a function that changes the bytes of a file in place."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    "name, change, words",
    [
        (
            "images-idx3-ubyte",
            lambda b: b[:-1],
            r"6 x 28 x 28 = 4,704 bytes must follow, but there are 4,703",
        ),
        ("images-idx3-ubyte", lambda b: b + b"x", r"4,704 bytes must follow, but there are 4,705"),
        ("images-idx3-ubyte", lambda b: b[:9], "ends within its first 16 bytes"),
        ("images-idx3-ubyte", lambda b: b[1:], "begins with 00080300, not 00000803"),
        ("images-idx3-ubyte", lambda b: idx(np.zeros((6, 9, 8), np.uint8)), "9 x 8 pixels, not 28"),
        ("labels-idx1-ubyte.gz", lambda b: b[:-9], "not a whole gzip file"),
        ("labels-idx1-ubyte.gz", lambda b: b"no", "not a whole gzip file"),
        (
            "labels-idx1-ubyte.gz",
            lambda b: gzip.compress(idx(np.array([1, 1, 10, 1, 1, 1], np.uint8))),
            "the label of image 2 is 10, not 0 to 9",
        ),
    ],
)
def test_a_bad_idx_file_is_named(mnist, name, change, words):
    path, _ = mnist
    spoil(change)(path / f"train-{name}")
    with pytest.raises(UserError, match=words) as refused:
        Mnist(path=str(path)).rows("train")
    assert str(path / f"train-{name}") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_images_and_labels_of_different_number(mnist):
    path, _ = mnist
    (path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(2, np.uint8))))
    with pytest.raises(UserError, match="the test split has 3 images and 2 labels"):
        Mnist(path=str(path)).rows("test")


# CIFAR-10


def records(count, first=0):
    """Records: image i has red first + i, green 100 + column, blue 200 + row."""
    planes = np.zeros((count, 3, 32, 32), np.uint8)
    planes[:, 0] = first + np.arange(count)[:, None, None]
    planes[:, 1] = 100 + np.arange(32)
    planes[:, 2] = 200 + np.arange(32)[:, None]
    classes = (first + np.arange(count, dtype=np.uint8)) % 10
    return np.concatenate([classes[:, None], planes.reshape(count, -1)], axis=1).tobytes()


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """CIFAR-10's archive with two images in a file, and the files in reverse order."""
    monkeypatch.setattr(cifar10, "IN_A_FILE", 2)
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        names = [*cifar10.SECTIONS["train"], "test_batch.bin", "readme"]
        for number, name in reversed([*enumerate(names)]):
            raw = records(2, 2 * number)
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(raw)
            packed.addfile(member, io.BytesIO(raw))
    return path


def test_cifar_10_from_the_archive_or_its_directory(archive, tmp_path):
    source = Cifar10(path=str(archive), validation=3)
    shown = pictures(source, "train")
    assert shown.shape == (7, 32, 32, 3)
    for i, image in enumerate(shown):
        assert (image[..., 0] == i).all()
        assert (image[..., 1] == 100 + np.arange(32)).all()
        assert (image[..., 2] == 200 + np.arange(32)[:, None]).all()
    assert labels(source, "train") == list(range(7)) and labels(source, "validation") == [7, 8, 9]
    assert labels(source, "test") == [0, 1] and pictures(source, "test")[0, 0, 0, 0] == 10
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, **SAFELY)
    other = Cifar10(path=str(tmp_path / "cifar-10-batches-bin"), validation=3)
    np.testing.assert_array_equal(pictures(other, "all"), pictures(source, "all"))
    assert source.warnings == () and source.domain().labels[3] == "cat"


def test_the_archive_is_downloaded_with_its_checksum(archive, cache, server, monkeypatch):
    raw = archive.read_bytes()
    server.files["/cifar.tar.gz"] = raw
    monkeypatch.setattr(cifar10, "URL", f"{server.url}/cifar.tar.gz")
    monkeypatch.setattr(cifar10, "BYTES", len(raw))
    with pytest.raises(UserError, match=f"has the SHA-256 .* instead of {cifar10.SHA256}"):
        Cifar10().rows("test")
    monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(raw).hexdigest())
    assert labels(Cifar10(), "test") == [0, 1]
    assert (cache / "cifar-10-binary.tar.gz").read_bytes() == raw


def test_a_single_file_is_cut_and_said_not_to_be_cifar_10(tmp_path):
    path = tmp_path / "some.bin.gz"
    path.write_bytes(gzip.compress(records(10)))
    source = Cifar10(path=str(path), test=2)
    assert labels(source, "train") == list(range(8)) and labels(source, "test") == [8, 9]
    assert "holds 10 images: results on them are not comparable" in source.warnings[0]
    with pytest.raises(UserError, match="is a single file: set data.test to the number"):
        Cifar10(path=str(path)).rows("test")


def test_the_real_first_images_of_cifar_10(shared):
    """The first one is a frog (class 6) whose first pixel is (59, 62, 63)."""
    source = Cifar10(path=str(shared("cifar10/data_batch_first3500.bin.gz")), test=500, flip=True)
    assert len(source.rows("train")) == 3000 and len(source.rows("test")) == 500
    assert source.names[labels(source, "train")[0]] == "frog"
    assert source.rows("train").tokens[0, :3].tolist() == [59, 62, 63]
    assert source.rows("train").augment is not None


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("x.bin", lambda b: b[:-1], "30,729 bytes, not images of 3,073 bytes"),
        ("x.bin", lambda b: b"", "0 bytes, not images of 3,073 bytes"),
        ("x.bin", lambda b: b[: 4 * 3073] + b"\x0b" + b[1:3073], "the class of image 4 is 11"),
        ("x.bin.gz", lambda b: gzip.compress(b)[:-20], "not a whole gzip file"),
        ("x.tar.gz", lambda b: b, "not a whole .tar.gz file"),
        ("x.png", lambda b: b, "CIFAR-10 it must be cifar-10-binary.tar.gz, a directory"),
    ],
)
def test_a_bad_file_of_cifar_10_is_named(tmp_path, name, change, words):
    path = tmp_path / name
    path.write_bytes(change(records(10)))
    with pytest.raises(UserError, match=words) as refused:
        Cifar10(path=str(path), test=1).rows("train")
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_truncated_file_of_the_archive_is_named(archive, tmp_path):
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, **SAFELY)
    folder = tmp_path / "cifar-10-batches-bin"
    spoil(lambda raw: raw[:3073])(folder / "data_batch_4.bin")
    with pytest.raises(UserError, match=r"data_batch_4.bin .* 3,073 bytes, not 2 images of"):
        Cifar10(path=str(folder)).rows("train")
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(UserError, match=f"there is no data_batch_4.bin in {folder}"):
        Cifar10(path=str(folder)).rows("train")
    spoil(lambda raw: raw[: len(raw) // 2])(archive)
    with pytest.raises(UserError, match=f"{archive} is not a whole .tar.gz file"):
        Cifar10(path=str(archive)).rows("train")


# Downsampled ImageNet


@pytest.fixture
def npz(tmp_path, monkeypatch):
    """A directory in the format of downsampled ImageNet, 8 x 8: 2 x 5 and 3 images."""
    monkeypatch.setattr(imagenet, "AT_ONCE", 2)
    names = ("train_data_batch_1.npz", "train_data_batch_2.npz")
    monkeypatch.setitem(imagenet.SECTIONS, "train", names)
    first = 0
    for name, count in zip((*names, "val_data.npz"), (5, 5, 3), strict=True):
        data = np.zeros((count, 3, 8, 8), np.uint8)
        data[:, 0] = first + np.arange(count)[:, None, None]
        data[:, 1] = 100 + np.arange(8)
        mean = {} if name.startswith("val") else {"mean": np.zeros(192)}
        numbers = 1 + first + np.arange(count)
        np.savez(tmp_path / name, data=data.reshape(count, -1), labels=numbers, **mean)
        first += count
    return tmp_path


def test_imagenet_is_read_in_pieces_across_its_files(npz):
    source = DownsampledImageNet(path=str(npz), size=8, validation=3)
    for split, first, last in (("train", 0, 7), ("validation", 7, 10), ("test", 10, 13)):
        shown = pictures(source, split)
        assert shown[:, 3, 0, 0].tolist() == list(range(first, last))
        assert (shown[..., 1] == 100 + np.arange(8)).all() and not shown[..., 2].any()
        assert labels(source, split) == list(range(first, last))
    assert labels(source, "all") == list(range(13))
    assert len(source.domain().labels) == 1000
    middle = DownsampledImageNet(path=str(npz), size=8, validation=4, test=3)
    assert labels(middle, "validation") == [3, 4, 5, 6]
    assert pictures(middle, "validation")[:, 0, 0, 0].tolist() == [3, 4, 5, 6]


def test_splits_that_begin_late_or_have_no_images_become_codes(npz):
    """An autoencoder encodes no empty piece, and a split without images is one of no rows."""
    own = autoencoders.read(place(autoencoder_folders.write("vqgan", npz / "a")))
    source = DownsampledImageNet(path=str(npz), size=8, validation=3)
    coded = CodedImages(source, own)
    tokens = coded.rows("validation").tokens
    np.testing.assert_array_equal(
        tokens.reshape(3, 2, 2), own.encode(pictures(source, "validation"))
    )
    assert coded.rows("validation").context["label"].tolist() == [7, 8, 9]
    whole = DownsampledImageNet(path=str(npz), size=8)
    for images in (whole, CodedImages(whole, own)):
        rows = images.rows("validation")
        assert len(rows) == 0 and rows.context["label"].tolist() == []
    assert list(Digits(validation=0).images("validation")) == []
    assert len(Digits(validation=0).rows("validation")) == 0


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda p: np.savez(p, data=np.zeros((5, 192), np.uint8)), "has no 'labels': .*data$"),
        (lambda p: np.savez(p, labels=np.ones(5, int)), "has no 'data': .* and this one labels"),
        (spoil(lambda raw: raw[:-100]), "not a whole npz file"),
        (spoil(lambda raw: b"nothing"), "not a whole npz file"),
        (
            lambda p: np.savez(p, data=np.zeros((5, 100), np.uint8), labels=np.ones(5, int)),
            r"'data' is uint8 of shape \(5, 100\), but must be uint8 with rows of 192",
        ),
        (
            lambda p: np.savez(p, data=np.zeros((4, 192), np.uint8), labels=np.ones(5, int)),
            "has 5 labels and 4 images",
        ),
        (
            lambda p: np.savez(p, data=np.zeros((1, 192), np.uint8), labels=np.array([0])),
            "one number of 1 to 1000",
        ),
    ],
)
def test_a_bad_npz_file_is_named(npz, change, words):
    change(npz / "train_data_batch_2.npz")
    with pytest.raises(UserError, match=words) as refused:
        DownsampledImageNet(path=str(npz), size=8).rows("train")
    assert str(npz / "train_data_batch_2.npz") in str(refused.value)


def test_imagenet_is_downloaded_and_unpacked(npz, cache, server, monkeypatch):
    archives = {}
    for number, name in enumerate(sorted(path.name for path in npz.glob("*.npz"))):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.write(npz / name, f"some/folder/{name}")
        server.files[f"/{number}.zip"] = packed.getvalue()
        archives[f"{number}.zip"] = hashlib.sha256(packed.getvalue()).hexdigest()
    monkeypatch.setitem(imagenet.ARCHIVES, 8, archives)
    monkeypatch.setattr(imagenet, "URL", server.url)
    assert labels(DownsampledImageNet(size=8), "all") == list(range(13))
    server.files.clear()
    assert len(DownsampledImageNet(size=8).rows("train")) == 10
    (cache / "imagenet8" / "0.zip.unpacked").unlink()
    (cache / "imagenet8" / "0.zip").write_bytes(b"no zip")
    with pytest.raises(UserError, match=r"0.zip is not a whole zip file .*; delete it"):
        DownsampledImageNet(size=8).rows("train")


def test_imagenet_is_unpacked_by_one_process(cache, monkeypatch):
    """Another process unpacks the archive and is done while this one waits for it."""
    folder = cache / "imagenet8"
    folder.mkdir(parents=True)
    (folder / "0.zip").write_bytes(b"not to be read")
    monkeypatch.setitem(imagenet.ARCHIVES, 8, {"0.zip": ""})
    other = (folder / "0.zip.unpacked.lock").open("a+")
    assert take(other)

    def finish(seconds):
        (folder / "0.zip.unpacked").touch()
        other.close()

    monkeypatch.setattr("md4_jax.data.lock.time", types.SimpleNamespace(sleep=finish))
    with pytest.raises(UserError, match="there is no train_data_batch_1.npz in"):
        DownsampledImageNet(size=8).rows("train")


def test_missing_imagenet(npz):
    with pytest.raises(UserError, match="data.size must be 64, 32, 16 or 8, not 65"):
        DownsampledImageNet(size=65)
    (npz / "val_data.npz").unlink()
    with pytest.raises(UserError, match=f"there is no val_data.npz in {npz}, .* 8 x 8"):
        DownsampledImageNet(path=str(npz), size=8).rows("train")
    with pytest.raises(UserError, match="data.size=16 needs data.path"):
        DownsampledImageNet(size=16).rows("train")


# Folders


def write(path, value, size=(5, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode != "RGB" else (value, 0, 7)).save(path)


@pytest.fixture
def folder(tmp_path):
    """Cats of red 0..9 and dogs of red 100..109, 4 rows of 5 pixels, without loss."""
    for number in range(10):
        write(tmp_path / "cat" / f"{number}.png", number)
        write(tmp_path / "dog" / f"{number}.PNG", 100 + number)
    return tmp_path


def test_folders_are_classes_and_splits_are_shuffled(folder):
    source = ImageFolder(path=str(folder), validation=4, test=6)
    seen = []
    for split, count in (("train", 10), ("validation", 4), ("test", 6)):
        shown = pictures(source, split)
        assert shown.shape == (count, 4, 5, 3)
        red = shown[:, 0, 0, 0]
        assert labels(source, split) == [int(r >= 100) for r in red]
        assert 0 < (red >= 100).sum() < count  # they do not lie class by class
        seen += red.tolist()
    assert sorted(seen) == [*range(10), *range(100, 110)]
    assert source.domain().labels == ("cat", "dog")


def test_splits_may_have_folders_of_their_own(folder, tmp_path):
    root = tmp_path / "root"
    write(root / "test" / "dog" / "a.png", 42)
    for name in ("cat", "dog"):
        (root / "train").mkdir(exist_ok=True)
        (folder / name).rename(root / "train" / name)
    source = ImageFolder(path=str(root), validation=5, test=5)
    assert [len(source.rows(s)) for s in ("train", "validation", "test", "all")] == [15, 5, 1, 21]
    assert pictures(source, "test")[0, 0, 0, 0] == 42 and labels(source, "test") == [1]
    write(root / "test" / "cow" / "a.png", 42)
    with pytest.raises(UserError, match="test/cow is the folder of a class that does not occur"):
        ImageFolder(path=str(root)).rows("test")
    shutil.rmtree(root / "test")
    write(root / "test" / "a.png", 42)
    with pytest.raises(UserError, match="/test holds images outside folders, .* data.labels=False"):
        ImageFolder(path=str(root)).rows("test")
    assert len(ImageFolder(path=str(root), labels=False).rows("test")) == 1


def test_val_is_the_validation_split(tmp_path):
    for name, red in (("train", 1), ("val", 2), ("test", 3)):
        write(tmp_path / name / "cat" / "a.png", red)
    source = ImageFolder(path=str(tmp_path), validation=5)
    for split, red in (("train", 1), ("validation", 2), ("test", 3)):
        assert pictures(source, split)[:, 0, 0, 0].tolist() == [red]


@pytest.mark.parametrize(
    "names, others",
    [(("bus", "car", "train"), "bus, car:"), (("train", "val", "validation"), "validation:")],
)
def test_other_folders_beside_train_are_refused(names, others, tmp_path):
    """A class may have that name; and which of two folders is the validation split?"""
    for name in names:
        write(tmp_path / name / "deeper" / "a.PNG", 1)
    (tmp_path / ".cache").mkdir()
    said = f"contains the folder train and also {others} .* If train is the .* If it is a class"
    with pytest.raises(UserError, match=said):
        ImageFolder(path=str(tmp_path)).rows("train")


def test_what_holds_no_images_beside_train_stays_unread(tmp_path):
    write(tmp_path / "train" / "cat" / "a.png", 1)
    for name in ("__MACOSX/train/._a.png", ".cache/a.png", "annotations/train/a.xml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("none")
    (tmp_path / "empty").mkdir()
    source = ImageFolder(path=str(tmp_path), validation=0, test=0)
    assert pictures(source, "all")[:, 0, 0, 0].tolist() == [1]


def test_grey_images_without_classes_and_jpeg(tmp_path):
    for number in range(4):
        write(tmp_path / f"{number}.jpeg", 50 * number, mode="L")
    source = ImageFolder(path=str(tmp_path), validation=1, test=1)
    assert source.domain().shape == (4, 5, 1) and source.domain().labels == ()
    shown = pictures(source, "all")
    assert sorted(shown[:, 0, 0, 0].tolist()) == [0, 50, 100, 150]
    assert source.rows("all").context == {}


def palette(path, colours=((9, 8, 7), (200, 100, 50)), **settings):
    """Writes a PNG with a palette; the first row has its second colour."""
    image = Image.new("P", (5, 4), 0)
    image.putpalette([value for colour in colours for value in colour])
    image.paste(1, (0, 0, 5, 1))
    image.save(path, **settings)


def sixteen_bits(path):
    """Writes an RGB PNG with 16 bits per channel, which PIL reads as one with 8."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc32(name + data))

    header, rows = struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0), b"\0" * 4 * (1 + 5 * 6)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def cmyk(path):
    """Writes a JPEG, whatever the name says."""
    with path.open("wb") as file:
        Image.new("CMYK", (5, 4)).save(file, "JPEG")


def test_colours_stay_those_of_files_with_a_palette_or_opaque_pixels(tmp_path):
    folder = tmp_path / "images"
    write(folder / "0.png", (9, 8, 7, 255), mode="RGBA")
    palette(folder / "1.png")
    palette(folder / "2.png", transparency=7)  # a colour without pixels
    shown = pictures(ImageFolder(path=str(folder), validation=0, test=0), "all")
    assert {tuple(x[-1, 0]) for x in shown} == {(9, 8, 7)}
    first = sorted(tuple(x[0, 0]) for x in shown)
    assert first == [(9, 8, 7), (200, 100, 50), (200, 100, 50)]
    scaled = pictures(ImageFolder(path=str(folder), validation=0, test=0, size=2), "all")
    # Colours are mixed, not their numbers.
    assert all((9, 8, 7) <= tuple(x[0, 0]) < (200, 100, 50) for x in scaled)


def test_black_and_white_is_grey(tmp_path):
    write(tmp_path / "0.png", 1, mode="1")
    write(tmp_path / "1.png", (9, 255), mode="LA")
    source = ImageFolder(path=str(tmp_path), validation=0, test=0)
    assert source.domain().shape == (4, 5, 1)
    assert sorted(pictures(source, "all")[:, 0, 0, 0]) == [9, 255]


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda p: write(p, 0, size=(5, 3)),
            "dog/3.PNG is 3 x 5 RGB, but .*cat/0.png is 4 x 5 RGB",
        ),
        (lambda p: write(p, 0, mode="L"), "dog/3.PNG is 4 x 5 grey, but .* is 4 x 5 RGB"),
        (
            lambda p: write(p, (1, 2, 3, 254), mode="RGBA"),
            "dog/3.PNG has transparent pixels: choose their background, such as by .*-alpha remove",
        ),
        (lambda p: write(p, (1, 254), mode="LA"), "dog/3.PNG has transparent pixels"),
        (lambda p: palette(p, transparency=1), "dog/3.PNG has transparent pixels"),
        (lambda p: write(p, 9, mode="I;16"), "dog/3.PNG has 16 bits per channel, not 8: .*-depth"),
        (sixteen_bits, "dog/3.PNG has 16 bits per channel, not 8: .*-depth 8"),
        (cmyk, "dog/3.PNG is neither grey nor RGB, but CMYK: .*-colorspace sRGB"),
        (spoil(lambda raw: raw[:45]), "dog/3.PNG cannot be read as an image"),
        (spoil(lambda raw: b"text"), "dog/3.PNG cannot be read as an image"),
        (lambda p: (p.parents[1] / "cow").mkdir(), "cow is empty: the folder of a class must have"),
        (
            lambda p: write(p.parents[1] / "x.png", 0),
            "contains both folders and images, such as x.png",
        ),
    ],
)
def test_a_bad_picture_is_named(folder, change, words):
    change(folder / "dog" / "3.PNG")
    with pytest.raises(UserError, match=words) as refused:
        ImageFolder(path=str(folder)).rows("all")
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


def test_a_jpeg_that_is_cut_short_is_named(tmp_path):
    for number in range(3):
        path = tmp_path / f"{number}.jpg"
        Image.fromarray(RNG.integers(0, 256, (40, 40, 3), np.uint8)).save(path)
    spoil(lambda raw: raw[: len(raw) // 2])(path)
    with pytest.raises(UserError, match="2.jpg cannot be read as an image: image file is trunc"):
        ImageFolder(path=str(tmp_path)).rows("all")


def test_a_directory_without_images(tmp_path):
    with pytest.raises(UserError, match="^data.path: .* has no file with the ending .png, .jpg"):
        ImageFolder(path=str(tmp_path)).rows("train")
    with pytest.raises(UserError, match="data.path: there is no directory .*/none"):
        ImageFolder(path=str(tmp_path / "none")).rows("train")
    (tmp_path / "one.png").touch()
    with pytest.raises(UserError, match="data.path: .*one.png is a file, but .* a directory of im"):
        ImageFolder(path=str(tmp_path / "one.png")).rows("train")
