"""Tables of counts: which token stood between these neighbours, in the training text.

A network learns slowly what counts know at once. A table belongs to a set of neighbours, say the
two to the left and the one to the right of a token. It has a row for each combination of symbols
that these may have, and the row holds how often each token stood there. Before the first step of
training all tables count the training text, each token once (`training/counting.py`). A masked
token is looked up in those tables whose neighbours are visible. `mixture.py` weighs what they say
and adds it to the logits of the network.

In training a token is looked up without its own count (leave one out). Else the network would
learn to trust tables that remember the text, and would do worse on any other.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.networks.neighbours import OFFSETS, lookups, neighbour_sets
from md4_jax.protocols import Array, Batch, UserError
from md4_jax.runtime.sharding import BATCH_AXES, constrain

# Rows are as long as the vocabulary, so that it must be small.
LARGEST_VOCABULARY = 1024
# So that no count exceeds an int32.
MOST_TOKENS = 2**30
# A count of a hashed table takes two bytes and stops here: of 860 million such counts of text8's
# first 9 million letters 5 are larger.
LARGEST_HASHED = 2**16 - 1
# What a row is given before it has counted anything, spread over all tokens.
PRIOR = 0.5
# Name of the context of a batch that holds the tokens to look up without their own count.
COUNTED = "counted"
MULTIPLIER = 0x9E3779B1


class Evidence(NamedTuple):
    """Estimates of the tables for some positions, and how much they rest on.

    log_ratios  log p_k(v) - log(1 / V), the estimate of look-up k against the uniform distribution:
                float32 [B, P, K, V]. Zero where the table has counted nothing
    counts      how often v stood between these neighbours, float32 [B, P, K, V]
    """

    log_ratios: Array
    counts: Array

    @property
    def counted(self) -> Array:
        """Times that the table of look-up k has seen these neighbours, [B, P, K]."""
        return jnp.sum(self.counts, axis=-1)

    def at(self, index: Array) -> "Evidence":
        """Returns the evidence of the positions index [B, P] alone."""
        return Evidence(*(jnp.take_along_axis(x, index[..., None, None], axis=1) for x in self))


@dataclasses.dataclass(frozen=True)
class Tables:
    """Tables of a vocabulary, which count beside a network.

    A state is {'distinct', 'hashed', 'sequences'}: counts [rows, V] of the tables in which each
    combination has its own row, int32, and of the others, uint16; and of how many sequences they
    are, the first ones of the training data.

    vocab_size  V; the mask is V
    size        most counts of a table, V in each row. Neighbours that have no more combinations
                than rows have a row each; those of larger sets are hashed and may share one
    tokens      most tokens of the training text that are counted
    """

    vocab_size: int
    size: int
    tokens: int

    def __post_init__(self):
        if self.vocab_size > LARGEST_VOCABULARY:
            raise UserError(
                f"network.tables={self.size} needs a vocabulary of at most {LARGEST_VOCABULARY} "
                f"symbols, since a row has a count for each; this one has {self.vocab_size}: set "
                "network.tables=0"
            )
        if self.size < self.vocab_size:
            raise UserError(
                f"network.tables={self.size} must be 0 or at least the vocabulary's size, "
                f"{self.vocab_size}, so that a table has a row"
            )
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise UserError(
                f"network.tables_tokens must lie between 1 and {MOST_TOKENS}, not {self.tokens}"
            )

    @property
    def rows(self) -> int:
        """Most rows of a table."""
        return self.size // self.vocab_size

    def _combinations(self, chosen: int) -> int:
        """Returns how many different symbols a set of neighbours may have."""
        return (self.vocab_size + 1) ** chosen.bit_count()

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Rows of each table."""
        return [min(self.rows, self._combinations(chosen)) for chosen in neighbour_sets()]

    @functools.cached_property
    def _numbered(self) -> int:
        """Number of the tables in which each combination has its own row; they come first."""
        return sum(self._combinations(chosen) <= self.rows for chosen in neighbour_sets())

    @functools.cached_property
    def _factors(self) -> np.ndarray:
        """Factors of the neighbours' symbols in the number of a combination: uint32 [S, 12].

        They are the powers of V + 1, or odd random numbers in a table that is hashed.
        """
        random = np.random.default_rng(0)
        factors = np.zeros((len(self.sizes), len(OFFSETS)), np.uint32)
        for table, chosen in enumerate(neighbour_sets()):
            bits = [j for j in range(len(OFFSETS)) if chosen >> j & 1]
            powers = (self.vocab_size + 1) ** np.arange(len(bits))
            odd = 2 * random.integers(2**31, size=len(bits)) + 1
            factors[table, bits] = powers if table < self._numbered else odd
        return factors

    def init(self) -> dict[str, Array]:
        """Returns tables that have counted nothing: they change no logits."""
        # Where no table is hashed one row is kept all the same: none cannot be looked up.
        hashed = max(1, sum(self.sizes) - self._distinct_rows)
        return {
            "distinct": jnp.zeros((self._distinct_rows, self.vocab_size), jnp.int32),
            "hashed": jnp.zeros((hashed, self.vocab_size), jnp.uint16),
            "sequences": jnp.zeros((), jnp.int32),
        }

    @property
    def _distinct_rows(self) -> int:
        """Rows of the tables that are not hashed; they come first."""
        return sum(self.sizes[: self._numbered])

    def counts(self, state: Mapping[str, Array], rows: Array) -> Array:
        """Returns the counts in these rows of all tables together, int32 [..., V]."""
        beyond = rows - self._distinct_rows
        distinct = state["distinct"][jnp.minimum(rows, self._distinct_rows - 1)]
        hashed = state["hashed"][jnp.maximum(beyond, 0)].astype(jnp.int32)
        return jnp.where((beyond < 0)[..., None], distinct, hashed)

    def _neighbours(self, z: Array, segments: Array | None) -> Array:
        """Returns the neighbours of each position, [B, L, 12].

        Beyond the ends of the text, or of its segment, stands V; -1 stands for a mask.
        """
        found = []
        for offset in OFFSETS:
            symbol = jnp.where(z == self.vocab_size, -1, z)
            symbol = _shifted(symbol, offset, self.vocab_size)
            if segments is not None:
                same = _shifted(segments, offset, -1) == segments
                symbol = jnp.where(same, symbol, self.vocab_size)
            found.append(symbol)
        return jnp.stack(found, axis=-1)

    def _rows(self, numbers: Array, tables: Array) -> Array:
        """Turns numbers of combinations into rows of all tables together."""
        firsts = jnp.asarray(np.cumsum([0, *self.sizes[:-1]]), jnp.int32)
        mixed = (numbers ^ (numbers >> 16)) * jnp.uint32(MULTIPLIER)
        hashed = (mixed ^ (mixed >> 16)) % jnp.uint32(self.rows)
        row = jnp.where(tables < self._numbered, numbers, hashed)
        return row.astype(jnp.int32) + firsts[tables]

    def looked_up(self, z: Array, segments: Array | None = None) -> Array:
        """Returns the rows in which to look up each position: int32 [B, L, K]."""
        symbols = self._neighbours(z, segments)
        bits = jnp.asarray(1 << np.arange(len(OFFSETS)))
        tables = jnp.asarray(lookups())[jnp.sum((symbols >= 0) * bits, axis=-1)]
        # A mask is in none of these tables' sets: its factor is 0.
        terms = jnp.asarray(self._factors)[tables] * symbols[..., None, :].astype(jnp.uint32)
        return self._rows(jnp.sum(terms, axis=-1, dtype=jnp.uint32), tables)

    def counted_in(self, tokens: Array, segments: Array | None = None) -> Array:
        """Returns the row of each table in which each position counts: int32 [S, B, L]."""
        symbols = self._neighbours(tokens, segments).astype(jnp.uint32)
        factors = jnp.asarray(self._factors)[:, None, None]
        # A loop: the array [S, B, L, 12] would be large.
        numbers = sum(factors[..., j] * symbols[..., j] for j in range(len(OFFSETS)))
        return self._rows(numbers, jnp.arange(len(self.sizes))[:, None, None])

    def evidence(
        self,
        state: Mapping[str, Array],
        z: Array,
        segments: Array | None = None,
        own: Array | None = None,
    ) -> Evidence:
        """Returns what the tables know of each position.

        own: tokens [B, L] whose own count is taken away, -1 where none is.
        """
        found = self.looked_up(z, segments)
        counts = constrain(self.counts(state, found), BATCH_AXES, None, None, None)
        if own is not None:
            counts = counts - jax.nn.one_hot(own, self.vocab_size, dtype=jnp.int32)[:, :, None]
        counted = jnp.sum(counts, axis=-1)
        shares = (counts + PRIOR / self.vocab_size) / (counted + PRIOR)[..., None]
        return Evidence(jnp.log(shares * self.vocab_size), counts.astype(jnp.float32))

    def bound(self, state: Mapping[str, Array]) -> Callable[..., Evidence]:
        """Returns `evidence` of this state."""
        return functools.partial(self.evidence, state)

    def announced(self, state: Mapping[str, Array], batch: Batch) -> Batch:
        """Returns a batch of training whose context tells which tokens have been counted."""
        if batch.number is None:
            return batch
        counted = batch.loss_mask & (batch.number < state["sequences"])[:, None]
        own = jnp.where(counted, batch.tokens, -1)
        return batch._replace(context={**batch.context, COUNTED: own})

    def learned(self, state: Mapping[str, Array], batch: Batch) -> dict[str, Array]:
        """Returns the tables with the tokens of a batch counted; `sequences` stays."""
        at = self.counted_in(batch.tokens, batch.context.get("segments"))
        tokens, counts = (jnp.broadcast_to(x, at.shape) for x in (batch.tokens, batch.loss_mask))
        first, beyond = self._numbered, at - self._distinct_rows
        one = counts[:first].astype(jnp.int32)
        distinct = state["distinct"].at[at[:first], tokens[:first]].add(one)
        # What does not count has no place in the table.
        places = jnp.where(counts, beyond, len(state["hashed"]))[first:], tokens[first:]
        hashed = state["hashed"].at[places].apply(_one_more, mode="drop")
        # Every device holds all of them; else XLA would choose for itself how to split them.
        found = {"distinct": distinct, "hashed": hashed}
        return {**state, **{name: constrain(x, None, None) for name, x in found.items()}}


def _one_more(count: Array) -> Array:
    """Returns count + 1, or a count of two bytes that can grow no more."""
    return jnp.where(count < LARGEST_HASHED, count + 1, count)


def _shifted(x: Array, offset: int, outside: int) -> Array:
    """Returns x[n + offset] at position n, and `outside` beyond the ends."""
    length = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (abs(offset), abs(offset))), constant_values=outside)
    return jax.lax.slice_in_dim(padded, abs(offset) + offset, abs(offset) + offset + length, axis=1)
