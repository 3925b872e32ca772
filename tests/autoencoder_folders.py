"""Folders of tiny published autoencoders, and images for them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch_saved
from PIL import Image

from md4_jax import autoencoders
from md4_jax.data.sources.folders import ImageFolder

PUBLISHED = Path(__file__).parent / "published"


def write(name: str, folder: Path, **changes: Any) -> Path:
    """Writes the folder of one of tests/published, with changes of its config.json."""
    folder.mkdir(parents=True)
    told = json.loads((PUBLISHED / f"{name}.json").read_text())["config"]
    (folder / autoencoders.CONFIG).write_text(json.dumps(told | changes))
    shutil.copy(PUBLISHED / f"{name}.safetensors", folder / autoencoders.ARRAYS)
    return folder


def llamagen(file: Path) -> Path:
    """Writes the file of the tiny autoencoder of LlamaGen of tests/published."""
    draw, arrays = np.random.RandomState(0), {}
    shapes = json.loads((PUBLISHED / "llamagen_vq.json").read_text())["shapes"]
    for name, shape in shapes.items():
        values = draw.standard_normal(shape)
        if len(shape) > 1:
            values = values / np.sqrt(np.prod(shape[1:]))
        else:
            values = 0.2 * values + ("norm" in name and name.endswith("weight"))
        arrays[name] = values.astype(np.float32)
    arrays["quantize.codebook_used"] = np.zeros(65536, np.float32)
    return torch_saved.write(file, {"model": arrays, "steps": 5})


def pictures(folder: Path, sizes: tuple[tuple[int, int], ...]) -> None:
    """Writes random images of these heights and widths, in the folders of two classes."""
    draw = np.random.default_rng(0)
    for number, (height, width) in enumerate(sizes):
        (folder / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        values = draw.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(values).save(folder / f"class{number % 2}" / f"{number}.png")


def images_of_test(folder: Path) -> np.ndarray:
    """Reads the images of a test split of 8 images, beside 8 of validation."""
    return np.concatenate(list(ImageFolder(str(folder), validation=8, test=8).images("test")))
