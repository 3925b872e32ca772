"""Process from a text to a fixed number of masks, reversed by edits: Edit Flows.

docs/families/edit_flows.md
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.special import gammaln

from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.processes.growing import Growing
from md4_jax.processes.insertion import aligned
from md4_jax.processes.order import lowest
from md4_jax.processes.schedules import Linear
from md4_jax.protocols import Array, Schedule, UserError, pytree


class Edited(NamedTuple):
    """A noisy text, and the edits that turn it into the clean text.

    z          int32 [B, L], tokens and masks, then `absent_id`
    source     int32 [B, L], position in x of each symbol of z; for a mask, of the token that
               replaces it. Undefined for surplus masks and after the last symbol
    surplus    bool [B, L], the masks of z that must be deleted, since no token replaces them
    missing    int32 [B, L + 1], number of tokens of x to insert before each symbol of z, and after
               the last one; 0 at later positions
    deleted    bool [B, L], the tokens of x to insert
    gap        int32 [B, L], for each token of x to insert, the index of its gap in z
    created    bool [B, L], all tokens of x that are created by insertion, including those in z
    alignment  float32 [B], logarithm of the number of possible alignments
    """

    z: Array
    source: Array
    surplus: Array
    missing: Array
    deleted: Array
    gap: Array
    created: Array
    alignment: Array


@pytree()
@dataclasses.dataclass(frozen=True)
class Edits(Growing):
    """Insertions, deletions and replacements that turn masks into a text (arXiv:2506.09487).

    At t = 1 the text consists of N = `masks` masks, except that a prompt's tokens are in their
    places. The N masks and the n tokens are aligned in order, with min(N, n) pairs of a mask and
    the token that replaces it; all such alignments have equal probability. The other masks are
    deleted (N > n), or the other tokens inserted (N < n). At t each edit has been made with
    probability alpha_t, independently. z [B, L] is padded with the symbol V + 1. The mask is V.
    """

    vocab_size: int
    schedule: Schedule = Linear()
    masks: int = 16

    def __post_init__(self):
        if self.masks < 1:
            raise UserError(
                f"process.masks must be at least 1, not {self.masks}: for an empty text at t=1 "
                "use process.name='deletion'"
            )

    @property
    def mask_id(self) -> int:
        return self.vocab_size

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], which ends in absent_id if it is shorter."""
        return self.edited(keys, x, t, jnp.zeros(x.shape, bool)).z

    def edited(self, keys: Array, x: Array, t: Array, fixed: Array) -> Edited:
        """Draws an alignment and z_t; tokens marked by `fixed`, bool [B, L], are kept.

        If a fixed token follows one that is not fixed, a sampler could not know the number of masks
        between them. Such a text therefore has no masks.
        """
        of_alignment, of_edits = split_keys(keys)
        length, place = x.shape[1], jnp.arange(x.shape[1])
        text = x != self.absent_id
        free = text & ~fixed
        given, count = (jnp.sum(part, axis=1, keepdims=True) for part in (text & fixed, free))
        is_prefix = ~jnp.any(text & fixed & (place >= given), axis=1, keepdims=True)
        masks = jnp.where(is_prefix, jnp.maximum(min(self.masks, length) - given, 0), 0)
        # Columns of the alignment: the tokens of x if there are more of them than masks.
        columns = place < given + jnp.maximum(masks, count)
        free = columns & ~fixed
        order = jnp.where(free, uniforms(of_alignment, length), 2.0)
        pairs = lowest(order, jnp.minimum(masks, count)[:, 0])
        has_mask = pairs | (free & (masks > count))
        has_token = pairs | (free & (masks <= count)) | (text & fixed)
        token = jnp.maximum(jnp.cumsum(has_token, axis=1, dtype=jnp.int32) - 1, 0)
        made = (uniforms(of_edits, length) >= self.schedule.one_minus_alpha(t)[:, None]) | fixed
        present = columns & jnp.where(made, has_token, has_mask)
        symbols = jnp.where(made, jnp.take_along_axis(x, token, axis=1), self.mask_id)
        z, column, absent = aligned(symbols, present, columns, self.absent_id)
        inserts = masks <= count  # otherwise absent columns are deleted masks
        ways = [gammaln(n + 1.0)[:, 0] for n in (masks, count, jnp.abs(masks - count))]
        most = jnp.maximum(ways[0], ways[1])
        return Edited(
            z=z,
            source=jnp.take_along_axis(token, column, axis=1),
            surplus=(z == self.mask_id) & ~jnp.take_along_axis(has_token, column, axis=1),
            missing=jnp.where(inserts, absent, 0),
            deleted=columns & inserts & ~present,
            gap=jnp.cumsum(present, axis=1, dtype=jnp.int32) - present,
            created=free & inserts & ~pairs,
            alignment=most - jnp.minimum(ways[0], ways[1]) - ways[2],
        )

    def prior(self, keys: Array, length: int) -> Array:
        """Returns texts of N masks, int32 [B, length]: exact if alpha_1 = 0."""
        row = jnp.where(jnp.arange(length) < self.masks, self.mask_id, self.absent_id)
        return jnp.tile(row.astype(jnp.int32), (keys.shape[0], 1))
