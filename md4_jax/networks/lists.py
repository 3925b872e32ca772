"""Tables for a large vocabulary: the most frequent tokens between given neighbours.

A row cannot have a count for each symbol of a large vocabulary. It lists the symbols with the
largest counts, and the sum of all other counts.

Words repeat within a document, so in training the counts of a document would reveal its own words.
Leaving out one token, as `Tables` do, is not enough. So each half of the training text has its own
tables: in training a sequence uses those of the other half, and otherwise both.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.networks import codes
from md4_jax.networks.evidence import Evidence
from md4_jax.networks.mixture import ListMixture
from md4_jax.networks.neighbours import WORDS
from md4_jax.networks.rows import COUNTED, Bound, Rows
from md4_jax.networks.tables import LARGEST_VOCABULARY, Tables
from md4_jax.protocols import Array, Batch
from md4_jax.runtime.sharding import BATCH_AXES, CONTEXT, constrain

# Number of symbols that a row lists.
LISTED = 16
# Discount that is subtracted from each count (Ney, Essen and Kneser, 1994): symbols that were
# counted once are less likely than their relative frequency.
DISCOUNT = 0.6
LEAST = 1e-9


class Lists(Rows):
    """Tables for a large vocabulary, with rows that list M symbols.

    A state has, besides 'sequences', the rows of all tables, one table after another, for each half
    of the text:

    symbols  listed symbols, most frequent first, padded with V: uint16 or int32 [2, rows, M]
    counts   count of each of them: uint8 [2, rows, M] in the codes of `codes.py`
    others   sum of the counts of all other symbols: uint8 [2, rows]
    shares   frequency of each symbol in the whole text, float32 [V]; its logarithm is added to the
             logits of the network
    """

    neighbourhood = WORDS
    mixture = ListMixture
    reads_all = True

    @property
    def width(self) -> int:
        """Number of counts of a row."""
        return LISTED

    def init(self) -> dict[str, Array]:
        """Returns empty tables, which do not change the logits."""
        rows, size = sum(self.sizes), self.vocab_size
        dtype = jnp.uint16 if size < 2**16 else jnp.int32
        return {
            "symbols": jnp.full((2, rows, LISTED), size, dtype),
            "counts": jnp.zeros((2, rows, LISTED), jnp.uint8),
            "others": jnp.zeros((2, rows), jnp.uint8),
            "shares": jnp.full(size, 1 / size, jnp.float32),
            "sequences": jnp.zeros((), jnp.int32),
        }

    def bound(self, state: Mapping[str, Array]) -> Bound:
        """Returns the tables with this state."""
        first = jnp.log(state["shares"])
        return Bound(functools.partial(self.evidence, state), first)

    def nothing(self, z: Array) -> Evidence:
        """Returns the evidence of empty tables, for z [B, L]."""
        counted = jnp.zeros((*z.shape, self.neighbourhood.lookups))
        zeros = jnp.zeros((*counted.shape, 1))
        symbols = jnp.full((*z.shape, 1), self.vocab_size)
        return Evidence(zeros, zeros, counted, symbols)

    def announced(self, state: Mapping[str, Array], batch: Batch) -> Batch:
        """Adds to the context of a training batch which half each sequence may look up."""
        if batch.number is None:
            return batch
        other = (batch.number < state["sequences"] // 2).astype(jnp.int32)
        return batch._replace(context={**batch.context, COUNTED: other})

    def evidence(
        self,
        state: Mapping[str, Array],
        z: Array,
        segments: Array | None = None,
        half: Array | None = None,
    ) -> Evidence:
        """Looks up each position in the tables.

        half: 0 or 1 for each sequence, [B]: the half of the text to look it up in. None: both.
        """
        found = self.looked_up(z, segments)[:, :, None]
        halves = jnp.arange(2)[:, None] if half is None else half[:, None, None, None]
        rows = [state[name][halves, found] for name in ("symbols", "counts", "others")]
        rows = [constrain(x, BATCH_AXES, CONTEXT, *[None] * (x.ndim - 2)) for x in rows]
        listed, counts, others = rows[0].astype(jnp.int32), *(codes.decoded(x) for x in rows[1:])
        symbols = _different(listed.reshape(*z.shape, -1), self.vocab_size)
        # One half after the other: 29 instead of 117 ms for 1,024 tokens on two cores.
        parts = zip(*(jnp.moveaxis(x, 2, 0) for x in (listed, counts)), strict=True)
        counts = sum(_of_each(*part, symbols) for part in parts).astype(jnp.float32)
        counted = jnp.sum(counts, axis=-1) + jnp.sum(others, axis=2)
        discounted = jnp.log(jnp.maximum(counts - DISCOUNT, LEAST))
        estimates = discounted - jnp.log(jnp.maximum(counted, 1))[..., None]
        return Evidence(estimates, counts, counted, symbols)

    def carried(self, added: Array, evidence: Evidence) -> Array:
        """Packs the input of `added` for each position: values to add, and their symbols."""
        # float32 holds every whole number up to 2^24, more than a vocabulary has symbols.
        return jnp.concatenate([added, evidence.symbols.astype(jnp.float32)], axis=-1)

    def added(self, logits: Array, carried: Array) -> Array:
        """Returns logits [..., V] with the carried values added."""
        added, symbols = jnp.split(carried, 2, axis=-1)
        flat = logits.reshape(-1, self.vocab_size)
        index = symbols.astype(jnp.int32).reshape(len(flat), -1)
        return _with_shares(flat, index, added.reshape(index.shape)).reshape(logits.shape)

    def counter(self) -> Callable[[dict[str, Array], Batch, int], dict[str, Array]]:
        """Returns a function (state, text, table) -> state in which the table has counted the text.

        text: all sequences to count, arrays [N, L]. The state's buffers are donated.
        """
        rows_of = jax.jit(self.counted_in)
        put = jax.jit(_put, donate_argnums=0)
        whole = jax.jit(lambda x: constrain(x, None))  # on all devices of all processes

        def count(state: dict[str, Array], text: Batch, table: int) -> dict[str, Array]:
            rows = np.asarray(rows_of(table, text.tokens, text.context.get("segments")))
            tokens, asked = np.asarray(text.tokens), np.asarray(text.loss_mask)
            both = []
            for half in (slice(len(rows) // 2), slice(len(rows) // 2, None)):
                pairs = (x[half][asked[half]] for x in (rows, tokens))
                both.append(listed(*pairs, self.sizes[table], self.vocab_size))
            found = {name: np.stack([x[name] for x in both]) for name in both[0]}
            found = {name: x.astype(state[name].dtype) for name, x in found.items()}
            state = put(state, found, self._firsts[table])
            if table:
                return state
            times = np.bincount(tokens[asked], minlength=self.vocab_size) + 0.5
            shares = (times / times.sum()).astype(np.float32)
            return {**state, "shares": whole(shares)}

        return count


def counts_of(vocab_size: int, size: int, tokens: int) -> Rows:
    """Returns `Tables` or `Lists`, by the vocabulary's size; UserError for wrong numbers."""
    kind = Tables if vocab_size <= LARGEST_VOCABULARY else Lists
    return kind(vocab_size, size, tokens)


