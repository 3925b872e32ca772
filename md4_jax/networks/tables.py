"""Tables of counts: which token stood between these visible neighbours, in the text read so far.

A network learns slowly what counts know at once. Each table has a window of neighbours to the left
and right. Their symbols, with the mask as one, choose a row of the table, which holds how often
each token stood there. `mixture.py` weighs the tables and adds them to the logits of the network.
The tables are no parameters: counting needs no gradient, and touches only the rows in use.

A text that comes again, in a later epoch, is read through the counts of all other texts: what it
has itself been counted as is taken out before and put back after (leave one out). Else the network
would learn to trust tables that remember the text, and would do worse on any other.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.networks.dropout import folded
from md4_jax.protocols import Array, Batch, UserError
from md4_jax.runtime.sharding import BATCH_AXES, constrain

# Neighbours to the left and to the right of each table.
WINDOWS = (
    (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (0, 2),
    (0, 3), (0, 4), (0, 5), (0, 6), (1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2), (1, 4), (4, 1),
    (2, 4), (4, 2),
)  # fmt: skip
# Rows are as long as the vocabulary, so that it must be small.
LARGEST_VOCABULARY = 1024
# Hidden tokens after which the tables count no more, so that no count exceeds an int32.
MOST_COUNTED = 2**30
# What a row is given before it has counted anything, spread over all tokens.
PRIOR = 0.5
# Folded into the keys of sequences, which may also draw noise and dropout.
TABLES = 0x7461626C
MULTIPLIER = 0x9E3779B1


class Evidence(NamedTuple):
    """Estimates of the tables for some positions, and how much they rest on.

    log_ratios  log p_k(v) - log(1 / V), the estimate of table k against the uniform distribution:
                float32 [B, P, K, V]. Zero where the table has counted nothing
    counted     how often table k has seen these neighbours, float32 [B, P, K]
    """

    log_ratios: Array
    counted: Array

    def at(self, index: Array) -> "Evidence":
        """Returns the evidence of the positions index [B, P] alone."""
        log_ratios = jnp.take_along_axis(self.log_ratios, index[..., None, None], axis=1)
        return Evidence(log_ratios, jnp.take_along_axis(self.counted, index[..., None], axis=1))


@dataclasses.dataclass(frozen=True)
class Tables:
    """Tables of a vocabulary, which count beside a network; a state is {'counts', 'counted'}.

    vocab_size  V; the mask is V
    rows        most rows of a table, a power of two. Neighbours that have no more combinations have
                a row each; those of larger windows are hashed and may share one
    draws       pairs of masks that each sequence of a batch is given to count with
    """

    vocab_size: int
    rows: int
    draws: int

    def __post_init__(self):
        if self.rows < 2 or self.rows & (self.rows - 1):
            raise UserError(f"network.tables must be 0 or a power of two, not {self.rows}")
        if self.vocab_size > LARGEST_VOCABULARY:
            raise UserError(
                f"network.tables={self.rows} needs a vocabulary of at most {LARGEST_VOCABULARY} "
                f"symbols, since a row has a number for each; this one has {self.vocab_size}"
            )
        if self.draws < 1:
            raise UserError(f"network.tables_draws must be at least 1, not {self.draws}")

    @property
    def sizes(self) -> list[int]:
        """Rows of each table."""
        return [min(self.rows, self._combinations(*window)) for window in WINDOWS]

    def _combinations(self, left: int, right: int) -> int:
        """Returns how many different neighbours a window may have."""
        return (self.vocab_size + 2) ** (left + right)

    def init(self) -> dict[str, Array]:
        """Returns tables that have counted nothing: they change no logits."""
        counts = jnp.zeros((sum(self.sizes), self.vocab_size), jnp.int32)
        return {"counts": counts, "counted": jnp.zeros((), jnp.int32)}

    def addresses(
        self, z: Array, segments: Array | None = None, halves: Array | None = None
    ) -> Array:
        """Returns the row of each position in each table: int32 [K, B, L].

        Beyond the ends of the text, or of its segment, stands a symbol of its own.
        halves: int32 [B, L]; a position sees a mask in place of each neighbour of its own half.
        """
        outside = self.vocab_size + 1
        reach = max(max(window) for window in WINDOWS)
        found = {}
        for offset in range(-reach, reach + 1):
            symbol = _shifted(z, offset, outside)
            if halves is not None:
                symbol = jnp.where(_shifted(halves, offset, -1) == halves, self.vocab_size, symbol)
            if segments is not None:
                symbol = jnp.where(_shifted(segments, offset, -1) == segments, symbol, outside)
            found[offset] = symbol.astype(jnp.uint32)
        tables, firsts = [], itertools.accumulate(self.sizes, initial=0)
        for (left, right), first in zip(WINDOWS, firsts, strict=False):
            symbols = [found[n] for n in (*range(-left, 0), *range(1, right + 1))]
            numbered = self._combinations(left, right) <= self.rows
            row = self._number(symbols) if numbered else self._hash(symbols)
            tables.append(row.astype(jnp.int32) + first)
        return jnp.stack(tables)

    def _number(self, symbols: list[Array]) -> Array:
        base = self.vocab_size + 2
        return functools.reduce(lambda number, symbol: number * base + symbol, symbols)

    def _hash(self, symbols: list[Array]) -> Array:
        mixed = jnp.ones_like(symbols[0])
        for symbol in symbols:
            mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(MULTIPLIER) + symbol
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(MULTIPLIER)
        return mixed >> (33 - self.rows.bit_length())

    def evidence(
        self, state: Mapping[str, Array], z: Array, segments: Array | None = None
    ) -> Evidence:
        """Returns what the tables know of each position."""
        found = jnp.moveaxis(self.addresses(z, segments), 0, -1)
        counts = constrain(state["counts"][found], BATCH_AXES, None, None, None)
        counts = jnp.maximum(counts, 0)
        counted = jnp.sum(counts, axis=-1)
        shares = (counts + PRIOR / self.vocab_size) / (counted + PRIOR)[..., None]
        return Evidence(jnp.log(shares * self.vocab_size), counted.astype(jnp.float32))

    def bound(self, state: Mapping[str, Array]) -> Callable[[Array, Array | None], Evidence]:
        """Returns `evidence` of this state."""
        return functools.partial(self.evidence, state)

    def without(self, state: Mapping[str, Array], batch: Batch, keys: Array) -> dict[str, Array]:
        """Takes the sequences of a batch that were counted in an earlier epoch out of the tables.

        keys: those with which they were counted, [B]. If they were not, since that step was skipped
        or the tables were full, counts may become negative; `evidence` takes those as 0.
        """
        again = _again(batch)
        # The first epoch, with nothing to take out, pays nothing.
        taken = functools.partial(self._added, batch=batch, keys=keys, rows=again, times=-1)
        counts = jax.lax.cond(jnp.any(again), taken, lambda counts: counts, state["counts"])
        return {"counts": counts, "counted": state["counted"]}

    def learned(
        self, state: Mapping[str, Array], batch: Batch, keys: Array, good: Array
    ) -> dict[str, Array]:
        """Returns the tables `without` a batch with it counted.

        A new sequence is counted if the step was good and there is room; one of an earlier epoch is
        put back in any case. Its keys [B] must be those of then.
        """
        again = _again(batch)
        new = batch.loss_mask & ~again[:, None]
        more = jnp.sum(new, dtype=jnp.int32) * self.draws
        room = good & (state["counted"] <= MOST_COUNTED - more)
        counts = self._added(state["counts"], batch, keys, again | room, 1)
        # Every device holds all of them; else XLA would choose for itself how to split them.
        counts = constrain(counts, None, None)
        return {"counts": counts, "counted": state["counted"] + jnp.where(room, more, 0)}

    def _added(self, counts: Array, batch: Batch, keys: Array, rows: Array, times: int) -> Array:
        """Adds the sequences that rows [B] tells to the counts, so many times.

        A pair of masks hides each token once: in one of the two texts a share u of the tokens, in
        the other the rest, u ~ U(0, 1).
        """
        segments = batch.context.get("segments")
        once = (batch.loss_mask & rows[:, None]).astype(jnp.int32) * times
        for number in range(self.draws):
            halves = self._halves(batch, folded(keys, TABLES + number))
            at = self.addresses(batch.tokens, segments, halves)
            tokens, one = (jnp.broadcast_to(x, at.shape) for x in (batch.tokens, once))
            counts = counts.at[at, tokens].add(one)
        return counts

    def _halves(self, batch: Batch, keys: Array) -> Array:
        """Draws which text of a pair hides a token: 0 or 1, and 2 for one that does not count."""

        def drawn(key: Array) -> Array:
            u, each = jax.random.split(key)
            length = batch.tokens.shape[1]
            return jax.random.uniform(each, (length,)) < jax.random.uniform(u)

        return jnp.where(batch.loss_mask, jax.vmap(drawn)(keys).astype(jnp.int32), 2)


def _again(batch: Batch) -> Array:
    """Returns which sequences were in an earlier epoch, bool [B]."""
    return jnp.zeros(len(batch.tokens), bool) if batch.place is None else batch.place[:, 0] > 0


def _shifted(x: Array, offset: int, outside: int) -> Array:
    """Returns x[n + offset] at position n, and `outside` beyond the ends."""
    length = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (abs(offset), abs(offset))), constant_values=outside)
    return jax.lax.slice_in_dim(padded, abs(offset) + offset, abs(offset) + offset + length, axis=1)
