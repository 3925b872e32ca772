"""Causal attention along an order of each sequence, and its cache: docs/families/eso_lm.md."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from md4_jax.networks.attention import Form, attend_masked, attend_where
from md4_jax.networks.keys import for_queries
from md4_jax.networks.rotary import Rope, rotate
from md4_jax.protocols import Array, Ordered, UserError

# Options of a network that reads in an order, with their only allowed values.
FITTING = {
    "causal": False, "causal_context": False, "shifted": False, "local_width": 0, "tables": 0,
    "gaps": False, "positions": 0, "query_scaling": (),
}  # fmt: skip


def reads_in_order(o: Any) -> bool:
    """Returns whether a network with these options can read in an order."""
    return all(getattr(o, key) == fits for key, fits in FITTING.items())


class InOrder(NamedTuple):
    """Order of a text, which defines the attention mask; it is passed in place of segments.

    Without `round` the layer reads L positions; each sees itself and those before it in the order.
    With `round` it reads 2 L positions: L noisy symbols, then the clean text. A clean token sees
    itself and clean tokens before it. A noisy symbol sees the clean tokens of earlier rounds,
    itself, and the noisy symbols before it in its own round.

    rank      int32 [B, L], the rank of each position in the order
    round     int32 [B, L], or None
    segments  int32 [B, L]: a token sees only tokens of its own segment; None: one segment
    of_clean  int32 [B, L], the ranks of clean tokens; None: those of the noisy symbols
    """

    rank: Array
    round: Array | None = None
    segments: Array | None = None
    of_clean: Array | None = None

    def attend(
        self,
        query: Array,
        own: tuple[Array, Array],
        *,
        index: Array | None,
        kernel: str,
        rope: Rope,
    ) -> Array:
        """Attends from the positions index (None: all) to `own` keys and values.

        Queries and keys are given before rotation.
        """
        key, value = own
        length, count = self.rank.shape[1], key.shape[1]
        asked = jnp.arange(count)[None] if index is None else index
        place = asked % length
        query = rotate(query, jnp.broadcast_to(place, query.shape[:2]), length=length, rope=rope)
        places = jnp.broadcast_to(jnp.arange(count)[None] % length, key.shape[:2])
        key = rotate(key, places, length=length, rope=rope)
        key, value = (for_queries(x, query.shape[2]) for x in (key, value))
        asked = jnp.broadcast_to(asked, query.shape[:2])
        return attend_masked(query, key, value, self._seen(asked, count)[:, None], kernel)

    def _seen(self, asked_BxQ: Array, count: int) -> Array:
        """Returns which keys each query sees: bool [B, Q, count]."""
        length = self.rank.shape[1]

        def pair(x_BxL: Array, of_clean: Array | None = None) -> tuple[Array, Array]:
            halves = [x_BxL, x_BxL if of_clean is None else of_clean]
            known = jnp.concatenate(halves[: count // length], axis=1)
            asking = jnp.take_along_axis(known, asked_BxQ, axis=1)
            return asking[:, :, None], known[:, None]

        rank, of_key = pair(self.rank, self.of_clean)
        seen = rank >= of_key
        if self.round is not None:
            of_mask, mask_key = asked_BxQ[:, :, None] < length, jnp.arange(count) < length
            now, then = pair(self.round)
            among = seen & jnp.where(of_mask, now == then, False)
            seen = jnp.where(mask_key, among, jnp.where(of_mask, then < now, seen))
        if self.segments is not None:
            own, others = pair(self.segments)
            seen = seen & (own == others)
        return seen


class RankedCache(NamedTuple):
    """Keys, after rotation, and values of the tokens of texts that are read in an order.

    keys, values  [..., B, L, H, Dh], of one layer or of all, at the positions of the tokens
    known         bool [B, L], the positions whose token is cached
    place, rank   int32 [B, P], position and rank of the symbols that are being read
    keep          bool [B, P], which of these symbols to add to the cache
    group         int32 [B, P]: of these symbols one sees only those of its group and of group 0;
                  None: all of one group
    segments      int32 [B, L]: a symbol sees only tokens of its own segment; None: one segment
    """

    keys: Array
    values: Array
    known: Array
    place: Array
    rank: Array
    keep: Array
    segments: Array | None = None
    group: Array | None = None

    @property
    def first(self) -> Array:
        """Position of the first symbol, [B, 1], for a network whose symbols follow one another."""
        return self.place[:, :1]

    def attend(
        self,
        query: Array,
        own: tuple[Array, Array],
        segments: Array | None,
        *,
        kernel: str,
        rope: Rope,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Attends from P symbols to the cache, to themselves and to those before them.

        query [B, P, H, Dh]. Returns (result, own keys after rotation and values). The cache is not
        changed here, so that keys of a layer are not copied. The segments are those of the cache.
        """
        del segments
        length, heads = self.keys.shape[1], query.shape[2]
        query, key = (rotate(x, self.place, length=length, rope=rope) for x in (query, own[0]))
        before = self.rank[:, :, None] >= self.rank[:, None]
        if self.group is not None:
            own_group, group = self.group[:, :, None], self.group[:, None]
            before &= (group == 0) | (group == own_group)
        known = jnp.broadcast_to(self.known[:, None], (*self.place.shape, length))
        seen = jnp.concatenate([known, before], axis=2)
        if self.segments is not None:
            own_BxP = jnp.take_along_axis(self.segments, self.place, axis=1)
            of_keys = jnp.concatenate([self.segments, own_BxP], axis=1)
            seen &= own_BxP[:, :, None] == of_keys[:, None]
        keys, values = (
            for_queries(jnp.concatenate(x, axis=1), heads)
            for x in ((self.keys, key), (self.values, own[1]))
        )
        form = Form(rounded=kernel == "rounded")
        return attend_where(query, keys, values, seen[:, None], form), (key, own[1])

    def append(self, keys: Array, values: Array) -> "RankedCache":
        """Writes the symbols to keep, [..., B, P, H, Dh] of all layers, at their positions."""
        length = self.known.shape[1]
        rows = jnp.arange(len(self.known))[:, None]
        place = jnp.where(self.keep, self.place, length)  # out of bounds: dropped

        def put(old: Array, new: Array) -> Array:
            return old.at[:, rows, place].set(new.astype(old.dtype), mode="drop")

        known = self.known.at[rows, place].set(True, mode="drop")
        return self._replace(
            keys=put(self.keys, keys), values=put(self.values, values), known=known
        )


