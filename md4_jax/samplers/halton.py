"""Halton-MaskGIT's sampler (arXiv:2503.17076): masks of an image, spread evenly over it."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.chain import NEVER, Chain, RevealSchedule
from md4_jax.samplers.orders import InOrder, ranked
from md4_jax.samplers.transforms import Transform

# 1 - 2^-22: see `shares`.
BELOW = 1.0 - 2.0**-22


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class Halton(InOrder):
    """Reveals the masks of an image in the order of a Halton sequence, more in each later step.

    Point i of the sequence is (the digits of i in base 2 mirrored at the point, those in base 3), a
    row and a column. After a step to time s, floor((2 / pi) arcsin(1 - s) n) of n masks are drawn,
    but at least one in each step.

    shape       height, width and channels of the images, from the data; (): a single row
    sharpened   factor of the logits in the last step. It rises, or falls, linearly from 1 in the
                first; `temperature` is applied too
    sharpened_power  power to which the factor of each step is raised, that of the last one too
    warmup_steps     number of first steps in which the factor is halved
    randomised  starts each sample at a random place of the order, which then continues at its begin
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    level: ClassVar[None] = None

    shape: tuple[int, ...] = ()
    sharpened: float = 1.0
    randomised: bool = False
    sharpened_power: float = 1.0
    warmup_steps: int = 0
    transform: Transform = Transform()

    def __post_init__(self):
        if self.shape and len(self.shape) != 3:
            raise UserError(
                "sample.name=halton spreads the masks of an image over its rows and columns, but a "
                f"sequence of these data has the shape {self.shape}: use "
                "sample.name=confidence or any_order"
            )
        if self.sharpened <= 0:
            raise UserError(f"sample.sharpened must be above 0, not {self.sharpened}")
        if self.warmup_steps < 0:
            raise UserError(f"sample.warmup_steps must not be negative, not {self.warmup_steps}")
        if self.sharpened_power != 1 and self.sharpened == 1:
            raise UserError(
                f"sample.sharpened_power={self.sharpened_power} has no effect with "
                "sample.sharpened=1: set sample.sharpened too"
            )

    @property
    def is_sharpened(self) -> bool:
        """Whether logits are multiplied by a factor that depends on the step."""
        return self.sharpened != 1 or self.warmup_steps > 0

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        """Takes one step; UserError if it depends on the number of steps or on earlier draws."""
        if self.is_sharpened or self.randomised:
            raise UserError(
                "sample.name=halton draws all steps at once, which is impossible with a reward or "
                "with noise other than masks: set sample.sharpened=1, sample.warmup_steps=0 and "
                "sample.randomised=False"
            )
        return super().__call__(denoiser, process, chain, s, t, keys)

    def schedule(
        self, process: RevealsMasks, chain: Chain, grid: Array | np.ndarray, keys: Array
    ) -> RevealSchedule:
        """Returns the step of each mask, after drawing where the order starts."""
        length, chosen = chain.z.shape[1], process.is_noise(chain.z)
        here = jnp.broadcast_to(self._order(length), chain.z.shape)
        if self.randomised:
            start_B = jax.vmap(lambda key: jax.random.randint(key, (), 0, length))(keys)
            here = (here + start_B[:, None]) % length
        rank, times = ranked(here, chosen), jnp.asarray(grid)[::-1]
        masks, free = jnp.sum(chosen, axis=1), jnp.sum(~chain.prompt_mask, axis=1)
        drawn_BxT = jnp.floor(shares(grid) * free[:, None].astype(jnp.float32)).astype(jnp.int32)
        each = 1 + jnp.arange(drawn_BxT.shape[1])
        drawn_BxT = jnp.maximum(drawn_BxT - (free - masks)[:, None], each)
        step = jnp.sum(drawn_BxT[:, None] <= rank[..., None], axis=2, dtype=jnp.int32)
        reached = chosen & (step < drawn_BxT.shape[1])
        time = times[jnp.minimum(step, len(times) - 2)]
        factor = jnp.linspace(1.0, self.sharpened, len(times) - 1) ** self.sharpened_power
        factor = jnp.where(jnp.arange(len(factor)) < self.warmup_steps, 0.5 * factor, factor)
        factor = factor[jnp.minimum(step, len(factor) - 1)]
        return RevealSchedule(jnp.where(reached, step, NEVER), time, factor=factor)

    def rounds(self, length: int, steps: int) -> int:
        """Returns the number of steps of the grid."""
        return steps

    def per_round(self, length: int) -> int:
        """Returns the number of all positions."""
        return length

    def _order(self, length: int) -> np.ndarray:
        """Returns the place of each position in the order: int32 [L]."""
        rows, columns, channels = self.shape or (1, length, 1)
        if length != rows * columns * channels:
            raise UserError(
                f"sample.name=halton draws whole images of {rows * columns * channels} symbols, "
                f"not {length} at once: set sample.block=0 and sample.length=0"
            )
        place = np.argsort(halton_order(rows, columns))
        return (place[:, None] * channels + np.arange(channels)).ravel().astype(np.int32)


def shares(grid: Array | np.ndarray) -> Array:
    """Returns the fraction of masks that is drawn after each step of an ascending grid: [T].

    The published code rounds (2 / pi) arcsin(1/2) down, to less than 1/3. So does the factor.
    """
    until = jnp.asarray(grid, jnp.float32)[::-1][1:]
    share = 1.0 - jnp.arccos(1.0 - until) / (0.5 * math.pi)
    return jnp.where(until <= 0.0, 1.0, BELOW * share)


@functools.cache
def halton_order(rows: int, columns: int) -> np.ndarray:
    """Returns the positions of a grid in the order of the Halton sequence: int [rows columns]."""
    found: dict[int, None] = {}
    number = 1
    while len(found) < rows * columns:
        row, column = (_mirrored(number, base, size) for base, size in ((2, rows), (3, columns)))
        found.setdefault(row * columns + column)
        number += 1
    return np.array(list(found))


def _mirrored(number: int, base: int, size: int) -> int:
    """Returns floor(size x), where x has the digits of the number after the point, mirrored."""
    mirrored, scale = 0, 1
    while number:
        number, digit = divmod(number, base)
        mirrored, scale = mirrored * base + digit, scale * base
    return size * mirrored // scale
