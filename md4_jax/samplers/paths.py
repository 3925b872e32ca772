"""Paths of samples from noise to text, stored for the part of a text that changes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from md4_jax.protocols import Array


class Parts(NamedTuple):
    """Paths of the first R sequences of a batch, which are drawn in G parts one after another.

    Frames of whole texts would take L^2 / P times the memory of one part.

    z           int32 [G, F, R, P], the symbols of each part after each step
    confidence  float32 [G, F, R, P], as in `Chain`
    begin       int32 [G, R], where a part begins; it may extend beyond the text
    first       (z, confidence) [R, L] of the texts before anything is drawn
    """

    z: Array
    confidence: Array
    begin: Array
    first: tuple[Array, Array]


class Runs(NamedTuple):
    """Path of one text through W windows, in which consecutive frames of equal symbols are merged.

    frames  (z, confidence), for each window [K, L]; the confidence is that of the last merged frame
    number  for each window int [K], the index of the first merged frame
    """

    frames: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
    number: Sequence[np.ndarray]


def states(parts: Parts, row: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (z, confidence), each [L], of a text after each step; arrays are reused."""
    z, confidence = (np.array(x[row]) for x in parts.first)
    size, length = parts.z.shape[-1], len(z)
    for g, begin in enumerate(parts.begin[:, row]):
        here, own = overlap(begin, size, length)
        both = zip(parts.z[g, :, row], parts.confidence[g, :, row], strict=True)
        for now, now_confidence in both:
            z[here], confidence[here] = now[own], now_confidence[own]
            yield z, confidence


def overlap(begin: int, size: int, length: int) -> tuple[slice, slice]:
    """Returns which positions of a text are those of a part, and which of the part's they are."""
    start, stop = (min(max(place, 0), length) for place in (begin, begin + size))
    return slice(start, stop), slice(start - begin, stop - begin)


def whole(parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    """Returns the frames (z, confidence) of whole texts, [G F, R, L]."""
    rows = [
        [(z.copy(), confidence.copy()) for z, confidence in states(parts, row)]
        for row in range(parts.z.shape[2])
    ]
    z, confidence = (np.stack([[at[k] for at in row] for row in rows], axis=1) for k in (0, 1))
    return z, confidence


def runs(windows: Sequence[Parts], row: int) -> Runs:
    """Returns the path of one text without the frames in which no symbol changes."""
    kept: list[tuple] = []
    for parts in windows:
        number, symbols, confidences = [], [], []
        for index, (z, confidence) in enumerate(states(parts, row)):
            if symbols and (z == symbols[-1]).all():
                confidences[-1][:] = confidence
                continue
            number.append(index)
            symbols.append(z.copy())
            confidences.append(confidence.copy())
        kept.append((np.stack(symbols), np.stack(confidences), np.array(number)))
    z, confidence, numbers = zip(*kept, strict=True)
    return Runs((z, confidence), numbers)