def ordered_functions(o: Any, module: Any, variables: Any, context: dict[str, Array]) -> Ordered:
    """Returns the functions of a module bound to its parameters and context.

    o       options of the network
    module  `TransformerModule`
    """
    label, keys, segments = (context.get(name) for name in ("label", "keys", "segments"))

    def read(z: Array, t: Array, seen: InOrder, index: Array | None) -> Array:
        if keys is not None and o.attention_dropout:
            raise UserError(
                f"network.attention_dropout={o.attention_dropout} must be 0 for a network that "
                "reads in an order"
            )
        return module.apply(variables, z, t, seen, label, keys, index, method="features")

    def features(z: Array, t: Array, rank: Array, index: Array | None = None) -> Array:
        return read(z, t, InOrder(rank, None, segments), index)

    def predictions(x: Array, t: Array, rank: Array, round: Array) -> Array:
        masks_Bx2L = jnp.concatenate([jnp.full_like(x, o.vocab_size), x], axis=1)
        index = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape)
        return read(masks_Bx2L, t, InOrder(rank, round, segments), index)

    def streams(
        z: Array, x: Array, t: Array, rank: Array, round: Array, index: Array | None = None
    ) -> Array:
        both_Bx2L = jnp.concatenate([z, x], axis=1)
        place = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape)
        return read(both_Bx2L, t, InOrder(rank, round, segments, place), index)

    def empty_cache(rows: int, length: int) -> RankedCache:
        empty = jnp.zeros((o.depth, rows, length, o.kv_heads, o.attention_size), o.dtype)
        none = jnp.zeros((rows, 0), jnp.int32)
        return RankedCache(empty, empty, jnp.zeros((rows, length), bool), none, none, none > 0)

    def append(
        z: Array, t: Array, place: Array, rank: Array, keep: Array, cache: RankedCache,
        group: Array | None = None,
    ) -> tuple[Array, RankedCache]:  # fmt: skip
        of_text = dict(segments=segments, group=group)
        asked = cache._replace(place=place, rank=rank, keep=keep, **of_text)
        run = partial(module.apply, variables, method="append_block")
        h, after = run(z, t, asked, label, None)
        none, plain = cache.place[:, :0], dict.fromkeys(of_text)
        return h, after._replace(place=none, rank=none, keep=none > 0, **plain)

    padding = None if segments is None else segments < 0
    return Ordered(features, predictions, empty_cache, append, padding, streams, cropped, o.shifted)


def cropped(cache: RankedCache, count: Array) -> RankedCache:
    """Returns the cache of only the first `count` [B] positions of each text."""
    within = jnp.arange(cache.known.shape[1]) < count[:, None]
    return cache._replace(known=cache.known & within)
