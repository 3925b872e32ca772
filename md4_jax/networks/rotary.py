"""Rotary position embeddings, and position-dependent scaling of queries."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from md4_jax.protocols import Array, UserError

# Position p rotates pair i of features by p / BASE^(2 i / Dh).
BASE = 10_000.0
# How pairs between those that are slowed down and those that are unchanged are interpolated.
RAMPS = ("turns", "pairs")
# Types to which cosines and sines may be rounded.
ROUNDED = ("float32", "bfloat16")


class Rope(NamedTuple):
    """Angles by which positions rotate pairs of features.

    base     position p rotates pair i of a head by p / base^(2 i / Dh)
    scaling  () or (factor, low, high, length): pairs with fewer than `low` rotations in `length`
             positions become `factor` times slower, those with more than `high` are unchanged, and
             those between are interpolated
    part     fraction of a head's features, the first ones, that are rotated; 0: none
    ramp     interpolation: linear in the number of rotations (Llama 3.1, arXiv:2407.21783), or in
             the index of the pair between two integers (YaRN, arXiv:2309.00071, as in the
             transformers library)
    gain     factor of the rotated features, of queries and of keys (YaRN)
    pairs    fraction of the pairs of these features, the first ones, that are rotated (Gemma's
             proportional positions)
    type     type to which cosines and sines are rounded
    half     whether angles are rounded to float16, as in files of ESM-2
    """

    base: float = BASE
    scaling: tuple[float, ...] = ()
    part: float = 1.0
    ramp: str = "turns"
    gain: float = 1.0
    pairs: float = 1.0
    type: str = "float32"
    half: bool = False

    def frequency(self, size: int) -> np.ndarray:
        """Returns the angle per position of each pair of `size` features: [size / 2]."""
        plain = self.base ** (-np.arange(0, size, 2) / size)
        if self.half:
            plain = plain.astype(np.float16).astype(np.float64)
        plain = np.where(np.arange(size // 2) < int(self.pairs * (size // 2)), plain, 0.0)
        if not self.scaling:
            return plain
        factor, low, high, length = self.scaling
        if self.ramp == "pairs":
            kept = self._kept_pairs(size)
        else:
            rotations = length * plain / (2 * math.pi)
            kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
        return plain * (kept + (1.0 - kept) / factor)

    def _kept_pairs(self, size: int) -> np.ndarray:
        """Returns YaRN's weight of each pair's unscaled frequency: [size / 2].

        It falls from 1 at the last pair with at least `high` rotations in `length` positions to 0
        at the first one with at most `low` rotations.
        """
        _, low, high, length = self.scaling

        def pair(rotations: float) -> float:
            return size * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(self.base))

        first, last = max(math.floor(pair(high)), 0), min(math.ceil(pair(low)), size - 1)
        # A single step, if the ramp has no width.
        width = last - first or 0.001
        return 1.0 - np.clip((np.arange(size // 2) - first) / width, 0.0, 1.0)


@functools.lru_cache(maxsize=8)
def _angles(sides: tuple[int, ...], size: int, rope: Rope) -> np.ndarray:
    """Computes cos and sin of position times frequency in float64: float32 [2, L, Dh / 2].

    Positions are those of a grid with these sides, row by row; each axis has an equal part of Dh.
    """
    each = size // len(sides)
    frequency = rope.frequency(each)
    places = np.unravel_index(np.arange(math.prod(sides)), sides)
    angle = np.concatenate([place[:, None] * frequency for place in places], axis=1)
    waves = rope.gain * np.stack([np.cos(angle), np.sin(angle)])
    return waves.astype(np.float32).astype(jnp.dtype(rope.type)).astype(np.float32)


ROPE = Rope()


def rotate(
    x_BxLxHxDh: Array,
    index: Array | None = None,
    *,
    length: int = 0,
    rope: Rope = ROPE,
    grid: tuple[int, ...] = (),
) -> Array:
    """Applies rotary position embeddings (arXiv:2104.09864) to the two halves, in float32.

    rope   base and scaling of the angles
    index  int32 [B, P], the positions, all below `length`; None: 0, 1, ...
    grid   (rows, columns) of two-dimensional positions, numbered row by row; (): one dimension
    """
    if not rope.part:
        return x_BxLxHxDh
    sides = grid or (length or x_BxLxHxDh.shape[1],)
    size = int(rope.part * x_BxLxHxDh.shape[-1])
    angles = _angles(sides, size, rope)
    cos, sin = angles if index is None else jnp.asarray(angles)[:, index]
    cos, sin = (x[..., :, None, :] for x in (cos, sin))
    left, right = jnp.split(x_BxLxHxDh[..., :size].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    rotated = rotated.astype(x_BxLxHxDh.dtype)
    if size == x_BxLxHxDh.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x_BxLxHxDh[..., size:]], axis=-1)


def rotate_at(x_BxLxHxDh: Array, places: Array, rope: Rope) -> Array:
    """Applies rotary position embeddings at arbitrary positions, int32 [B or 1, L], in float32.

    It is `rotate` for unbounded positions. Angles are rounded to float32.
    """
    angles = places[..., None] * rope.frequency(x_BxLxHxDh.shape[-1]).astype(np.float32)
    cos, sin = (f(angles)[:, :, None] for f in (jnp.cos, jnp.sin))
    left, right = jnp.split(x_BxLxHxDh.astype(jnp.float32), 2, axis=-1)
    found = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return found.astype(x_BxLxHxDh.dtype)


def scaled_queries(query_BxPxHxDh: Array, places: Array, scaling: tuple[float, float]) -> Array:
    """Multiplies queries at position p by 1 + beta log(1 + floor(p / length)) (Llama 4).

    places   int32 [P] or [B, P], positions of the queries in their texts
    scaling  (beta, length)
    """
    beta, length = scaling
    factor = 1.0 + beta * jnp.log1p(jnp.floor(places.astype(jnp.float32) / length))
    return query_BxPxHxDh * factor[..., None, None].astype(query_BxPxHxDh.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Positions:
    """Options of a network for positions in attention.

    rotary_base     position p rotates pair i of a head's features by p / base^(2 i / Dh)
    rotary_scaling  (factor, low, high, length) of `Rope`, as in Llama 3.1; (): none
    rotary_part     fraction of a head's features that are rotated
    rotary_ramp     turns (Llama 3.1) or pairs (YaRN): interpolation between pairs; see `Rope`
    rotary_gain     factor of rotated features (YaRN)
    rotary_type     type to which cosines and sines are rounded: float32, or bfloat16, as in the
                    code of TinyLlama and SMDM (arXiv:2410.18514)
    query_scaling   (beta, length) of `scaled_queries`, as in Llama 4; (): none
    """

    rotary_base: float = BASE
    rotary_scaling: tuple[float, ...] = ()
    rotary_part: float = 1.0
    rotary_ramp: str = "turns"
    rotary_gain: float = 1.0
    rotary_type: str = "float32"
    query_scaling: tuple[float, ...] = ()

    @property
    def rope(self) -> Rope:
        """Angles of the rotary positions."""
        return Rope(
            self.rotary_base, tuple(self.rotary_scaling), self.rotary_part, self.rotary_ramp,
            self.rotary_gain, type=self.rotary_type,
        )  # fmt: skip


def check_rotary(o: Any) -> None:
    """Raises UserError for options of positions that are out of range or do not fit the heads."""
    if o.rotary_gain <= 0:
        raise UserError(f"network.rotary_gain={o.rotary_gain} must be above 0")
    if o.rotary_ramp == "pairs" and o.rotary_base <= 1:
        raise UserError(
            f"network.rotary_ramp='pairs' needs network.rotary_base above 1, not {o.rotary_base}"
        )
    if o.query_scaling and not (len(o.query_scaling) == 2 and min(o.query_scaling) > 0):
        raise UserError(
            f"network.query_scaling={o.query_scaling} must be empty, or (beta, length) above 0"
        )
    if o.rotary_base <= 0:
        raise UserError(f"network.rotary_base={o.rotary_base} must be above 0")
    numbers = o.rotary_scaling
    if numbers and not (len(numbers) == 4 and min(numbers) > 0 and numbers[1] < numbers[2]):
        raise UserError(
            f"network.rotary_scaling={numbers} must be empty, or (factor, low, high, length) above "
            "0 with low < high"
        )
    turned = o.rotary_part * o.attention_size
    if not 0 < o.rotary_part <= 1 or (turned % 2 and not o.positions):
        raise UserError(
            f"network.rotary_part={o.rotary_part} must lie in (0, 1], and that part of the "
            f"{o.attention_size} features of a head, {turned:g}, must be an even number"
        )
