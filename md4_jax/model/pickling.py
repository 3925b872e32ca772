"""Refusal to pickle a model, which contains compiled programs and arrays on devices."""

import copy
from typing import Any

from md4_jax.protocols import UserError


class Unpickled:
    """Base of a class with an `origin`; its objects can be copied but not pickled."""

    origin: str

    def __copy__(self) -> Any:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises UserError when an object is pickled, also for transfer to another process."""
        raise UserError(
            "a Model cannot be pickled or sent to another process: call "
            f"md4_jax.load({self.origin!r}) there. To keep a model, write it with "
            "model.save('FOLDER'), which md4_jax.load('FOLDER') reads"
        )
