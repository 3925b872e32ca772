"""Tables of counts: how often each token occurs between given neighbours in the training text.

Counts give at once what a network learns slowly. A table belongs to a set of neighbours, such as
the two to the left and the one to the right of a token. It has a row for each combination of their
symbols, with the number of times that each token occurred there. Before the first training step all
tables count the training text, each token once (`training/counting.py`). A masked token is looked
up in the tables for its visible neighbours. `mixture.py` combines their estimates with learned
weights and adds them to the logits of the network.

In training a token is looked up without its own count (leave-one-out). Otherwise the network would
learn to trust tables that memorise the training text, and would generalise worse.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from md4_jax.networks import codes
from md4_jax.networks.evidence import Evidence
from md4_jax.networks.mixture import TableMixture
from md4_jax.networks.neighbours import LETTERS
from md4_jax.networks.rows import COUNTED, Bound, Rows
from md4_jax.protocols import Array, Batch
from md4_jax.runtime.sharding import BATCH_AXES, CONTEXT, constrain, on_one_device

# Larger vocabularies have `Lists`.
LARGEST_VOCABULARY = 1024
# Total pseudo-count of a row, spread over all tokens.
PRIOR = 0.5


class Tables(Rows):
    """Tables for a small vocabulary, with a count for each symbol in each row.

    A state is {'counts', 'sequences'}; counts are the rows of all tables, one table after another,
    uint8 [rows, V] in the codes of `codes.py`.
    """

    neighbourhood = LETTERS
    mixture = TableMixture
    reads_all = False

    @property
    def width(self) -> int:
        """Number of counts of a row."""
        return self.vocab_size

    def init(self) -> dict[str, Array]:
        """Returns empty tables, which do not change the logits."""
        return {
            "counts": jnp.zeros((sum(self.sizes), self.vocab_size), jnp.uint8),
            "sequences": jnp.zeros((), jnp.int32),
        }

    def announced(self, state: Mapping[str, Array], batch: Batch) -> Batch:
        """Adds to the context of a training batch its tokens, ~token where one is not counted."""
        if batch.number is None:
            return batch
        counted = batch.loss_mask & (batch.number < state["sequences"])[:, None]
        own = jnp.where(counted, batch.tokens, ~batch.tokens)
        return batch._replace(context={**batch.context, COUNTED: own})

    def evidence(
        self,
        state: Mapping[str, Array],
        z: Array,
        segments: Array | None = None,
        own: Array | None = None,
    ) -> Evidence:
        """Looks up each position in the tables.

        own: the text [B, L] from which own counts are subtracted; ~token: without own count.
        """
        found = self.looked_up(z, segments)
        counts = codes.decoded(state["counts"][found])
        counts = constrain(counts, BATCH_AXES, CONTEXT, None, None)
        if own is not None:
            counts = counts - self._own_counts(z, segments, own, found)
        counted = jnp.sum(counts, axis=-1)
        shares = (counts + PRIOR / self.vocab_size) / (counted + PRIOR)[..., None]
        log_ratios = jnp.log(shares * self.vocab_size)
        return Evidence(log_ratios, counts.astype(jnp.float32), counted.astype(jnp.float32))

    def _own_counts(self, z: Array, segments: Array | None, own: Array, found: Array) -> Array:
        """Returns how often each position counted its token in the rows found: [B, L, K, V].

        A teacher's draws and rejected answers are other neighbours than those of the text, and
        their rows have not counted the token.
        """
        text = jnp.where(z == self.vocab_size, z, jnp.where(own < 0, ~own, own))
        there = found == self.looked_up(text, segments)
        at_own = jax.nn.one_hot(own, self.vocab_size, dtype=jnp.int32)
        return at_own[:, :, None] * there[..., None]

    def bound(self, state: Mapping[str, Array]) -> Bound:
        """Returns the tables with this state."""
        return Bound(functools.partial(self.evidence, state))

    def nothing(self, z: Array) -> Evidence:
        """Returns the evidence of empty tables, for z [B, L]."""
        counted = jnp.zeros((*z.shape, self.neighbourhood.lookups))
        zeros = jnp.zeros((*counted.shape, self.vocab_size))
        return Evidence(zeros, zeros, counted)

    def counter(self) -> Callable[[dict[str, Array], Batch, int], dict[str, Array]]:
        """Returns the compiled `with_table`; the buffers of the state are donated."""
        return jax.jit(self.with_table, donate_argnums=0)

    def carried(self, added: Array, evidence: Evidence) -> Array:
        """Returns the input of `added` for each position: the terms to add, [..., V]."""
        del evidence
        return added

    def added(self, logits: Array, carried: Array) -> Array:
        """Returns logits [..., V] with the carried terms added."""
        return logits + carried

    def with_table(self, state: Mapping[str, Array], text: Batch, table: Array) -> dict[str, Array]:
        """Returns the tables with one of them recounted; `sequences` does not change.

        text: the whole text to count, sequences in batches of B: arrays [B, N, L] of N batches.
        """
        found = codes.coded(self._counted_everywhere(text, jnp.int32(table)))
        at = jnp.asarray(self._firsts)[table], 0
        # The block is as long as the largest table; rows after a smaller one are not changed.
        before = jax.lax.dynamic_slice(state["counts"], at, found.shape)
        own = jnp.arange(len(found))[:, None] < jnp.asarray(self.sizes)[table]
        block = jnp.where(own, found, before)
        # Replicated on all devices; otherwise XLA would choose how to split the tables.
        counts = jax.lax.dynamic_update_slice(state["counts"], block, at)
        return {**state, "counts": constrain(counts, None, None)}

    def _counted_everywhere(self, text: Batch, table: Array) -> Array:
        """Returns the sum of `_counted` over the sequences of all devices."""
        if on_one_device():
            return self._counted(text, table)

        def local(text: Batch, table: Array) -> Array:
            return jax.lax.psum(self._counted(text, table), BATCH_AXES)

        specs = P(BATCH_AXES), P()
        return jax.shard_map(local, in_specs=specs, out_specs=P(), check_vma=False)(text, table)

    def _counted(self, text: Batch, table: Array) -> Array:
        """Returns the counts of one table: int32 [rows of the largest table, V].

        Each table counts the whole text before the next one does, so that its rows stay in the
        processor's cache: 0.036 s per table for text8's 9 million letters (two cores of an AMD
        EPYC), and 0.09 s if all tables count batch by batch.
        """

        def add(counts: Array, batch: Batch) -> tuple[Array, None]:
            tokens = batch.tokens.astype(jnp.int32)
            rows = self.counted_in(table, tokens, batch.context.get("segments"))
            at = rows * self.vocab_size + tokens
            return counts.at[at].add(batch.loss_mask, mode="promise_in_bounds"), None

        empty = jnp.zeros(max(self.sizes) * self.vocab_size, jnp.int32)
        batches = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), text)
        return jax.lax.scan(add, empty, batches)[0].reshape(-1, self.vocab_size)
