"""Grids of images: samples and inpainted images."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from md4_jax.runtime.paths import Place

BLANK = (200, 0, 160)  # colour of a pixel with a channel not drawn yet
SIDE = 128  # least pixels of the longer side of a displayed image, if a whole factor allows it
GAP = 4  # white pixels between images
TRACED = 4  # samples with trajectories side by side in one picture
CHOSEN_FROM = 8  # samples among which the page can switch


def has_pictures(domain: Any) -> bool:
    """Returns whether the examples of a domain are images, of shape (H, W, C)."""
    return len(getattr(domain, "shape", ())) == 3


def is_coded(domain: Any) -> bool:
    """Returns whether the symbols of a domain are codes of images."""
    return hasattr(domain, "decode_rows")


def size(domain: Any) -> tuple[int, ...]:
    """Returns the shape (H, W, C) of the images of a domain; `shape` is that of their symbols."""
    return getattr(domain, "picture", domain.shape)


def coloured(domain: Any, z: np.ndarray) -> np.ndarray:
    """Returns the RGB images uint8 [..., H, W, 3] of symbols [..., L].

    A pixel with a channel that is a mask, or not reached yet (-1), has the colour BLANK. So have
    the pixels of a code.
    """
    z = np.asarray(z)
    unknown, images = drawn(domain, z.reshape(-1, z.shape[-1]))
    images = np.broadcast_to(images, (*images.shape[:-1], 3))
    blank = of_pixels(domain, unknown.reshape(-1, *domain.shape).any(axis=-1))
    return np.where(blank, np.uint8(BLANK), images).reshape(*z.shape[:-1], *images.shape[1:])


def decoded(domain: Any, rows: np.ndarray) -> np.ndarray:
    """Returns the images uint8 [N, H, W, C] of rows of symbols [N, L]."""
    if is_coded(domain):
        return domain.decode_rows(rows)
    return np.stack([domain.decode(row) for row in rows])


def drawn(domain: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which symbols of rows [N, L] are unknown, and the images with these set to 0."""
    unknown = (rows < 0) | (rows >= domain.vocab_size)
    return unknown, decoded(domain, np.where(unknown, 0, rows))


def of_pixels(domain: Any, places: np.ndarray) -> np.ndarray:
    """Repeats values of places [N, rows, columns] for each of their pixels: [N, H, W, 1]."""
    factor = size(domain)[0] // domain.shape[0]
    return places.repeat(factor, axis=1).repeat(factor, axis=2)[..., None]


def factor(shape: Sequence[int]) -> int:
    """Returns the whole factor for enlarging images of a shape (H, W, C)."""
    return max(1, SIDE // max(shape[:2]))


def grid(images: np.ndarray, scale: int) -> np.ndarray:
    """Arranges images [rows, columns, H, W, 3] in one picture, enlarged without smoothing."""
    rows, columns = images.shape[:2]
    large = images.repeat(scale, axis=2).repeat(scale, axis=3)
    spaced = np.pad(large, [(0, 0)] * 2 + [(0, GAP)] * 2 + [(0, 0)], constant_values=255)
    height, width = spaced.shape[2:4]
    whole = spaced.transpose(0, 2, 1, 3, 4).reshape(rows * height, columns * width, 3)
    return np.pad(whole, [(GAP, 0), (GAP, 0), (0, 0)], constant_values=255)


def square(images: np.ndarray) -> np.ndarray:
    """Arranges images [N, H, W, 3] in about as many rows as columns; the last is padded white."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = -(-len(images) // columns)
    filled = np.full((rows * columns, *images.shape[1:]), 255, np.uint8)
    filled[: len(images)] = images
    return filled.reshape(rows, columns, *images.shape[1:])


def save(picture: np.ndarray, file: Place) -> None:
    """Writes an RGB picture [H, W, 3] as a PNG."""
    with file.open("wb") as out:
        Image.fromarray(picture).save(out, "PNG")


def read(file: Place) -> np.ndarray:
    """Reads an RGB picture [H, W, 3]."""
    with file.open("rb") as source, Image.open(source) as image:
        return np.asarray(image.convert("RGB"))


def samples(domain: Any, tokens: np.ndarray, file: Place) -> None:
    """Writes samples [N, L] as one PNG, in rows from left to right."""
    save(grid(square(coloured(domain, tokens)), factor(size(domain))), file)


def filled_in(
    domain: Any, prompts: Sequence[Any], tokens: np.ndarray, prompt_mask: np.ndarray, file: Place
) -> None:
    """Writes one column per prompt: the original, the input of the sampler, and the samples.

    prompts: their tokens contain the whole original. tokens [N, L]: equally many samples per prompt
    """
    originals = np.stack([prompt.tokens for prompt in prompts])
    each = tokens.reshape(len(prompts), -1, tokens.shape[-1])
    seen = np.where(prompt_mask.reshape(each.shape)[:, 0], originals, -1)
    columns = np.concatenate([originals[:, None], seen[:, None], each], axis=1)
    save(grid(coloured(domain, columns.swapaxes(0, 1)), factor(size(domain))), file)
