"""Trajectory of a sample from noise to text, and an animated GIF of it."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from md4_jax.generate.pictures import has_pictures, is_coded
from md4_jax.runtime.paths import Place

COLUMNS = 72  # characters in a line of the picture
WIDE = 12  # most characters of a token; longer ones are cut off
FRAMES = 160  # most frames of an animation; longer paths are thinned out
TOKENS = 2048  # of a text that an animation shows
MASK = "\N{MIDDLE DOT}"
BREAK = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"  # shown for a line feed
SIGNS = {
    "\n": BREAK,
    "\r": "\N{SYMBOL FOR CARRIAGE RETURN}",
    "\t": "\N{RIGHTWARDS ARROW TO BAR}",
}
INK, PROMPT, BLANK = (60, 60, 60), (40, 40, 40), (110, 110, 110)
WHITE, NEW, RULE = (255, 255, 255), (255, 236, 170), (220, 220, 220)
# From probability 0 to 1; also readable for red-green colour-blind people.
COLOURS = np.array([(173, 68, 0), (168, 51, 109), (36, 62, 168)], float)
MARGIN, CELL, LINE = 16, 10, 24  # pixels; CELL is the width of a character
FOOT = 64  # height of the footer


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """States of one sequence; equal successive states are merged.

    step         int [F], number of steps taken, without idle steps at the end of a window
    symbol       int [F, L], an index into words, or -1 at positions not yet reached by a window
    confidence   float [F, L], probability with which the model drew the symbol, 0 for mask or noise
    prompt_mask  bool [L], the tokens that the user fixed
    words        text of each symbol that occurs
    mask         index of the mask in words, -1 if there is none
    unit         plural of the name of a symbol
    wide         whether a symbol may be several characters
    """

    step: np.ndarray
    symbol: np.ndarray
    confidence: np.ndarray
    prompt_mask: np.ndarray
    words: Sequence[str]
    mask: int
    unit: str = "tokens"
    wide: bool = False

    def open(self, index: int) -> np.ndarray:
        """Returns the positions of a frame that still have a mask or noise: bool [L]."""
        blank = (self.symbol[index] == self.mask) | (self.confidence[index] == 0)
        return blank & ~self.prompt_mask & (self.symbol[index] >= 0)

    def label(self, index: int) -> str:
        """Returns e.g. 'step 12: 30 of 64 tokens drawn'; without masks, the final ones."""
        free, step = ~self.prompt_mask, f"step {self.step[index]}"
        if self.mask < 0:
            same = np.sum(free & (self.symbol[index] == self.symbol[-1]))
            return f"{step}: {same} of {np.sum(free)} {self.unit} as at the end"
        drawn = np.sum(free & (self.symbol[index] >= 0) & ~self.open(index))
        return f"{step}: {drawn} of {np.sum(free)} {self.unit} drawn"


def trajectory(
    frames: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    prompt_mask: np.ndarray,
    tokenizer: Any,
    number: Sequence[np.ndarray] | None = None,
) -> Trajectory:
    """Makes a trajectory from a sampler's frames (z, confidence), both [F, L] for each window.

    Equal frames become one state, with the probabilities of the last one. The first frame of a
    later window repeats the end of the previous one and is omitted.

    number  for each window int [F], the index of each frame if some are omitted; None: all are
            included
    """
    steps, states, confidences, taken = [], [], [], 0
    number = [np.arange(len(z)) for z in frames[0]] if number is None else number
    for z, confidence, at in zip(*frames, number, strict=True):
        starts = np.flatnonzero((z[1:] != z[:-1]).any(axis=1)) + 1
        if not steps:
            starts = np.concatenate([[0], starts])
        ends = np.append(starts[1:], len(z)) - 1
        steps.append(taken + at[starts])
        states.append(z[starts])
        confidences.append(np.nan_to_num(confidence[ends[: len(starts)]]))
        taken += int(at[starts[-1]]) if len(starts) else 0
    z = np.concatenate(states)
    used, symbol = np.unique(z, return_inverse=True)
    symbol = symbol.reshape(z.shape) - int(used[0] < 0)
    used = used[used >= 0]
    words = [word(tokenizer, i) for i in used]
    found = np.flatnonzero(used == tokenizer.vocab_size)
    mask = int(found[0]) if len(found) else -1
    step, confidence = np.concatenate(steps), np.concatenate(confidences)
    unit = "codes" if is_coded(tokenizer) else "values" if has_pictures(tokenizer) else "tokens"
    wide = getattr(tokenizer, "unit", "") != "character"
    wide &= not (has_pictures(tokenizer) or getattr(tokenizer, "is_character", False))
    return Trajectory(step, symbol, confidence, prompt_mask, words, mask, unit, wide)


def word(tokenizer: Any, symbol: int) -> str:
    """Returns the displayed text of a symbol: a dot for the mask, signs for line breaks and tabs.

    It is empty for V + 1, a position without a token yet in a growing text, and for -1, a block
    that has not begun.
    """
    if symbol in (-1, tokenizer.vocab_size + 1):
        return ""
    if symbol == tokenizer.vocab_size:
        return MASK
    if has_pictures(tokenizer):
        return str(symbol)
    text = tokenizer.decode([symbol]) or "\N{SYMBOL FOR NULL}"
    for sign, shown in SIGNS.items():
        text = text.replace(sign, shown)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shades(count: int) -> np.ndarray:
    """Returns colours from orange for 0 through purple to blue for 1: uint8 [count, 3]."""
    place, known = np.linspace(0, len(COLOURS) - 1, count), np.arange(len(COLOURS))
    mixed = np.stack([np.interp(place, known, c) for c in COLOURS.T], axis=1)
    return mixed.round().astype(np.uint8)


SHADES = [tuple(map(int, shade)) for shade in shades(24)]


def gif(path: Trajectory, file: Place) -> None:
    """Writes an animation; the colour of a token is the probability with which it was drawn.

    At most the first TOKENS are shown, since a GIF has at most 65,535 pixels per side.
    """
    path = dataclasses.replace(
        path,
        symbol=path.symbol[:, :TOKENS],
        confidence=path.confidence[:, :TOKENS],
        prompt_mask=path.prompt_mask[:TOKENS],
    )
    shown = np.unique(np.linspace(0, len(path.step) - 1, FRAMES).astype(int))
    pause, count = max(40, min(400, 8000 // len(shown))), len(shown)
    images = _images(path, shown)
    with file.open("wb") as out:
        next(images).save(
            out, "GIF", save_all=True, append_images=images, loop=0,
            duration=[1000, *[pause] * (count - 2), 3000][-count:],
        )  # fmt: skip


def _font() -> Path:
    """Finds the font that matplotlib ships."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"


