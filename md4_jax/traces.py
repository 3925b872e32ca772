"""How a sample came about, as an animated GIF and as a page that opens from disk."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLUMNS = 72  # characters in a line of the picture
FRAMES = 160  # of the animation at most; a longer path is thinned out
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"
PAGE = Path(__file__).with_name("trace.html")
GIVEN = (70, 70, 70)
MASK = (190, 190, 190)
# From least sure to surest.
COLOURS = np.array([(196, 60, 40), (205, 140, 20), (60, 140, 60), (20, 60, 130)], float)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """States of one sequence, equal neighbours joined.

    step    int [F], the number of steps that had been taken
    symbol  int [F, L], -1 where the text does not reach yet
    sure    float [F, L], the probability with which the model drew the symbol
    given   bool [L]
    words   what each symbol looks like, the mask last
    """

    step: np.ndarray
    symbol: np.ndarray
    sure: np.ndarray
    given: np.ndarray
    words: Sequence[str]


def trajectory(
    frames: tuple[np.ndarray, np.ndarray], given: np.ndarray, tokenizer: Any
) -> Trajectory:
    """The path of the frames of a sampler; symbols that do not occur are left out of words."""
    z, sure = frames
    changed = np.ones(len(z), bool)
    changed[1:] = (z[1:] != z[:-1]).any(axis=1)
    changed[-1] = True
    used, symbol = np.unique(z[changed], return_inverse=True)
    words = [word(tokenizer, i) for i in used]
    offset = int(np.searchsorted(used, 0))  # -1, if it is there, comes first
    symbol = symbol.reshape(z[changed].shape) - offset
    return Trajectory(np.flatnonzero(changed), symbol, sure[changed], given, words[offset:])


def word(tokenizer: Any, symbol: int) -> str:
    """What a symbol looks like: '_' for the mask, visible signs for breaks."""
    if symbol < 0:
        return ""
    if symbol == tokenizer.vocab_size:
        return "_"
    text = tokenizer.decode([symbol]) or "\N{SYMBOL FOR NULL}"
    return text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", " ")


def colour(sure: float) -> tuple[int, int, int]:
    """From red for 0 to blue for 1."""
    place = min(max(sure, 0.0), 1.0) * (len(COLOURS) - 1)
    low = min(int(place), len(COLOURS) - 2)
    mixed = COLOURS[low] + (place - low) * (COLOURS[low + 1] - COLOURS[low])
    return tuple(int(c) for c in mixed)


def gif(path: Trajectory, file: Path) -> None:
    """An animation; each token has the colour of how sure the model was of it."""
    font = ImageFont.truetype(str(FONT), 15)
    wide, high = font.getbbox("m")[2], 20
    places, lines = _layout([path.words[i] if i >= 0 else "" for i in path.symbol[-1]])
    size = (COLUMNS * wide + 24, (lines + 2) * high + 24)
    shown = np.unique(np.linspace(0, len(path.step) - 1, FRAMES).astype(int))
    images = [_image(path, index, places, font, (wide, high), size) for index in shown]
    pause = max(40, min(400, 8000 // len(images)))
    images[0].save(
        file, save_all=True, append_images=images[1:], loop=0,
        duration=[pause] * (len(images) - 1) + [3000],
    )  # fmt: skip


def _layout(words: list[str]) -> tuple[list[tuple[int, int, int]], int]:
    """(column, line, width) of each word and how many lines they take."""
    places, column, line = [], 0, 0
    for word in words:
        width = min(max(1, len(word)), COLUMNS)
        if column + width > COLUMNS:
            column, line = 0, line + 1
        places.append((column, line, width))
        column += width
    return places, line + 1


def _image(path: Trajectory, index: int, places, font, cell, size) -> Image.Image:
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    wide, high = cell
    for position, (column, line, width) in enumerate(places):
        symbol = path.symbol[index, position]
        if symbol < 0:
            continue
        word = path.words[symbol]
        corner = (12 + column * wide, 12 + line * high)
        ink = MASK if word == "_" else colour(path.sure[index, position])
        ink = GIVEN if path.given[position] else ink
        new = index and symbol != path.symbol[index - 1, position] and word != "_"
        if new:
            box = (corner[0], corner[1], corner[0] + width * wide, corner[1] + high - 2)
            draw.rectangle(box, fill=(255, 240, 190))
        draw.text(corner, word[:width], fill=ink, font=font)
    label = f"after step {path.step[index]} of {path.step[-1]}"
    draw.text((12, size[1] - high - 8), label, fill=(90, 90, 90), font=font)
    return image.quantize(64)


def html(path: Trajectory, file: Path, title: str) -> None:
    """A page without any other file: a slider over the steps, the probability at the pointer."""
    changes = []
    for index in range(len(path.step)):
        if index:
            moved = np.flatnonzero(path.symbol[index] != path.symbol[index - 1])
        else:
            moved = np.arange(path.symbol.shape[1])
        changes.append(
            [
                [int(n), int(path.symbol[index, n]), round(float(path.sure[index, n]), 4)]
                for n in moved
            ]
        )
    data = {
        "title": title,
        "steps": path.step.tolist(),
        "words": list(path.words),
        "given": np.flatnonzero(path.given).tolist(),
        "length": int(path.symbol.shape[1]),
        "colours": [list(map(int, c)) for c in COLOURS],
        "changes": changes,
    }
    text = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")
    file.write_text(PAGE.read_text(encoding="utf-8").replace("DATA", text), encoding="utf-8")
