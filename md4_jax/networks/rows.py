"""Rows of tables of counts: where to count a token, and where to look it up."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.networks import codes
from md4_jax.networks.evidence import Evidence
from md4_jax.networks.neighbours import Neighbourhood
from md4_jax.protocols import Array, UserError

# Limit for which every count has a code.
MOST_TOKENS = codes.LARGEST
# Limit for which int32 can index the rows.
MOST_ROWS = 2**31 - 1
# Name in a batch's context of the tokens that are looked up without their own count.
COUNTED = "counted"
MULTIPLIER = 0x9E3779B1


class Bound(NamedTuple):
    """Tables bound to a state, for use by a network.

    evidence  (z, segments, own) -> evidence for each position
    first     logits of all symbols without any neighbour, [V], which are added to those of the
              network; None: zeros
    """

    evidence: Callable[..., Evidence]
    first: Array | None = None


@dataclasses.dataclass(frozen=True)
class Rows(abc.ABC):
    """Base class of `Tables` and `Lists`: computes the row for each set of neighbours.

    Their states contain the array 'sequences': the number of sequences that have been counted, the
    first ones of the training data.

    vocab_size  V; the mask is V
    size        largest number of counts of a table. If a set of neighbours has no more combinations
                than rows, each combination has its own row; otherwise rows are hashed and may
                collide
    tokens      largest number of tokens of the training text that are counted
    """

    neighbourhood: ClassVar[Neighbourhood]
    mixture: ClassVar[type]  # module that makes one estimate of all look-ups
    reads_all: ClassVar[bool]  # whether each process counts the whole text, not its own rows of it

    vocab_size: int
    size: int
    tokens: int

    def __post_init__(self):
        if self.size < self.width:
            raise UserError(
                f"network.tables={self.size} must be 0 or at least {self.width}, the number of "
                "counts in one row"
            )
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise UserError(
                f"network.tables_tokens must lie between 1 and {MOST_TOKENS}, not {self.tokens}"
            )
        if sum(self.sizes) > MOST_ROWS:
            raise UserError(
                f"network.tables={self.size} makes tables with {sum(self.sizes):,} rows in all, "
                f"more than {MOST_ROWS:,}: reduce it"
            )

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Number of counts of a row."""

    @property
    def rows(self) -> int:
        """Largest number of rows of a table."""
        return self.size // self.width

    def _combinations(self, chosen: int) -> int:
        """Returns the number of combinations of symbols that a set of neighbours may have."""
        return (self.vocab_size + 1) ** chosen.bit_count()

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Number of rows of each table."""
        return [min(self.rows, self._combinations(chosen)) for chosen in self.neighbourhood.sets]

    @functools.cached_property
    def _numbered(self) -> int:
        """Number of tables in which each combination has its own row; they come first."""
        return sum(self._combinations(chosen) <= self.rows for chosen in self.neighbourhood.sets)

    @functools.cached_property
    def _factors(self) -> np.ndarray:
        """Factors of the symbols in the index of a combination: uint32 [S, neighbours].

        They are powers of V + 1, or odd random numbers for hashed tables.
        """
        random = np.random.default_rng(0)
        factors = np.zeros((len(self.sizes), len(self.neighbourhood.offsets)), np.uint32)
        for table, chosen in enumerate(self.neighbourhood.sets):
            bits = [j for j in range(len(self.neighbourhood.offsets)) if chosen >> j & 1]
            odd = 2 * random.integers(2**31, size=len(bits)) + 1
            numbered = table < self._numbered
            factors[table, bits] = (
                (self.vocab_size + 1) ** np.arange(len(bits)) if numbered else odd
            )
        return factors

    @functools.cached_property
    def _firsts(self) -> np.ndarray:
        """Index of the first row of each table in the concatenation of all tables."""
        return np.cumsum([0, *self.sizes[:-1]], dtype=np.int32)

    def _neighbours(self, z: Array, segments: Array | None, offsets: Array) -> list[Array]:
        """Returns the neighbours of each position at these offsets, each [B, L].

        V stands for positions outside the text or segment, and -1 for a mask.
        """
        z = jnp.where(z == self.vocab_size, -1, z)
        reach = self.neighbourhood.reach
        found = [_shifted(z, offset, reach, self.vocab_size) for offset in offsets]
        if segments is None:
            return found
        same = [_shifted(segments, offset, reach, -1) == segments for offset in offsets]
        return [jnp.where(*pair, self.vocab_size) for pair in zip(same, found, strict=True)]

    def _rows(self, numbers: Array, tables: Array) -> Array:
        """Maps indices of combinations to rows of their tables."""
        mixed = (numbers ^ (numbers >> 16)) * jnp.uint32(MULTIPLIER)
        hashed = (mixed ^ (mixed >> 16)) % jnp.uint32(self.rows)
        return jnp.where(tables < self._numbered, numbers, hashed).astype(jnp.int32)

    def looked_up(self, z: Array, segments: Array | None = None) -> Array:
        """Returns the rows in which to look up each position: int32 [B, L, K]."""
        symbols = jnp.stack(self._neighbours(z, segments, self.neighbourhood.offsets), axis=-1)
        bits = jnp.asarray(1 << np.arange(len(self.neighbourhood.offsets)))
        tables = jnp.asarray(self.neighbourhood.tables)[jnp.sum((symbols >= 0) * bits, axis=-1)]
        # A mask is in none of these tables' sets: its factor is 0.
        terms = jnp.asarray(self._factors)[tables] * symbols[..., None, :].astype(jnp.uint32)
        numbers = jnp.sum(terms, axis=-1, dtype=jnp.uint32)
        return self._rows(numbers, tables) + jnp.asarray(self._firsts)[tables]

    def counted_in(self, table: Array, tokens: Array, segments: Array | None = None) -> Array:
        """Returns the row, within a table, that counts each position: int32 [B, L]."""
        offsets, factors = (jnp.asarray(x)[table] for x in self._members)
        symbols = self._neighbours(tokens, segments, offsets)
        numbers = sum(f * x.astype(jnp.uint32) for f, x in zip(factors, symbols, strict=True))
        return self._rows(numbers, table)

    @functools.cached_property
    def _members(self) -> tuple[np.ndarray, np.ndarray]:
        """Offsets of the neighbours in each set and their factors: [S, size of the largest set].

        Smaller sets are padded with the factor 0.
        """
        most = max(chosen.bit_count() for chosen in self.neighbourhood.sets)
        order = np.argsort(self._factors == 0, axis=1, kind="stable")[:, :most]
        offsets = np.asarray(self.neighbourhood.offsets, np.int32)[order]
        return offsets, np.take_along_axis(self._factors, order, axis=1)


def _shifted(x: Array, offset: Array, reach: int, outside: int) -> Array:
    """Returns x[n + offset] at position n, `outside` beyond the ends; |offset| <= reach."""
    padded = jnp.pad(x, ((0, 0), (reach, reach)), constant_values=outside)
    return jax.lax.dynamic_slice_in_dim(padded, reach + offset, x.shape[1], axis=1)
