"""Published VQGAN: its folder or file, and images as codes.

A folder has the layout of `VQModel` in the library diffusers: config.json, and the arrays in one
safetensors file. A file is that of LlamaGen's autoencoder.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.autoencoders import layers, llamagen
from md4_jax.protocols import Array, UserError
from md4_jax.runtime.paths import Place, replace
from md4_jax.runtime.tensors import TORCH, Tensors, write_file

# Folder of a run, or of a saved model, that holds its autoencoder.
FOLDER = "autoencoder"
CONFIG, ARRAYS = "config.json", "diffusion_pytorch_model.safetensors"
AT_ONCE = 16  # images
# GPUs and TPUs round the operands of products otherwise, which changes codes.
PRECISION = "highest"
# Type of block -> whether it has attention.
DOWN = {"DownEncoderBlock2D": False, "AttnDownEncoderBlock2D": True}
UP = {"UpDecoderBlock2D": False, "AttnUpDecoderBlock2D": True}
# Values of a black and of a white pixel.
RANGES = {"unit": (0.0, 1.0), "signed": (-1.0, 1.0)}
# Keys of config.json that this code supports at one value only, with the library's default.
FIXED = {"act_fn": "silu", "norm_type": "group"}


class Autoencoder:
    """VQGAN of a folder or of a file, as a map from images uint8 to codes and back.

    folder    the folder or the file
    codes     size of the codebook
    channels  channels of an image
    factor    pixels per code, in height and in width
    sha256    of arrays and settings: equal for autoencoders that compute the same
    """

    def __init__(self, folder: Place, pixels: str = "auto"):
        config = _of_file(folder) if folder.name.endswith(TORCH) else _config(folder)
        self.folder, self._config = folder, config
        self._is_llamagen = config["_class_name"] == llamagen.KIND
        self._pixels = _pixels(config, pixels)
        self._encoder, self._decoder = _stacks(folder, config)
        self.codes, self.channels = config["num_vq_embeddings"], config["in_channels"]
        self.factor = 2 ** (len(self._encoder.attends) - 1)

    @functools.cached_property
    def sha256(self) -> str:
        settings = json.dumps([self._pixels, _settings(self._config)], sort_keys=True)
        found = hashlib.sha256(settings.encode())
        for name in sorted(self._arrays):
            found.update(name.encode() + np.asarray(self._arrays[name]).tobytes())
        return found.hexdigest()

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Returns the codes int32 [N, H / factor, W / factor] of images uint8 [N, H, W, C]."""
        return _in_parts(functools.partial(self._encode, self._arrays), images)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Returns the images uint8 [N, H, W, C] of codes [N, h, w]."""
        return _in_parts(functools.partial(self._decode, self._arrays), codes)

    def keep(self, folder: Place) -> None:
        """Copies the autoencoder to a folder, unless it is there; config.json is written last."""
        if (folder / CONFIG).exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self._is_llamagen:
            write_file(folder / ARRAYS, _tensors(self.folder), "pt")
            config = {"_class_name": llamagen.KIND}
        else:
            (folder / ARRAYS).write_bytes((self.folder / ARRAYS).read_bytes())
            config = self._config
        replace(folder / CONFIG, json.dumps({**config, "pixels": self._pixels}))

    @functools.cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        stored = _tensors(self.folder)
        if self._is_llamagen:
            return llamagen.arrays(stored)
        return {name: np.asarray(stored[name], np.float32) for name in stored}

    def _codebook(self, arrays: Mapping[str, Array]) -> Array:
        codebook = jnp.asarray(arrays[llamagen.CODEBOOK])
        return layers.unit(codebook) if self._is_llamagen else codebook

    @functools.cached_property
    def _encode(self) -> Callable[[Mapping[str, Array], Array], Array]:
        low, high = RANGES[self._pixels]

        def codes(arrays: Mapping[str, Array], images: Array) -> Array:
            values = low + (high - low) / 255.0 * images.astype(jnp.float32)
            with jax.default_matmul_precision(PRECISION):
                vectors = layers.encoded(arrays, values, self._encoder)
                vectors = layers.unit(vectors) if self._is_llamagen else vectors
                return layers.nearest(vectors, self._codebook(arrays))

        return jax.jit(codes)

    @functools.cached_property
    def _decode(self) -> Callable[[Mapping[str, Array], Array], Array]:
        low, high = RANGES[self._pixels]

        def images(arrays: Mapping[str, Array], codes: Array) -> Array:
            vectors = self._codebook(arrays)[codes]
            with jax.default_matmul_precision(PRECISION):
                values = layers.decoded(arrays, vectors, self._decoder)
            unit = jnp.clip((values - low) / (high - low), 0.0, 1.0)
            return jnp.round(255.0 * unit).astype(jnp.uint8)

        return jax.jit(images)


def read(folder: Place, pixels: str = "auto") -> Autoencoder:
    """Reads the autoencoder of a folder, or of LlamaGen's file.

    pixels  values of black and white for the network: 'unit', 0 and 1; 'signed', -1 and 1; 'auto',
            those that config.json names, else 'unit' for aMUSEd's (lookup_from_codebook), and
            'signed' for others

    UserError for a folder of another model, and for settings that are not supported.
    """
    return Autoencoder(folder, pixels)


class _Shape(NamedTuple):
    """Keys of config.json that determine the network, with the library's defaults."""

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    num_vq_embeddings: int = 256
    norm_num_groups: int = 32
    mid_block_add_attention: bool = True
    lookup_from_codebook: bool = False


