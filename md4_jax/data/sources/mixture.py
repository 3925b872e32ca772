"""Several sources of text as one."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from md4_jax.data.sources.splits import digest
from md4_jax.protocols import UserError


class Part(NamedTuple):
    """Source of a mixture, and its share of the training sequences."""

    source: Any
    weight: float


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Documents of several sources, by name; data/mixtures.py makes sequences from them.

    parts  {name: section of a text source}, each with a `weight` (default 1). A part's share of the
           training sequences is weight / (sum of the weights)

    Raises UserError without parts, for a weight that is not above 0, and for a part that is not
    text or has labels.
    """

    parts: Mapping[str, Part]

    def __post_init__(self):
        if not self.parts:
            raise UserError("data.parts is empty: give --config.data.parts.NAME.name=text, ...")
        for name, (source, weight) in self.parts.items():
            key = f"data.parts.{name}"
            if weight <= 0:
                raise UserError(
                    f"{key}.weight={weight} must be above 0. To leave the part out, remove it"
                )
            if isinstance(source, Mixture) or not hasattr(source, "documents"):
                raise UserError(f"{key} is not a source of text: a mixture holds only text")
            if getattr(source, "label_key", ""):
                raise UserError(
                    f"{key}.label_key={source.label_key!r}: texts with classes cannot be part of "
                    "a mixture"
                )
            if getattr(source, "rejected_key", ""):
                raise UserError(
                    f"{key}.rejected_key={source.rejected_key!r}: rejected answers cannot be used "
                    "in a mixture. Use this source alone"
                )

    @property
    def shares(self) -> dict[str, float]:
        """Returns the share of each part; they sum to 1."""
        total = sum(part.weight for part in self.parts.values())
        return {name: part.weight / total for name, part in self.parts.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Returns the warnings of all parts."""
        return tuple(said for part in self.parts.values() for said in part.source.warnings)

    def fingerprint(self) -> str:
        """Returns a hash of the parts and their shares."""
        hashes = [[name, part.source.fingerprint()] for name, part in self.parts.items()]
        return digest("mixture", hashes, self.shares)

    def documents(self, split: str) -> Iterator[str]:
        """Yields the documents of one part after another."""
        for part in self.parts.values():
            yield from part.source.documents(split)
