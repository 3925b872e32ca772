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
from jax.sharding import PartitionSpec as P

from md4_jax.networks import codes
from md4_jax.networks.neighbours import OFFSETS, REACH, lookups, neighbour_sets
from md4_jax.protocols import Array, Batch, UserError
from md4_jax.runtime.sharding import BATCH_AXES, constrain, on_one_device

# Rows are as long as the vocabulary, so that it must be small.
LARGEST_VOCABULARY = 1024
# So that every count has a code.
MOST_TOKENS = codes.LARGEST
# So that an int32 can be the number of a row.
MOST_ROWS = 2**31 - 1
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

    A state is {'counts', 'sequences'}: the rows of all tables, one table after another, uint8
    [rows, V] in the codes of `codes.py`; and of how many sequences they are, the first ones of the
    training data.

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
        if sum(self.sizes) > MOST_ROWS:
            raise UserError(
                f"network.tables={self.size} makes {sum(self.sizes):,} rows of all tables, "
                f"more than {MOST_ROWS:,}: lower it"
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
        return {
            "counts": jnp.zeros((sum(self.sizes), self.vocab_size), jnp.uint8),
            "sequences": jnp.zeros((), jnp.int32),
        }

    @functools.cached_property
    def _firsts(self) -> np.ndarray:
        """First row of each table among those of all tables."""
        return np.cumsum([0, *self.sizes[:-1]], dtype=np.int32)

    def _neighbours(self, z: Array, segments: Array | None, offsets: Array) -> list[Array]:
        """Returns the neighbours of each position at these offsets, each [B, L].

        Beyond the ends of the text, or of its segment, stands V; -1 stands for a mask.
        """
        z = jnp.where(z == self.vocab_size, -1, z)
        found = [_shifted(z, offset, self.vocab_size) for offset in offsets]
        if segments is None:
            return found
        same = [_shifted(segments, offset, -1) == segments for offset in offsets]
        return [jnp.where(*pair, self.vocab_size) for pair in zip(same, found, strict=True)]

    def _rows(self, numbers: Array, tables: Array) -> Array:
        """Turns numbers of combinations into rows of their tables."""
        mixed = (numbers ^ (numbers >> 16)) * jnp.uint32(MULTIPLIER)
        hashed = (mixed ^ (mixed >> 16)) % jnp.uint32(self.rows)
        return jnp.where(tables < self._numbered, numbers, hashed).astype(jnp.int32)

    def looked_up(self, z: Array, segments: Array | None = None) -> Array:
        """Returns the rows in which to look up each position: int32 [B, L, K]."""
        symbols = jnp.stack(self._neighbours(z, segments, OFFSETS), axis=-1)
        bits = jnp.asarray(1 << np.arange(len(OFFSETS)))
        tables = jnp.asarray(lookups())[jnp.sum((symbols >= 0) * bits, axis=-1)]
        # A mask is in none of these tables' sets: its factor is 0.
        terms = jnp.asarray(self._factors)[tables] * symbols[..., None, :].astype(jnp.uint32)
        numbers = jnp.sum(terms, axis=-1, dtype=jnp.uint32)
        return self._rows(numbers, tables) + jnp.asarray(self._firsts)[tables]

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
        counts = codes.decoded(state["counts"][found])
        counts = constrain(counts, BATCH_AXES, None, None, None)
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

    def counted_in(self, table: Array, tokens: Array, segments: Array | None = None) -> Array:
        """Returns the row of its own in which a table counts each position: int32 [B, L]."""
        offsets, factors = (jnp.asarray(x)[table] for x in self._members)
        symbols = self._neighbours(tokens, segments, offsets)
        numbers = sum(f * x.astype(jnp.uint32) for f, x in zip(factors, symbols, strict=True))
        return self._rows(numbers, table)

    @functools.cached_property
    def _members(self) -> tuple[np.ndarray, np.ndarray]:
        """Offsets of the neighbours in each set and their factors: [S, size of the largest set].

        Smaller sets have the factor 0 in the rest.
        """
        most = max(chosen.bit_count() for chosen in neighbour_sets())
        order = np.argsort(self._factors == 0, axis=1, kind="stable")[:, :most]
        offsets = np.asarray(OFFSETS, np.int32)[order]
        return offsets, np.take_along_axis(self._factors, order, axis=1)

    def with_table(self, state: Mapping[str, Array], text: Batch, table: Array) -> dict[str, Array]:
        """Returns the tables with one of them counting a text anew; `sequences` stays.

        text: the whole text to count, sequences in batches of B: arrays [B, N, L] of N batches.
        """
        found = codes.coded(self._counted_everywhere(text, jnp.int32(table)))
        at = jnp.asarray(self._firsts)[table], 0
        # The block is as long as the largest table: what follows a smaller one stays.
        before = jax.lax.dynamic_slice(state["counts"], at, found.shape)
        own = jnp.arange(len(found))[:, None] < jnp.asarray(self.sizes)[table]
        block = jnp.where(own, found, before)
        # Every device holds all of them; else XLA would choose for itself how to split them.
        counts = jax.lax.dynamic_update_slice(state["counts"], block, at)
        return {**state, "counts": constrain(counts, None, None)}

    def _counted_everywhere(self, text: Batch, table: Array) -> Array:
        """Returns `_counted` of the sequences on all devices."""
        if on_one_device():
            return self._counted(text, table)

        def local(text: Batch, table: Array) -> Array:
            return jax.lax.psum(self._counted(text, table), BATCH_AXES)

        specs = P(BATCH_AXES), P()
        return jax.shard_map(local, in_specs=specs, out_specs=P(), check_vma=False)(text, table)

    def _counted(self, text: Batch, table: Array) -> Array:
        """Returns the counts of one table: int32 [rows of the largest table, V].

        The whole text goes into one table after another, whose rows then stay in the processor's
        cache: 0.036 s a table of text8's 9 million letters (two cores of an AMD EPYC), and 0.09
        where all tables counted one batch after another.
        """

        def add(counts: Array, batch: Batch) -> tuple[Array, None]:
            tokens = batch.tokens.astype(jnp.int32)
            rows = self.counted_in(table, tokens, batch.context.get("segments"))
            at = rows * self.vocab_size + tokens
            return counts.at[at].add(batch.loss_mask, mode="promise_in_bounds"), None

        empty = jnp.zeros(max(self.sizes) * self.vocab_size, jnp.int32)
        batches = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), text)
        return jax.lax.scan(add, empty, batches)[0].reshape(-1, self.vocab_size)


def _shifted(x: Array, offset: Array, outside: int) -> Array:
    """Returns x[n + offset] at position n, and `outside` beyond the ends; REACH is the farthest."""
    padded = jnp.pad(x, ((0, 0), (REACH, REACH)), constant_values=outside)
    return jax.lax.dynamic_slice_in_dim(padded, REACH + offset, x.shape[1], axis=1)
