"""Time grids t(0) = 0 < ... < t(T) = 1: docs/samplers.md."""

from collections.abc import Sequence

import numpy as np

from md4_jax.protocols import UserError


def uniform(steps: int) -> np.ndarray:
    """t(i) = i / T, float32 [T + 1]."""
    return (np.arange(steps + 1) / steps).astype(np.float32)


def cosine(steps: int) -> np.ndarray:
    """t(i) = cos(pi/2 (1 - i/T)), float32 [T + 1]: the first steps reveal few tokens (MD4, sec. 5).

    On this grid the linear schedule has the alphas of the cosine schedule on the uniform grid.
    With 6434 steps or more some times near 1 are equal in float32. They are moved apart.
    """
    t = np.sin(0.5 * np.pi * np.arange(steps + 1) / steps)
    # 2^-24 is the distance of float32 numbers just below 1.
    latest = 1.0 - np.arange(steps, -1, -1) * 2.0**-24
    return np.minimum(t, latest).astype(np.float32)


def log_linear(steps: int) -> np.ndarray:
    """t(0) = 0 and t(i) = 1000^(i/T - 1) for i >= 1, float32 [T + 1]: equal steps of log t."""
    t = 1e-3 ** (1.0 - np.arange(steps + 1) / steps)
    return np.where(np.arange(steps + 1) == 0, 0.0, t).astype(np.float32)


def listed(times: Sequence[float]) -> np.ndarray:
    """Reverses the given times: float32 [T + 1]. UserError unless they decrease from 1 to 0."""
    t = np.asarray(times, np.float32)
    if len(t) < 2 or t[0] != 1.0 or t[-1] != 0.0 or not (np.diff(t) < 0).all():
        raise UserError(
            "sample.grid as a list must fall strictly from 1.0 to 0.0, as in [1.0, 0.5, 0.0], "
            f"not {list(times)}"
        )
    return t[::-1].copy()
