"""Images as the codes of an autoencoder: docs/images.md."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from md4_jax import autoencoders
from md4_jax.autoencoders import Autoencoder
from md4_jax.data import hub
from md4_jax.data.images import ImageSource
from md4_jax.data.lock import alone
from md4_jax.data.sequences import Rows
from md4_jax.data.sources.splits import digest
from md4_jax.data.units import CODE
from md4_jax.protocols import Array, UserError
from md4_jax.runtime.paths import Place, cache_root, exists, place

MARK = "hf:"


@dataclasses.dataclass(frozen=True)
class CodeDomain:
    """Images whose symbols are the codes of an autoencoder, row by row.

    shape        (rows, columns, 1) of the grid of codes
    sha256       of the autoencoder
    labels       names of the classes: class k is labels[k]. (): no classes
    autoencoder  None until `beside` has found it
    """

    shape: tuple[int, ...]
    vocab_size: int
    sha256: str
    labels: tuple[str | int, ...] = ()
    autoencoder: Autoencoder | None = dataclasses.field(default=None, compare=False)

    unit = CODE

    @property
    def picture(self) -> tuple[int, int, int]:
        """Shape (H, W, C) of the images."""
        rows, columns, _ = self.shape
        factor = self._of_run.factor
        return rows * factor, columns * factor, self._of_run.channels

    def encode(self, images: Array) -> np.ndarray:
        """Returns the codes [..., L] of images uint8 [..., H, W, C]."""
        images = np.asarray(images)
        codes = self._of_run.encode(images.reshape(-1, *images.shape[-3:]))
        return codes.reshape(*images.shape[:-3], math.prod(self.shape))

    def decode(self, row: Sequence[int] | Array) -> np.ndarray:
        """Returns the image uint8 [H, W, C] of codes [L]."""
        return self.decode_rows(np.asarray(row)[None])[0]

    def decode_rows(self, rows: Array) -> np.ndarray:
        """Returns the images uint8 [N, H, W, C] of codes [N, L]."""
        return self._of_run.decode(np.asarray(rows).reshape(-1, *self.shape[:2]))

    def to_json(self) -> str:
        """Returns the JSON object of the domain; the autoencoder is stored by `keep`."""
        fields = {name: getattr(self, name) for name in ("shape", "vocab_size", "sha256", "labels")}
        return json.dumps({"domain": "codes", **fields})

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], load: Any = None) -> "CodeDomain":
        """Makes the domain, still without its autoencoder, from the parsed JSON object."""
        del load
        shape, labels = tuple(fields["shape"]), tuple(fields["labels"])
        return cls(shape, fields["vocab_size"], fields["sha256"], labels)

    def keep(self, directory: Place) -> None:
        """Copies the autoencoder into the directory of a run or of a saved model."""
        self._of_run.keep(directory / autoencoders.FOLDER)

    def beside(self, directory: Place) -> "CodeDomain":
        """Returns the domain with the autoencoder of the directory; UserError if it changed."""
        found = autoencoders.read(directory / autoencoders.FOLDER)
        if found.sha256 != self.sha256:
            raise UserError(
                f"{found.folder} is not the autoencoder of this run: its arrays or its config.json "
                "were changed. Restore them from a copy"
            )
        return dataclasses.replace(self, autoencoder=found)

    @property
    def _of_run(self) -> Autoencoder:
        if self.autoencoder is None:
            raise ValueError("the domain has no autoencoder yet: call `beside`")
        return self.autoencoder


class CodedImages:
    """Source of images whose rows are codes; other attributes are those of the wrapped source.

    UserError for a source without images, and for images of another size or number of channels than
    the autoencoder supports.
    """

    def __init__(self, source: Any, autoencoder: Autoencoder):
        if not isinstance(source, ImageSource):
            raise UserError(
                "data.autoencoder is only for images: set data.autoencoder='', or data.name to a "
                "source of images"
            )
        height, width, channels = source.shape
        factor = autoencoder.factor
        if height % factor or width % factor or channels != autoencoder.channels:
            raise UserError(
                f"data.autoencoder={autoencoder.folder} makes one code of {factor} x {factor} "
                f"pixels of {autoencoder.channels} channels, which does not divide images of "
                f"{height} x {width} pixels of {channels}"
            )
        if source.levels != 256:
            raise UserError(
                f"data.levels={source.levels} has no meaning for codes of an autoencoder: set "
                "data.levels=256"
            )
        self._source, self._autoencoder = source, autoencoder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # for copy and pickle
            raise AttributeError(name)
        return getattr(self._source, name)

    def domain(self) -> CodeDomain:
        """Returns the meaning of the symbols."""
        height, width, _ = self._source.shape
        own, labels = self._autoencoder, self._source.domain().labels
        shape = (height // own.factor, width // own.factor, 1)
        return CodeDomain(shape, own.codes, own.sha256, labels, own)

    def fingerprint(self) -> str:
        """Returns a hash of the images and of the autoencoder."""
        return digest("codes", self._autoencoder.sha256, self._source.fingerprint())

    def pictures(self, split: str) -> Iterator[np.ndarray]:
        """Yields the images of the rows of a split in pieces, uint8 [N, H, W, C]."""
        yield from self._source.images(split)
        if self._source.flip and split == "train":
            yield from (piece[:, :, ::-1] for piece in self._source.images(split))

    def rows(self, split: str) -> Rows:
        """Returns the images of a split as rows of codes, memory-mapped, with their classes.

        With `flip` the training split has each image and, after all images, each mirrored image:
        the codes of a mirrored image are not mirrored codes. They are computed once and stored.
        """
        domain = self.domain()

        def symbols() -> Iterator[np.ndarray]:
            return (domain.encode(piece).ravel() for piece in self.pictures(split))

        copies = 1 + (self._source.flip and split == "train")
        what = f"codes of {domain.sha256}, {copies} of each image"
        # Two encodings at once would also not need to be equal: accelerators round differently.
        lock = cache_root() / "tokens" / f"{split}-{domain.sha256[:20]}.lock"
        with alone(lock, f"the encoding of the {split} images"):
            tokens = self._source.kept(what, split, domain.vocab_size, symbols)
        tokens = tokens.reshape(-1, math.prod(domain.shape))
        context = self._source.context(split, len(tokens) // copies)
        return Rows(tokens, {name: np.tile(each, copies) for name, each in context.items()})


def found_autoencoder(named: str, pixels: str) -> Autoencoder:
    """Reads the autoencoder of a folder or a file, or of hf:OWNER/NAME or hf:OWNER/NAME/FOLDER.

    The last may also be a file, such as hf:FoundationVision/LlamaGen/vq_ds16_c2i.pt.
    """
    if pixels not in ("auto", "unit", "signed"):
        raise UserError(
            f"data.autoencoder_pixels must be 'auto', 'unit' or 'signed', not {pixels!r}"
        )
    if named.startswith(MARK):
        return autoencoders.read(_fetched(named.removeprefix(MARK)), pixels)
    where = place(named, "data.autoencoder")
    is_file = named.endswith(autoencoders.FILES)
    if not exists(where) or where.is_dir() == is_file:
        raise UserError(
            f"data.autoencoder: there is no {'file' if is_file else 'directory'} {where}"
        )
    return autoencoders.read(where, pixels)


def _fetched(name: str) -> Place:
    """Returns the local folder or file of a model of the hub, OWNER/NAME or OWNER/NAME/FOLDER."""
    owner, _, rest = name.partition("/")
    model, _, folder = rest.partition("/")
    if not owner or not model:
        raise UserError(f"data.autoencoder={MARK}{name} must be {MARK}OWNER/NAME or with /FOLDER")
    if folder.endswith(autoencoders.FILES):
        return Place(hub.model_file(f"{owner}/{model}", folder))
    above = f"{folder}/" if folder else ""
    for file in (autoencoders.ARRAYS, autoencoders.CONFIG):
        local = hub.model_file(f"{owner}/{model}", above + file)
    return Place(local.parent)
