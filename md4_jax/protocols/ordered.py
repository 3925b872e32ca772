"""Functions of networks that read texts in an order of their own."""

from collections.abc import Callable
from typing import Any, NamedTuple

from md4_jax.protocols.batch import Array


def on_signal(
    function: Callable | None, signal: Callable, read: Callable = lambda z: z
) -> Callable | None:
    """Returns (z, t, ...) -> function(read(z), signal(t), ...); None for None."""
    return function and (lambda z, t, *rest: function(read(z), signal(t), *rest))


class Ordered(NamedTuple):
    """Functions of a denoiser that reads each sequence in an order of its own (Eso-LM, WeDLM).

    rank int32 [B, L] is the rank of each position in the order; positional information is that of
    the text. The network is time-free.

    features     (z, t, rank, index [B, P] or None) -> h [B, P, D]: a position sees itself and those
                 before it in the order
    predictions  (x, t, rank, round [B, L]) -> h [B, L, D]: each position as a mask that sees the
                 tokens of x from earlier rounds, and the preceding masks of its own round
    empty_cache  (rows, length) -> a key-value cache of texts of this length
                 (this, `append` and `crop`: None without a cache)
    append       (z [B, P], t, place [B, P], rank [B, P], keep [B, P], cache) -> (h [B, P, D],
                 cache): symbols at these positions see the cache, themselves and preceding ones
                 of z. The symbols to keep are then added to the cache.
                 group=int32 [B, P]: of those of z they see only their own group and group 0
    crop         (cache, count [B]) -> the cache of only the first `count` positions of each text
    padding      bool [B, L], positions that only padding sees; None: there are none
    streams      (z, x, t, rank, round [B, L], index [B, P] or None) -> h [B, P, D]: the symbols of
                 z, then the tokens of x, in one pass. A symbol of z sees the tokens of x from
                 earlier rounds, itself, and symbols of z before it in its own round. A token of x
                 sees itself and those to its left. index: positions in [z, x], below 2 L. None for
                 guided denoisers, which only sample
    shifted      whether a mask is predicted from the features of the symbol before it
    """

    features: Callable[[Array, Array, Array, Array | None], Array]
    predictions: Callable[[Array, Array, Array, Array], Array]
    empty_cache: Callable[[int, int], Any] | None
    append: Callable[..., tuple[Array, Any]] | None
    padding: Array | None = None
    streams: Callable[..., Array] | None = None
    crop: Callable[[Any, Array], Any] | None = None
    shifted: bool = False

    def with_signal(self, signal: Callable[[Array], Array]) -> "Ordered":
        """Returns the same functions, whose network gets signal(t) as its time input."""
        names = ("features", "predictions", "append")
        others = {name: on_signal(getattr(self, name), signal) for name in names}

        def streams(z: Array, x: Array, t: Array, *rest: Array | None) -> Array:
            return self.streams(z, x, signal(t), *rest)

        return self._replace(**others, streams=self.streams and streams)
