"""Hashed tables of logits, looked up by the visible neighbours of a position.

A network learns slowly what counts know at once: which letter stands between these neighbours. Each
table has a window of neighbours to the left and right. Their symbols, with the mask as one, are
hashed to a row of logits, and the rows of all tables are added to the logits of the network. The
tables learn beside it, by a cross-entropy of their own: its gradient needs no backward pass, and
touches only the rows in use.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from md4_jax.networks.dropout import folded
from md4_jax.protocols import Accelerator, Array, Batch, Denoiser, UserError
from md4_jax.runtime.sharding import BATCH_AXES, constrain

# Neighbours to the left and to the right of each table.
WINDOWS = (
    (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (2, 0), (3, 0), (4, 0), (5, 0), (0, 2), (0, 3),
    (0, 4), (0, 5), (1, 2), (2, 1), (1, 3), (3, 1),
)  # fmt: skip
# Rows are as long as the vocabulary, so that it must be small.
LARGEST_VOCABULARY = 1024
# Folded into the keys of a training step, which also draw noise and dropout.
TABLES = 0x7461626C
MULTIPLIER = 0x9E3779B1


@dataclasses.dataclass(frozen=True)
class Tables:
    """Tables of a vocabulary, trained beside a network; a state is {'rows', 'squares'}.

    vocab_size  V; the mask is V
    rows        rows of each table, a power of two
    rate        learning rate of AdaGrad (Duchi et al., 2011), with one sum of squares for each row
    draws       pairs of masks that each sequence of a batch is given to learn from
    """

    vocab_size: int
    rows: int
    rate: float
    draws: int

    def __post_init__(self):
        if self.rows < 2 or self.rows & (self.rows - 1):
            raise UserError(f"network.tables must be 0 or a power of two, not {self.rows}")
        if self.vocab_size > LARGEST_VOCABULARY:
            raise UserError(
                f"network.tables={self.rows} needs a vocabulary of at most {LARGEST_VOCABULARY} "
                f"symbols, since a row has a number for each; this one has {self.vocab_size}"
            )
        if self.rate <= 0 or self.draws < 1:
            raise UserError(
                "network.tables_rate must be above 0 and network.tables_draws at least 1, not "
                f"{self.rate} and {self.draws}"
            )

    def init(self) -> dict[str, Array]:
        """Returns tables of zeros: they change no logits."""
        total = len(WINDOWS) * self.rows
        return {"rows": jnp.zeros((total, self.vocab_size)), "squares": jnp.zeros(total)}

    def addresses(self, z: Array, segments: Array | None = None) -> Array:
        """Returns the row of each position in each table: int32 [K, B, L].

        Beyond the ends of the text, or of its segment, stands a symbol of its own.
        """
        outside = self.vocab_size + 1
        reach = max(max(window) for window in WINDOWS)
        found = {}
        for offset in range(-reach, reach + 1):
            symbol = _shifted(z, offset, outside)
            if segments is not None:
                symbol = jnp.where(_shifted(segments, offset, -1) == segments, symbol, outside)
            found[offset] = symbol.astype(jnp.uint32)
        bits = self.rows.bit_length() - 1
        tables = []
        for number, (left, right) in enumerate(WINDOWS):
            mixed = jnp.full(z.shape, number + 1, jnp.uint32)
            for offset in (*range(-left, 0), *range(1, right + 1)):
                mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(MULTIPLIER) + found[offset]
            mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(MULTIPLIER)
            tables.append((mixed >> (32 - bits)).astype(jnp.int32) + number * self.rows)
        return jnp.stack(tables)

    def logits(
        self, state: Mapping[str, Array], z: Array, segments: Array | None = None,
        index: Array | None = None,
    ) -> Array:  # fmt: skip
        """Returns the sum of the rows of each position, or of those of index [B, P]: [B, P, V]."""
        found = self.addresses(z, segments)
        if index is not None:
            found = jnp.take_along_axis(found, index[None], axis=2)
        return constrain(jnp.sum(state["rows"][found], axis=0), BATCH_AXES, None, None)

    def added(
        self, denoiser: Denoiser, state: Mapping[str, Array], context: Mapping[str, Array]
    ) -> Denoiser:
        """Returns the denoiser with the tables' logits added to its own.

        They are the last V features of a position.
        """
        segments = context.get("segments")

        def features(z: Array, t: Array) -> Array:
            return _beside(denoiser.features(z, t), self.logits(state, z, segments))

        def features_at(z: Array, t: Array, index: Array) -> Array:
            own = self.logits(state, z, segments, index)
            return _beside(denoiser.features_at(z, t, index), own)

        def unembed(h: Array) -> Array:
            own, ours = h[..., : -self.vocab_size], h[..., -self.vocab_size :]
            if own.ndim == 3:
                # Without it XLA computes a wrong gradient of the slice on a mesh of 2 x 2 x 2.
                own = constrain(own, BATCH_AXES, None, None)
            return denoiser.unembed(own) + ours

        def rebind(count: int) -> Denoiser:
            several = {name: jnp.repeat(x, count, axis=0) for name, x in context.items()}
            return self.added(denoiser.repeated(count), state, several)

        groups = denoiser.accelerator.groups
        return Denoiser(features, unembed, Accelerator(groups, features_at), None, rebind)

    def learned(
        self, state: Mapping[str, Array], batch: Batch, keys: Array, weight: Array
    ) -> dict[str, Array]:
        """Returns the tables after one step of AdaGrad on a batch.

        A pair of masks hides each token once: in one of the two texts a share u of the tokens, in
        the other the rest, u ~ U(0, 1). weight: 1, or 0 for a step that changes nothing.
        """
        segments = batch.context.get("segments")
        addresses, errors = [], []
        for number in range(self.draws):
            at = self._hidden(batch, folded(keys, TABLES + number), segments)
            wrong = jax.nn.softmax(jnp.sum(state["rows"][at], axis=0))
            wrong -= jax.nn.one_hot(batch.tokens, self.vocab_size)
            addresses.append(at.reshape(len(WINDOWS), -1))
            errors.append((wrong * batch.loss_mask[..., None]).reshape(-1, self.vocab_size))
        at, error = jnp.concatenate(addresses, axis=1), jnp.concatenate(errors) * weight
        # Each table gets the same gradient: that of a sum.
        squares = state["squares"].at[at].add(jnp.mean(error**2, axis=1))
        step = self.rate * jax.lax.rsqrt(squares[at] + 1e-8)
        rows = state["rows"].at[at].add(-step[..., None] * error)
        # Every device holds all of them; else XLA would choose for itself how to split them.
        return {"rows": constrain(rows, None, None), "squares": constrain(squares, None)}

    def _hidden(self, batch: Batch, keys: Array, segments: Array | None) -> Array:
        """Returns the addresses of each token in the one of two texts that hides it."""

        def shares(key: Array, length: int) -> Array:
            u, each = jax.random.split(key)
            return jax.random.uniform(each, (length,)) < jax.random.uniform(u)

        first = jax.vmap(shares, (0, None))(keys, batch.tokens.shape[1])
        mask = self.vocab_size
        one, other = (
            self.addresses(jnp.where(hidden & batch.loss_mask, mask, batch.tokens), segments)
            for hidden in (first, ~first)
        )
        return jnp.where(first, one, other)


def _shifted(x: Array, offset: int, outside: int) -> Array:
    """Returns x[n + offset] at position n, and `outside` beyond the ends."""
    length = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (abs(offset), abs(offset))), constant_values=outside)
    return jax.lax.slice_in_dim(padded, abs(offset) + offset, abs(offset) + offset + length, axis=1)


def _beside(features: Array, logits: Array) -> Array:
    return jnp.concatenate([features.astype(jnp.float32), logits], axis=-1)
