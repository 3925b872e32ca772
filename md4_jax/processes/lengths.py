"""Capabilities of forward processes of variable-length texts; see capabilities.py."""

from typing import Any, Protocol, runtime_checkable

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Process, Schedule


@runtime_checkable
class Grows(Process, Protocol):
    """Texts of variable length, whose missing tokens are inserted in sampling."""

    schedule: Schedule

    @property
    def absent_id(self) -> int:
        """Symbol behind the end of a text."""

    @property
    def is_complete(self) -> bool:
        """Whether its schedules run from 1 to 0, so that a bound over t in [0, 1] is complete."""

    def log_missing(self, outputs: Array, t: Array) -> Array:
        """Returns the log of the expected number of missing tokens of each gap, [B, L + 1]."""

    def insert_probability(self, s: Array, t: Array) -> Array:
        """Returns P(a token is present at s | it is absent at t), s < t."""


@runtime_checkable
class InsertsMasks(Grows, Protocol):
    """A token is inserted as a mask, and later unmasked (`Insertion`)."""

    insertion: Schedule

    @property
    def mask_id(self) -> int: ...

    def noised(self, keys: Array, x: Array, t: Array, fixed: Array) -> Any:
        """Draws z_t and its alignment, `processes.insertion.Noised`; keeps `fixed` tokens."""

    def unmask_probability(self, s: Array, t: Array) -> Array:
        """Returns P(a token is clean at s | it is masked at t), s < t."""


@runtime_checkable
class InsertsTokens(Grows, Protocol):
    """A deleted token is inserted directly, not as a mask (`Deletion`)."""

    def delete(self, keys: Array, x: Array, t: Array, fixed: Array) -> Any:
        """Draws z_t and what is missing, `processes.deletion.Deleted`; keeps `fixed` tokens."""


@runtime_checkable
class EditsMasks(Grows, Protocol):
    """Masks are replaced or deleted, and tokens inserted (`Edits`)."""

    @property
    def mask_id(self) -> int: ...

    def edited(self, keys: Array, x: Array, t: Array, fixed: Array) -> Any:
        """Draws z_t and the remaining edits, `processes.edits.Edited`; keeps `fixed` tokens."""


@runtime_checkable
class ResizesMasks(RevealsMasks, Protocol):
    """Masks that become two masks, or none, by two symbols of the vocabulary."""

    @property
    def expand_id(self) -> int:
        """Symbol that is replaced by two masks."""

    @property
    def delete_id(self) -> int:
        """Symbol that is removed."""

    @property
    def absent_id(self) -> int:
        """Symbol behind the end of a text."""
