"""A data source: sums of two numbers, one a line."""

import dataclasses
from collections.abc import Iterator

import numpy as np

# First number of each split's seed, so that no split repeats another's draws.
SPLITS = {"train": 0, "validation": 1, "test": 2}


@dataclasses.dataclass(frozen=True)
class Sums:
    """Lines such as 12+7=19; each split has its own random numbers.

    A source has `documents(split)`, the texts of a split; `fingerprint()`, which changes when
    they do; and `warnings`, sentences for the user.
    """

    lines: int = 2000
    largest: int = 99
    seed: int = 0

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def fingerprint(self) -> str:
        """Names the content: the same arguments give the same texts."""
        return f"sums-{self.lines}-{self.largest}-{self.seed}"

    def documents(self, split: str) -> Iterator[str]:
        """One document with all lines of the split."""
        generator = np.random.default_rng([SPLITS[split], self.seed])
        pairs = generator.integers(0, self.largest + 1, (self.lines, 2))
        yield "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)
