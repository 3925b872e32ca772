"""Rotary position embeddings."""

import functools
import math

import jax.numpy as jnp
import numpy as np

from md4_jax.protocols import Array

# Position p turns by p / BASE^(2 i / Dh).
BASE = 10_000.0


@functools.lru_cache(maxsize=8)
def _angles(sides: tuple[int, ...], size: int, base: float) -> np.ndarray:
    """Computes cos and sin of position times frequency in float64: float32 [2, L, Dh / 2].

    Positions are those of a grid with these sides, row by row; each side has an equal part of Dh.
    """
    each = size // len(sides)
    frequency = base ** (-np.arange(0, each, 2) / each)
    places = np.unravel_index(np.arange(math.prod(sides)), sides)
    angle = np.concatenate([place[:, None] * frequency for place in places], axis=1)
    return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)


def rotate(
    x_BxLxHxDh: Array,
    index: Array | None = None,
    *,
    length: int = 0,
    base: float = BASE,
    grid: tuple[int, ...] = (),
) -> Array:
    """Applies rotary position embeddings (arXiv:2104.09864) to the two halves, in float32.

    index  int32 [B, P], the positions, all below `length`, if they are not 0, 1, ...
    grid   (rows, columns) of positions that are numbered row by row; (): a line
    """
    sides = grid or (length or x_BxLxHxDh.shape[1],)
    angles = _angles(sides, x_BxLxHxDh.shape[-1], base)
    cos, sin = angles if index is None else jnp.asarray(angles)[:, index]
    cos, sin = (x[..., :, None, :] for x in (cos, sin))
    left, right = jnp.split(x_BxLxHxDh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return rotated.astype(x_BxLxHxDh.dtype)
