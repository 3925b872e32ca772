"""Public corpora and vocabularies, small, as they lie in the cache directory once downloaded."""

import io
import json
import tarfile
from pathlib import Path

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


def gpt2(cache: Path) -> None:
    """Writes a byte-level vocabulary of two merges in place of GPT-2's."""
    from tokenizers import pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*symbols, "th", "the", "<|endoftext|>"]
    folder = cache / "tokenizers" / "gpt2"
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({entry: n for n, entry in enumerate(entries)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")


ALL = (openwebtext, lm1b, fineweb_edu, text8, gpt2)