def _tensors(where: Place) -> Tensors:
    """Returns the arrays of a folder or of a file."""
    if where.name.endswith(TORCH):
        return Tensors(where.parent, where.name)
    return Tensors(where, ARRAYS)


def _of_file(file: Place) -> dict[str, Any]:
    return _Shape()._asdict() | llamagen.settings(_tensors(file), str(file))


def _config(folder: Place) -> dict[str, Any]:
    """Reads config.json with the library's defaults; UserError if it is not that of a VQModel."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        if config.get("_class_name") == llamagen.KIND:
            own = llamagen.settings(_tensors(folder), str(folder))
            return _Shape()._asdict() | own | {"pixels": config.get("pixels")}
        if config.get("_class_name") != "VQModel":
            raise ValueError(f"_class_name is {config.get('_class_name')!r}")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder / CONFIG} is not the config.json of an autoencoder with a codebook, VQModel "
            f"of the library diffusers ({error})"
        ) from error
    for key, value in FIXED.items():
        if config.get(key, value) != value:
            raise UserError(
                f"{folder / CONFIG}: {key}={config[key]!r} is not supported, only {value!r}"
            )
    return _Shape()._asdict() | config


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    more = [key for key in ("l2_norm",) if key in config]  # absent in hashes of other autoencoders
    return {key: config[key] for key in (*_Shape._fields, *more)}


def _stacks(folder: Place, config: Mapping[str, Any]) -> tuple[layers.Stack, layers.Stack]:
    """Returns the shapes of encoder and decoder; UserError for unknown blocks."""
    found = []
    for key, known in (("down_block_types", DOWN), ("up_block_types", UP)):
        if unknown := [name for name in config[key] if name not in known]:
            raise UserError(
                f"{folder / CONFIG}: {key} has {unknown[0]}, but only {', '.join(known)} are "
                "supported"
            )
        found.append(
            layers.Stack(
                tuple(known[name] for name in config[key]),
                config["layers_per_block"],
                config["mid_block_add_attention"],
                config["norm_num_groups"],
            )
        )
    return found[0], found[1]


def _pixels(config: Mapping[str, Any], pixels: str) -> str:
    if pixels == "auto":
        return config.get("pixels") or ("unit" if config["lookup_from_codebook"] else "signed")
    return pixels


def _in_parts(function: Callable[[Array], Array], rows: np.ndarray) -> np.ndarray:
    """Applies a compiled function to AT_ONCE rows at a time, the last part filled up."""
    found = []
    for first in range(0, len(rows), AT_ONCE):
        part = rows[first : first + AT_ONCE]
        whole = np.concatenate([part, np.repeat(part[-1:], AT_ONCE - len(part), axis=0)])
        found.append(np.asarray(function(whole))[: len(part)])
    return np.concatenate(found)
