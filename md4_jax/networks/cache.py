"""Protocol of a cache of keys and values, as a layer calls it."""

from typing import Any, Protocol

from md4_jax.networks.rotary import Rope
from md4_jax.protocols import Array


class Cache(Protocol):
    """Keys and values of tokens that were read before, of one layer or of all.

    keys, values  [..., B, L, H, Dh]
    """

    keys: Array
    values: Array

    @property
    def first(self) -> Array:
        """Position in its text of the first token that is read, [] or [B, 1]."""

    def attend(
        self,
        query: Array,
        own: tuple[Array, Array],
        segments: Array | None,
        *,
        kernel: str,
        rope: Rope,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Attends from tokens [B, P, H, Dh] to the cache of one layer and to `own` keys and values.

        Queries and keys are given before rotation. Returns (result, keys and values to append). The
        cache is not changed here, so that keys of a layer are not copied.
        """

    def append(self, keys: Array, values: Array, **more: Any) -> "Cache":
        """Returns the cache with these keys and values, of all layers."""


def layers_of(cache: Cache) -> dict[str, Array]:
    """Returns the arrays of a cache that have an entry for each layer, by name."""
    found = {name: getattr(cache, name, None) for name in ("keys", "values", "near")}
    return {name: array for name, array in found.items() if array is not None}