def _images(path: Trajectory, shown: np.ndarray) -> Iterator[Image.Image]:
    """Yields the frames; each repaints only the differences from the last one."""
    # 3 times as fast as painting complete frames, for 256 tokens and 64 frames.
    places, lines = _layout(path.symbol.shape[1], WIDE if path.wide else 1)
    widest = max(column + width for column, _, width in places)
    size = (2 * MARGIN + max(52, widest) * CELL, 2 * MARGIN + lines * LINE + FOOT)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.font = ImageFont.truetype(str(_font()), 16)
    painted: list = [None] * len(places)
    palette = _palette()
    for before, index in zip([0, *shown[:-1]], shown, strict=True):
        for position, look in enumerate(_looks(path, index, before)):
            if look != painted[position]:
                _paint(draw, places[position], *look)
                painted[position] = look
        _foot(draw, path.label(index), size)
        yield image.quantize(palette=palette, dither=Image.Dither.NONE)


def _palette() -> Image.Image:
    """Makes a palette of all colours on both backgrounds, with blends for edges of letters."""
    # Writes 10 times as fast as with a palette per frame, at a quarter of the size.
    inks = np.array([*SHADES, INK, PROMPT, BLANK], float)
    share = np.array([1.0, 0.7, 0.4])[:, None, None]
    mixed = [share * inks + (1 - share) * np.array(paper) for paper in (WHITE, NEW)]
    colours = np.concatenate([np.reshape(mixed, (-1, 3)), [WHITE, NEW, RULE]])
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours.round().astype(np.uint8).tobytes())
    return palette


def _looks(path: Trajectory, index: int, before: int) -> Iterator[tuple]:
    """Yields (text, colour, background, underlined if new since `before`) per position."""
    blank, inks = path.open(index), _inks(path.confidence[index])
    new = (path.symbol[index] != path.symbol[before]) & ~blank & ~path.prompt_mask
    for position, symbol in enumerate(path.symbol[index]):
        fixed = bool(path.prompt_mask[position])
        ink = PROMPT if fixed else inks[position]
        text = path.words[symbol] if symbol >= 0 else ""
        yield text, BLANK if blank[position] else ink, NEW if new[position] else WHITE, fixed


def _inks(confidence: np.ndarray) -> list[tuple[int, int, int]]:
    place = np.round(np.clip(confidence, 0.0, 1.0) * (len(SHADES) - 1)).astype(int)
    return [SHADES[i] for i in place]


def _paint(draw: ImageDraw.ImageDraw, place: tuple, text: str, ink, paper, underlined) -> None:
    column, line, width = place
    left, top = MARGIN + column * CELL, MARGIN + line * LINE
    right = left + width * CELL - 1
    draw.rectangle((left, top, right, top + LINE - 1), fill=WHITE)
    draw.rectangle((left, top, right, top + LINE - 3), fill=paper)
    text = text.center(width) if text == MASK else text[:width]
    draw.text((left, top + 1), text, fill=ink)
    if underlined and text:
        draw.line((left, top + 20, right, top + 20), fill=ink)


def _foot(draw: ImageDraw.ImageDraw, label: str, size: tuple[int, int]) -> None:
    """Paints the label of a frame and the scale of the colours."""
    top, right, small = size[1] - FOOT, size[0] - MARGIN, draw.font.font_variant(size=12)
    draw.rectangle((0, top, *size), fill=WHITE)
    draw.line((MARGIN, top, right, top), fill=RULE)
    draw.text((MARGIN, top + 20), label, fill=INK)
    left = right - 8 * len(SHADES)
    for i, shade in enumerate(SHADES):
        draw.rectangle((left + 8 * i, top + 14, left + 8 * i + 7, top + 24), fill=shade)
    draw.text((left, top + 30), "0", fill=INK, font=small)
    draw.text((right, top + 30), "1", fill=INK, font=small, anchor="ra")
    middle = (left + right) // 2
    draw.text((middle, top + 30), "probability", fill=INK, font=small, anchor="ma")


def _layout(count: int, width: int) -> tuple[list[tuple[int, int, int]], int]:
    """Returns (column, line, width) of each position, and the number of lines.

    The grid does not depend on the text, so that masks do not reveal the ends of words.
    """
    each = COLUMNS // width
    places = [(n % each * width, n // each, width) for n in range(count)]
    return places, -(-count // each)
