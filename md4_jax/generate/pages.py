"""HTML page with the trajectories of samples, text or images, in a self-contained file."""

import base64
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from md4_jax.generate.image_traces import states
from md4_jax.generate.pictures import BLANK, drawn, factor, has_pictures, is_coded, size
from md4_jax.generate.traces import MASK, Trajectory
from md4_jax.runtime.paths import Place

PAGE, STYLE, SCRIPT = (Path(__file__).with_name(f"trace.{end}") for end in ("html", "css", "js"))
# Smaller changes of a probability are omitted.
RESOLUTION = 0.02
ENLARGED = 2  # pixels on the page per pixel of an image grid
QUALITY = 90  # of the JPEG of a decoded image, about a fifth of the size of a PNG


def write(paths: Sequence[Trajectory], file: Place, title: str, domain: Any) -> None:
    """Writes the page; the title tells from which samples the displayed one was chosen."""
    first = paths[0]
    shared = {"unit": first.unit, "length": first.symbol.shape[1], "wide": first.wide}
    shared |= of_images(domain)
    data = {
        "title": title,
        "name": file.stem,
        "shared": shared,
        "samples": [_sample(path, domain) for path in paths],
    }
    text = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")
    page = PAGE.read_text(encoding="utf-8")
    for place, content in (("STYLE", STYLE), ("SCRIPT", SCRIPT)):
        page = page.replace(place, content.read_text(encoding="utf-8"), 1)
    before, after = page.split("const data = DATA;")
    file.write_text(f"{before}const data = {text};{after}", encoding="utf-8")


def of_images(domain: Any) -> dict[str, Any]:
    """Returns the facts that the script needs for displaying images; {} for text."""
    if not has_pictures(domain):
        return {}
    each = size(domain)[0] // domain.shape[0]
    return {
        "shape": list(domain.shape),
        "flat": list(BLANK),
        "factor": each,
        "coded": is_coded(domain),
        "scale": max(each, ENLARGED * factor(domain.shape)),
    }


def decoded(domain: Any, z: np.ndarray) -> list[str]:
    """Returns the images of states of codes [N, L], as addresses (data:) that hold a JPEG.

    A code that is not drawn yet is decoded as code 0; the script hides its pixels. Its neighbours
    still change a little when it is drawn, since the decoder looks beyond the pixels of a code.
    """
    found = []
    for image in drawn(domain, z)[1]:
        file = io.BytesIO()
        Image.fromarray(image.squeeze()).save(file, "JPEG", quality=QUALITY, subsampling=0)
        found.append("data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode())
    return found


def values(domain: Any, levels: Sequence[int]) -> list[int]:
    """Returns the value in 0..255 that displays each level of an image."""
    of_one_level = np.repeat(np.asarray(levels)[:, None], math.prod(domain.shape), axis=1)
    return [int(domain.decode(row).flat[0]) for row in of_one_level]


def _sample(path: Trajectory, domain: Any) -> dict[str, Any]:
    """Returns the words, the prompt and the changes of one trajectory."""
    facts, pictures = {}, [{}] * len(path.step)
    if is_coded(domain):
        pictures = [{"picture": address} for address in decoded(domain, states(path))]
    elif has_pictures(domain):
        levels = [0 if text == MASK else int(text) for text in path.words]
        facts["values"] = values(domain, levels)
    parts = changes(path)
    return {
        **facts,
        "words": list(path.words),
        "mask": path.mask,
        "prompt": np.flatnonzero(path.prompt_mask).tolist(),
        "final": [int(symbol) for symbol in path.symbol[-1]],
        "frames": [
            {"step": int(step), "changes": part, **picture}
            for step, part, picture in zip(path.step, parts, pictures, strict=True)
        ],
    }


def changes(path: Trajectory) -> list[list[list]]:
    """Lists [position, symbol, probability] of the changes in each frame."""
    found, shown = [], np.full(path.confidence.shape[1], -1.0)
    for index, (symbol, confidence) in enumerate(zip(path.symbol, path.confidence, strict=True)):
        moved = (symbol != path.symbol[index - 1]) if index else np.ones(len(symbol), bool)
        moved |= np.abs(confidence - shown) > RESOLUTION
        if index == len(path.step) - 1:
            moved |= confidence != shown
        shown = np.where(moved, confidence, shown)
        found.append(
            [[int(n), int(symbol[n]), short(confidence[n])] for n in np.flatnonzero(moved)]
        )
    return found


def short(value: float) -> float:
    """Rounds to three significant digits."""
    return float(f"{value:.3g}")
