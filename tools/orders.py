"""Draws the order in which samplers unmask a text, one panel each, for docs/samplers.md.

    python tools/orders.py --workdir RUN --out docs/orders.png

A cell is a character of the sample. Its colour is the fraction of the network evaluations after
which it had its final value: pale first, dark last. A frame marks characters that were revised.
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import md4_jax

# Title of a panel, and the options of `Model.sample`.
PANELS = (
    ("ancestral: any place, at random", dict(sampler="ancestral", steps=64)),
    ("confidence: where the network is surest", dict(sampler="confidence", steps=64)),
    (
        "any_order, left to right: as an ordinary language model",
        dict(sampler="any_order", order="left_to_right"),
    ),
    ("remask: tokens may be taken back (framed)", dict(sampler="remask", eta=0.02, steps=128)),
)
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"
COLUMNS, CELL, LINE, MARGIN, TITLE = 64, 10, 20, 12, 30
EARLY, LATE, TAKEN = np.array([255, 244, 200]), np.array([24, 48, 120]), (214, 60, 0)


def settled(symbol: np.ndarray, mask: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (share, taken) of a path [F, L]: when each place got its last symbol, 0 to 1 [L],
    and whether a symbol that was drawn there did not stay [L]."""
    changed = symbol[1:] != symbol[:-1]
    last = np.where(changed.any(0), len(changed) - np.argmax(changed[::-1], axis=0), 0)
    taken = (changed & (symbol[:-1] != mask)).any(0)
    return last / max(1, len(changed)), taken


def panel(draw: ImageDraw.ImageDraw, top: int, title: str, path) -> None:
    """Paints a title and a sample's characters below it."""
    font = ImageFont.truetype(str(FONT), 15)
    draw.text((MARGIN, top), title, fill=(40, 40, 40), font=font)
    share, taken = settled(path.symbol, path.mask)
    words = [path.words[index] if index >= 0 else "" for index in path.symbol[-1]]
    for place, word in enumerate(words):
        left = MARGIN + place % COLUMNS * CELL
        up = top + TITLE + place // COLUMNS * LINE
        paper = EARLY + share[place] * (LATE - EARLY)
        ink = (0, 0, 0) if paper.mean() > 140 else (255, 255, 255)
        box = (left, up, left + CELL - 1, up + LINE - 1)
        draw.rectangle(box, tuple(map(int, paper)), outline=TAKEN if taken[place] else None)
        draw.text((left, up + 1), word[:1], fill=ink, font=font)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True, help="a run on text by characters, with masks")
    parser.add_argument("--out", default="docs/orders.png")
    parser.add_argument("--temperature", type=float, default=0.6)
    flags = parser.parse_args()
    try:
        model = md4_jax.load(flags.workdir)
    except md4_jax.UserError as error:
        sys.exit(f"error: --workdir {flags.workdir}: {error}")
    rows = -(-model.length // COLUMNS)
    height = TITLE + rows * LINE + MARGIN
    size = (2 * MARGIN + COLUMNS * CELL, MARGIN + len(PANELS) * height)
    image = Image.new("RGB", size, "white")
    for number, (title, options) in enumerate(PANELS):
        options = {"temperature": flags.temperature, "seed": 7, **options}
        path = model.sample(1, "ROMEO:", trace=True, **options).trace
        panel(ImageDraw.Draw(image), MARGIN + number * height, title, path)
    image.quantize(64).save(flags.out, optimize=True)
    print(flags.out)


if __name__ == "__main__":
    main()
