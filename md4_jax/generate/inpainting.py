"""Prompts of images: the pixels that are kept, and those to fill in."""

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from md4_jax.generate.pictures import size
from md4_jax.options import PromptOptions
from md4_jax.protocols import Prompt, UserError
from md4_jax.runtime.paths import place

# (split, number) -> the symbols [L] of an example of the data.
Example = Callable[[str, int], np.ndarray]
SPLITS = ("train", "validation", "test")
OF_TEXT = ("prompt", "suffix", "template", "templates")
OF_IMAGES = ("inpaint", "image_from", "mask", "box")


def prompts(options: PromptOptions, domain: Any, example: Example | None) -> list[Prompt]:
    """Returns a prompt for each image of the options; its tokens contain the whole image.

    example: reads an example of the data; None: sample.image_from is checked but not read

    Raises UserError for a file that cannot be read, and for sizes that do not fit.
    """
    for key in OF_TEXT:
        if getattr(options, key):
            raise UserError(
                f"sample.{key} is only for text, and this run has images: use sample.inpaint"
            )
    _check(options)
    length = int(np.prod(domain.shape))
    if not (options.inpaint or options.image_from):
        return [Prompt(np.zeros(length, np.int32), np.zeros(length, bool))]
    stays = np.repeat(~_symbols_to_fill(options, domain).ravel(), domain.shape[2])
    if options.inpaint:
        rows = [domain.encode(_image(options.inpaint, "sample.inpaint", domain))]
    elif example is None:
        rows = [np.zeros(length, np.int32)]
    else:
        rows = [example(split, number) for split, number in _examples(options)]
    return [Prompt(np.asarray(row, np.int32), stays) for row in rows]


def _check(options: PromptOptions) -> None:
    """Raises UserError unless there are one image and one region, or neither."""
    for one, other in (("inpaint", "image_from"), ("mask", "box")):
        if getattr(options, one) and getattr(options, other):
            raise UserError(f"sample.{one} cannot be combined with sample.{other}")
    image = next((key for key in OF_IMAGES[:2] if getattr(options, key)), "")
    region = next((key for key in OF_IMAGES[2:] if getattr(options, key)), "")
    if image and not region:
        raise UserError(
            f"sample.{image} also needs the region to fill: set sample.mask or sample.box"
        )
    if region and not image:
        raise UserError(
            f"sample.{region} also needs an image: set sample.inpaint or sample.image_from"
        )
    if options.box:
        _box(options)
    if options.image_from:
        _examples(options)


def _box(options: PromptOptions) -> tuple[int, int, int, int]:
    """Returns top, left, height and width of the rectangle to fill in."""
    parts = [part.strip() for part in options.box.split(",")]
    if len(parts) != 4 or not all(part.isdecimal() for part in parts) or "0" in parts[2:]:
        raise UserError(
            f"sample.box={options.box} must be four whole numbers: top and left of at least 0, "
            "then height and width of at least 1, such as 4,0,4,8"
        )
    top, left, height, width = map(int, parts)
    return top, left, height, width


def _examples(options: PromptOptions) -> list[tuple[str, int]]:
    """Returns (split, number) of the examples in sample.image_from."""
    split, _, numbers = options.image_from.partition(":")
    if split not in SPLITS or not all(n.isdecimal() for n in numbers.split(",")):
        raise UserError(
            f"sample.image_from={options.image_from} must be a split (train, validation, test) and "
            "numbers of images, such as test:3 or test:0,3,7"
        )
    return [(split, int(number)) for number in numbers.split(",")]


def _symbols_to_fill(options: PromptOptions, domain: Any) -> np.ndarray:
    """Returns the places to fill in, bool [rows, columns]: those with a pixel to fill in."""
    pixels = _to_fill(options, domain)
    rows, columns = domain.shape[:2]
    return pixels.reshape(rows, len(pixels) // rows, columns, -1).any(axis=(1, 3))


def _to_fill(options: PromptOptions, domain: Any) -> np.ndarray:
    """Returns the pixels to fill in, bool [H, W]."""
    height, width = size(domain)[:2]
    if options.mask:
        return _image(options.mask, "sample.mask", domain)[..., 0] >= 128
    top, left, rows, columns = _box(options)
    if top + rows > height or left + columns > width:
        raise UserError(
            f"sample.box={options.box} (top, left, height, width) ends at row {top + rows} and "
            f"column {left + columns}, but the images have only {height} x {width} pixels"
        )
    found = np.zeros((height, width), bool)
    found[top : top + rows, left : left + columns] = True
    return found


def _image(path: str, key: str, domain: Any) -> np.ndarray:
    """Reads an image of the data's size, grey or RGB like the data: uint8 [H, W, C]."""
    height, width, channels = size(domain)
    try:
        with place(path, key).open("rb") as file, Image.open(file) as image:
            values = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{key}={path} cannot be read as an image: {error}") from error
    if values.shape[:2] != (height, width):
        raise UserError(
            f"{key}={path} has {values.shape[0]} x {values.shape[1]} pixels (height x width), but "
            f"the images of this run have {height} x {width}"
        )
    return values.reshape(size(domain))
