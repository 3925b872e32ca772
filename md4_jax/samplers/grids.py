"""Time grids t(0) = 0 < ... < t(T) = 1: docs/equations.md, Sampling."""

import numpy as np


def uniform(steps: int) -> np.ndarray:
    """t(i) = i / T, float32 [T + 1]."""
    return (np.arange(steps + 1) / steps).astype(np.float32)


def cosine(steps: int) -> np.ndarray:
    """t(i) = cos(pi/2 (1 - i/T)), float32 [T + 1]: few tokens a step at first (MD4, section 5).

    With the linear schedule these are the alphas of the cosine schedule on the uniform grid.
    """
    t = np.sin(0.5 * np.pi * np.arange(steps + 1) / steps)
    return t.astype(np.float32)