@jax.custom_vjp
def _with_shares(logits: Array, symbols: Array, added: Array) -> Array:
    """Returns log(exp(logits) + exp(added)) at the symbols, int32 [N, C], and logits elsewhere.

    logits are [N, V] and added [N, C]; symbols of V or more mean none. The custom gradient avoids
    two more arrays of the size of the logits, which XLA's would fill and add.
    """
    return _forward(logits, symbols, added)[0]


def _forward(logits: Array, symbols: Array, added: Array) -> tuple[Array, tuple]:
    own = jnp.take_along_axis(logits, symbols, axis=1, mode="fill", fill_value=0.0)
    at = jnp.arange(len(logits))[:, None], symbols
    found = logits.at[at].add(jax.nn.softplus(added - own), mode="drop")
    return found, (symbols, jax.nn.sigmoid(added - own))


def _backward(kept: tuple, slope: Array) -> tuple[Array, None, Array]:
    symbols, shares = kept
    of_added = shares * jnp.take_along_axis(slope, symbols, axis=1, mode="fill", fill_value=0.0)
    at = jnp.arange(len(slope))[:, None], symbols
    return slope.at[at].add(-of_added, mode="drop"), None, of_added


_with_shares.defvjp(_forward, _backward)


def _put(state: dict[str, Array], table: dict[str, Array], first: Array) -> dict[str, Array]:
    """Writes the rows of a table into the state, beginning with row `first`."""
    placed = {
        name: jax.lax.dynamic_update_slice_in_dim(state[name], rows, first, axis=1)
        for name, rows in table.items()
    }
    return state | {name: constrain(x, *[None] * x.ndim) for name, x in placed.items()}


def _of_each(listed: Array, counts: Array, symbols: Array) -> Array:
    """Aligns the counts [B, L, K, M] of listed symbols with `symbols`: [B, L, K, C]."""
    same = listed[..., None] == symbols[:, :, None, None]
    return jnp.sum(jnp.where(same, counts[..., None], 0), axis=-2)


def _different(symbols: Array, nothing: int) -> Array:
    """Sorts symbols [..., C] and replaces duplicates by `nothing`."""
    symbols = jnp.sort(symbols, axis=-1)
    again = symbols[..., 1:] == symbols[..., :-1]
    return symbols.at[..., 1:].set(jnp.where(again, nothing, symbols[..., 1:]))


def listed(
    rows: np.ndarray, symbols: np.ndarray, size: int, vocabulary: int
) -> dict[str, np.ndarray]:
    """Returns the lists of a table of `size` rows: the arrays of a state of `Lists`.

    rows, symbols: the row in which each token is counted, and that token, int [N].
    """
    pairs, times = np.unique(
        rows.astype(np.uint64) << 32 | symbols.astype(np.uint64), return_counts=True
    )
    code = _coded(times)
    rows, symbols = pairs >> 32, pairs & 0xFFFFFF
    total = np.bincount(rows.astype(np.int64), times, size)
    # Sorted by row, then by falling count, then by symbol.
    order = np.sort(rows << 32 | (255 - code).astype(np.uint64) << 24 | symbols)
    rows, code, symbols = order >> 32, 255 - (order >> 24 & 0xFF), order & 0xFFFFFF
    rows = rows.astype(np.int64)
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = rank < LISTED
    at = rows[kept], rank[kept]
    found = np.full((size, LISTED), vocabulary)
    counts = np.zeros((size, LISTED), np.uint8)
    found[at], counts[at] = symbols[kept], code[kept]
    others = _coded(np.maximum(total - _values()[counts].sum(axis=1), 0))
    # Without other symbols the difference is only the rounding of large counts.
    others = np.where(np.bincount(rows, minlength=size) > LISTED, others, 0)
    return {"symbols": found, "counts": counts, "others": others}


@functools.cache
def _values() -> np.ndarray:
    """Returns the counts of all codes, ascending."""
    return np.asarray(codes.decoded(np.arange(codes.MOST + 1, dtype=np.uint8)))


def _coded(counts: np.ndarray) -> np.ndarray:
    """Computes `codes.coded` with NumPy, to avoid compilation for each number of counts."""
    values = _values()
    return np.searchsorted((values[1:] + values[:-1]) / 2, counts, side="right").astype(np.uint8)
