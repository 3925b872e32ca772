"""Public corpora and vocabularies, small, as they lie in the cache directory once downloaded."""

import gzip
import io
import json
import shutil
import struct
import tarfile
from pathlib import Path

import autoencoder_folders

from md4_jax.data.hub import HubFile

WORDS = ["some", "text", "of", "the", "web", "that", "is", "there", "to", "be", "read"]
PAGES = [f"page {n}: {' '.join(WORDS[: 2 + n % 9])}." for n in range(240)]


def add(archive: tarfile.TarFile, name: str, raw: bytes) -> None:
    """Adds a file to an archive."""
    member = tarfile.TarInfo(name)
    member.size = len(raw)
    archive.addfile(member, io.BytesIO(raw))


def openwebtext(cache: Path, pages: list[str] = PAGES, each: int = 40) -> Path:
    """Writes openwebtext.tar.xz: archives of texts in an archive."""
    path = cache / "openwebtext.tar.xz"
    with tarfile.open(path, "w:xz") as outer:
        for first in range(0, len(pages), each):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w:xz") as made:
                for n, page in enumerate(pages[first : first + each], first):
                    add(made, f"{n:07}-{n:032x}.txt", page.encode())
            name = f"openwebtext/urlsf_subset{first // each:02}-1_data.xz"
            add(outer, name, inner.getvalue())
    return path


def lm1b(cache: Path) -> None:
    """Writes the archive of LM1B, whose held-out part is in a folder of its own."""
    root = "1-billion-word-language-modeling-benchmark-r13output"
    with tarfile.open(cache / f"{root}.tar.gz", "w:gz") as archive:
        for folder, pages in (("training", PAGES), ("heldout", PAGES[:40])):
            name = f"{root}/{folder}-monolingual.tokenized.shuffled/news.en-00001-of-00100"
            add(archive, name, "".join(f"{page}\n" for page in pages).encode())


def fineweb_edu(cache: Path) -> None:
    """Writes a file of the hub's FineWeb-Edu and the list of its files that was kept."""
    folder = cache / "hub" / "HuggingFaceFW" / "fineweb-edu"
    file = HubFile("sample/10BT/000_00000.jsonl", "http://nowhere", 1, "")
    (folder / file.name).parent.mkdir(parents=True)
    (folder / file.name).write_text("".join(json.dumps({"text": page}) + "\n" for page in PAGES))
    (folder / "sample_10BT.listing.json").write_text(json.dumps([file]))


def text8(cache: Path) -> None:
    """Writes a text of the 27 symbols in place of text8."""
    (cache / "text8").write_text(" ".join(WORDS * 400))


def mnist(cache: Path) -> None:
    """Writes MNIST's four files with 60 and 20 images."""
    (cache / "mnist").mkdir()
    for name, count in (("train", 60), ("t10k", 20)):
        images = bytes(range(196)) * 4 * count
        classes = bytes(n % 10 for n in range(count))
        for kind, sizes, raw in (
            ("images-idx3", (0x803, count, 28, 28), images),
            ("labels-idx1", (0x801, count), classes),
        ):
            packed = gzip.compress(struct.pack(f">{len(sizes)}I", *sizes) + raw)
            (cache / "mnist" / f"{name}-{kind}-ubyte.gz").write_bytes(packed)


def gpt2(cache: Path) -> None:
    """Writes a byte-level vocabulary of two merges in place of GPT-2's."""
    from tokenizers import pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*symbols, "th", "the", "<|endoftext|>"]
    folder = cache / "tokenizers" / "gpt2"
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({entry: n for n, entry in enumerate(entries)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")


def llada(cache: Path) -> None:
    """Writes the same in place of LLaDA's."""
    shutil.copytree(cache / "tokenizers" / "gpt2", cache / "tokenizers" / "GSAI-ML/LLaDA-8B-Base")


def cifar10(cache: Path) -> None:
    """Writes a file of 60 images in the format of CIFAR-10's."""
    record = bytes([3]) + bytes(range(256)) * 12
    (cache / "cifar10.bin").write_bytes(record * 60)


def downsampled_imagenet(cache: Path) -> None:
    """Writes what TFDS prepares of ImageNet 64, with images of 16 pixels."""
    from PIL import Image
    from records import prepare, tfds

    features = {"image": tfds.features.Image(shape=(16, 16, 3), encoding_format="png")}
    image = lambda split, n: {"image": Image.new("RGB", (16, 16), (n, 99, 7))}  # noqa: E731
    sizes = {"train": 40, "validation": 20}
    prepare(cache, sizes, "downsampled_imagenet/64x64", "2.0.0", images=(features, image))


def images_and_autoencoder(cache: Path) -> None:
    """Writes images in folders of two classes, and a tiny autoencoder in place of aMUSEd's."""
    autoencoder_folders.pictures(cache / "images", ((16, 20),) * 60)
    model = cache / "hub" / "models" / "amused" / "amused-256" / "vqvae"
    autoencoder_folders.write("vqgan_amused", model)


def uniref50(cache: Path) -> None:
    """Writes 200 proteins of 8 to 30 residues in place of UniRef50."""
    residues = "LAGVSERTIDPKQNFYMHWC"
    texts = [(residues[n % 20 :] + residues)[: 8 + n % 23] for n in range(200)]
    fasta = "".join(f">UniRef50_{n}\n{text}\n" for n, text in enumerate(texts))
    (cache / "uniref50.fasta.gz").write_bytes(gzip.compress(fasta.encode()))


ALL = (openwebtext, lm1b, fineweb_edu, text8, mnist, gpt2, llada, cifar10, downsampled_imagenet)
ALL += (images_and_autoencoder, uniref50)
