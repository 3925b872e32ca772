"""Trajectories of images from noise: a grid and an animation."""

from typing import Any

import numpy as np
from PIL import Image

from md4_jax.generate.pictures import coloured, factor, grid, save, size
from md4_jax.generate.traces import FRAMES, MASK, Trajectory
from md4_jax.runtime.paths import Place

TIMES = 9  # columns of the grid
ENLARGED = 2  # pixels in the animation per pixel of a grid


def paths(domain: Any, frames: np.ndarray, file: Place) -> None:
    """Writes one row per sample, with columns evenly spaced in steps; frames [F, R, L]."""
    shown = np.unique(np.linspace(0, len(frames) - 1, TIMES).round().astype(int))
    save(grid(coloured(domain, frames[shown].swapaxes(0, 1)), factor(size(domain))), file)


def gif(path: Trajectory, file: Place, domain: Any) -> None:
    """Writes an animation of one image."""
    shown = np.unique(np.linspace(0, len(path.step) - 1, FRAMES).astype(int))
    large = coloured(domain, states(path)[shown])[:, None, None]
    scale = ENLARGED * factor(size(domain))
    images = [Image.fromarray(grid(image, scale)).quantize(256) for image in large]
    pause = max(40, min(400, 8000 // len(images)))
    with file.open("wb") as out:
        images[0].save(
            out, "GIF", save_all=True, append_images=images[1:], loop=0,
            duration=[1000, *[pause] * (len(images) - 2), 3000][-len(images):],
        )  # fmt: skip


def states(path: Trajectory) -> np.ndarray:
    """Returns the symbols of a trajectory, [F, L], with -1 for the mask."""
    symbols = np.array([-1 if text == MASK else int(text) for text in [*path.words, MASK]])
    return symbols[path.symbol]
