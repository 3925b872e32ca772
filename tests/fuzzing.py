"""Files that are damaged at random, and what reads them.

A reader returns what it makes of the file. For a damaged one it returns the same, or raises
UserError with one sentence. A file without a checksum may also give something else.
"""

import dataclasses
import gzip
import io
import json
import random
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from md4_jax.config import build, schema
from md4_jax.config import load as config
from md4_jax.data import packing
from md4_jax.data.domains import read_domain, stored_domain
from md4_jax.data.sources.cifar10 import RECORD, Cifar10
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.sources.folders import ImageFolder
from md4_jax.data.sources.mnist import IMAGES, LABELS, read_idx
from md4_jax.data.sources.text8 import Text8
from md4_jax.data.tokenizers import Text8Symbols
from md4_jax.options import CheckpointOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place
from md4_jax.runtime.tensors import Tensors
from md4_jax.training import back
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.keeping import best_of
from md4_jax.training.writers import read_rows

LETTERS = b"abcdefgh "
ODD = (
    b"\0", b"\xff\xfe", b"\x1b[2J", b"1e400", b"-1", b"9" * 5000, b"NaN", b"null", b"[" * 3000,
    b"{}", b'""', b"true", b"\\ud800", b"\r\n", b'{"step": 1}\n', b"0.5",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """File to damage, its reader, and whether damage may give another result."""

    file: Path
    read: Callable[[], Any]
    is_checked: bool


def damaged(raw: bytes, coin: random.Random) -> bytes:
    """Returns the content with one damage: of bits, of length, or a value of another kind."""
    made, at = bytearray(raw), coin.randrange(len(raw) + 1)
    stop = min(len(raw), at + coin.choice((1, 2, 8, 64, 4096)))
    kind = coin.choice(("bit", "bytes", "cut", "insert", "delete", "repeat", "number"))
    if kind == "bit" and raw:
        made[min(at, len(raw) - 1)] ^= 1 << coin.randrange(8)
    elif kind == "bytes":
        made[at:stop] = coin.randbytes(stop - at)
    elif kind == "cut":
        del made[at:]
    elif kind == "insert":
        made[at:at] = coin.choice(ODD)
    elif kind == "delete":
        del made[at:stop]
    elif kind == "repeat":
        made[at:at] = made[at:stop] * coin.choice((1, 2, 100))
    else:
        return _with_another_number(raw, coin)
    return bytes(made)


def _with_another_number(raw: bytes, coin: random.Random) -> bytes:
    """Returns the content with a run of digits replaced, or the begin of a binary file."""
    digits = [i for i, byte in enumerate(raw) if chr(byte).isdigit()]
    if not digits:
        return struct.pack("<q", coin.choice((-1, 0, 2**62))) + raw[8:]
    first = last = coin.choice(digits)
    while last < len(raw) and chr(raw[last]).isdigit():
        last += 1
    return raw[:first] + coin.choice(ODD) + raw[last:]


def targets(run: Path, folder: Path) -> dict[str, Target]:
    """Writes a file of each kind below a folder; run: the directory of a finished run."""
    run = Path(shutil.copytree(run, folder / "run"))
    at = place(run)
    options = CheckpointOptions(**config.stored(at)["checkpoint"])
    return {
        "config.json": Target(run / "config.json", lambda: _experiment(at), False),
        "tokenizer.json": Target(
            run / "tokenizer.json", lambda: read_domain(at / "tokenizer.json", 16).to_json(), True
        ),
        "metrics.jsonl": Target(run / "metrics.jsonl", lambda: _rows(at), False),
        "back.json": Target(_back(run), lambda: back.position(at, 3, {}), False),
        "host state": Target(
            next(p for p in (run / "checkpoints" / "30" / "host").iterdir() if p.stat().st_size),
            lambda: _host(at, options), True,
        ),
        **_texts(folder), **_images(folder), **_cache(folder), **_tensors(folder),
    }  # fmt: skip


def _experiment(run: Any) -> Any:
    asked = schema.load_config(None, {}, run)
    build.experiment(asked, stored_domain(run, asked["data"]["length"]), workdir=run)
    return asked


def _rows(run: Any) -> Any:
    rows = read_rows(run / "metrics.jsonl")
    return best_of(rows, "validation/nats_per_token", {10, 20, 30})


def _back(run: Path) -> Path:
    entry = {"asked": "3", "step": 3, "sequences": 9, "optim": {"name": "adamw"}, "done": True}
    (run / back.FILE).write_text(json.dumps(entry))
    return run / back.FILE


def _host(run: Any, options: CheckpointOptions) -> Any:
    checkpoints = Checkpoints(run / "checkpoints", options, read_only=True)
    try:
        _, found = checkpoints.newest_host(say=lambda text: None)
    finally:
        checkpoints.close()
    return "the one before" if found["data"]["sequences"] != 240 else found


def _texts(folder: Path) -> dict[str, Target]:
    text = bytes(random.Random(1).choices(LETTERS, k=2000))
    lines = b"".join(b'{"text": "%s"}\n' % text[i * 40 : i * 40 + 40] for i in range(50))
    (folder / "plain.txt").write_bytes(text)
    (folder / "lines.jsonl").write_bytes(lines)
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines))
    for name in ("text8.zip", "texts.zip"):
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("text8", text)
    with tarfile.open(folder / "texts.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))

    def target(name: str, source: Any) -> Target:
        return Target(folder / name, lambda: list(source.documents("train")), False)

    found = {"text8.zip": target("text8.zip", Text8(str(folder / "text8.zip")))}
    for name in ("plain.txt", "lines.jsonl", "lines.jsonl.gz", "texts.zip", "texts.tar.gz"):
        found[name] = target(name, TextFiles(str(folder / name)))
    return found


def _images(folder: Path) -> dict[str, Target]:
    rng = np.random.default_rng(0)
    images = folder / "images.gz"
    head = struct.pack(">4I", IMAGES, 3, 28, 28)
    images.write_bytes(gzip.compress(head + rng.integers(0, 256, 3 * 784, np.uint8).tobytes()))
    labels = folder / "labels"
    labels.write_bytes(struct.pack(">2I", LABELS, 3) + bytes([1, 2, 3]))
    cifar = folder / "data.bin"
    records = rng.integers(0, 256, (4, RECORD), np.uint8)
    records[:, 0] = range(4)
    cifar.write_bytes(records.tobytes())
    return {
        "idx images": Target(images, lambda: read_idx(place(images), IMAGES).tolist(), False),
        "idx labels": Target(labels, lambda: read_idx(place(labels), LABELS).tolist(), False),
        "cifar": Target(
            cifar, lambda: [x.tolist() for x in Cifar10(str(cifar), test=1).images("train")], False
        ),
        "png": _folder(folder / "png"),
    }


def _folder(folder: Path) -> Target:
    from PIL import Image

    folder.mkdir()
    for number in range(3):
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(folder / f"{number}.png")

    def read() -> list:
        source = ImageFolder(str(folder), validation=0, test=0)
        return [x.tolist() for x in source.images("train")]

    return Target(folder / "1.png", read, False)


def _cache(folder: Path) -> dict[str, Target]:
    text = folder / "cached"
    text.write_bytes(bytes(random.Random(2).choices(b"abcdefgh ", k=3000)))
    source, tokenizer = Text8(str(text)), Text8Symbols()

    def read() -> bytes:
        return packing.token_stream(source, tokenizer, "train").tobytes()

    read()
    described = [source.fingerprint(), tokenizer.to_json(), "train"]
    size = tokenizer.vocab_size
    file, _ = packing.kept(source, described, size, "train", lambda: iter(()))
    record = file.parent / (file.name + ".json")
    return {"tokens": Target(file, read, True), "record of tokens": Target(record, read, True)}


def _tensors(folder: Path) -> dict[str, Target]:
    from safetensors.numpy import save

    model = folder / "model" / "model.safetensors"
    model.parent.mkdir()
    model.write_bytes(save({"a": np.arange(6.0).reshape(2, 3), "b": np.arange(4)}))

    def read() -> dict:
        found = Tensors(place(model.parent))
        return {name: found[name].tobytes() for name in found}

    return {"safetensors": Target(model, read, False)}


def tried(name: str, target: Target, number: int, seed: int) -> tuple[int, int, list[str]]:
    """Damages a file so many times; returns how often it was (read alike, refused), and faults."""
    whole, expected = target.file.read_bytes(), target.read()
    coin, alike, refused, wrong = random.Random(f"{name} {seed}"), 0, 0, []
    for trial in range(number):
        target.file.write_bytes(damaged(whole, coin))
        try:
            found = target.read()
            is_alike = repr(found) == repr(expected) or found == "the one before"
            alike += is_alike
            if target.is_checked and not is_alike:
                wrong.append(f"{name} {trial}: another result")
        except UserError as error:
            refused += 1
            if not str(error).strip() or "Traceback" in str(error):
                wrong.append(f"{name} {trial}: {error}")
        except Exception as error:
            wrong.append(f"{name} {trial}: {type(error).__name__}: {str(error)[:200]}")
        target.file.write_bytes(whole)
    return alike, refused, wrong
