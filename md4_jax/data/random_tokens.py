"""Domain without data, for timing and planning."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class RandomTokens:
    """Domain of sequences of random symbols.

    image  whether a sequence is a square image with 3 channels or 1, if its length allows it.
           Networks of images need it
    """

    vocab_size: int
    length: int = 0
    image: bool = False
    eot_id: int = 0
    unit: str = "token"

    @property
    def shape(self) -> tuple[int, ...]:
        for channels in (3, 1) if self.image else ():
            side = math.isqrt(self.length // channels)
            if self.length and side * side * channels == self.length:
                return (side, side, channels)
        return (self.length,)
