"""Masking in which a mask may stand for several tokens, or for none: DreamOn.

docs/families/resizing.md
"""

import dataclasses

from md4_jax.processes.masking import Masking
from md4_jax.protocols import Array, UserError, pytree


@pytree()
@dataclasses.dataclass(frozen=True)
class Resizing(Masking):
    """Masking with two symbols that change the length of a text (DreamOn, arXiv:2602.01326).

    A mask for which `expand` is drawn becomes two masks; a mask for which `delete` is drawn is
    removed. Both are symbols of the vocabulary that do not occur as tokens of a gap. A text is
    padded at the end with the symbol V + 1. At a fixed length the process is `Masking`.

    expand, delete  ids of the two symbols. A negative id counts from the end of the vocabulary
    """

    expand: int = -2
    delete: int = -1

    def __post_init__(self):
        super().__post_init__()
        for key in ("expand", "delete"):
            number = getattr(self, key)
            if not -self.vocab_size <= number < self.vocab_size:
                raise UserError(
                    f"process.{key}={number} must be the id of one of the {self.vocab_size} "
                    "symbols of the vocabulary, or a negative number that counts from its end"
                )
        if self.expand_id == self.delete_id:
            raise UserError(
                f"process.expand={self.expand} and process.delete={self.delete} are the same "
                f"symbol of the vocabulary of {self.vocab_size}: they must be two different ones"
            )

    @property
    def expand_id(self) -> int:
        """Symbol that is replaced by two masks."""
        return self.expand % self.vocab_size

    @property
    def delete_id(self) -> int:
        """Symbol that is removed."""
        return self.delete % self.vocab_size

    @property
    def absent_id(self) -> int:
        """Symbol of the padding after the end of a text."""
        return self.vocab_size + 1

    def is_noise(self, z: Array) -> Array:
        """Returns whether each symbol is a mask or absent: bool like z."""
        return z >= self.mask_id
