"""Process that deletes tokens, so that texts grow by insertions in sampling: Edit Flows.

docs/families/edit_flows.md
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from md4_jax.processes.draws import uniforms
from md4_jax.processes.growing import Growing
from md4_jax.processes.insertion import aligned
from md4_jax.processes.schedules import Linear
from md4_jax.protocols import Array, Schedule, pytree


class Deleted(NamedTuple):
    """A text after deletions, and the gaps to which the deleted tokens belong.

    z        int32 [B, L], the remaining tokens, then `absent_id`
    source   int32 [B, L], position in x of each token of z; undefined after the last token
    missing  int32 [B, L + 1], number of deleted tokens of x before each token of z, and after the
             last one; 0 at later positions
    deleted  bool [B, L], whether each token of x is deleted
    gap      int32 [B, L], number of tokens of z before each token of x; for a deleted token this is
             the index of its gap
    """

    z: Array
    source: Array
    missing: Array
    deleted: Array
    gap: Array


@pytree()
@dataclasses.dataclass(frozen=True)
class Deletion(Growing):
    """Independent deletion of tokens: the insertions of Edit Flows (arXiv:2506.09487), reversed.

    A token is present at t with probability alpha_t. The noisy text z [B, L] consists of the
    present tokens in order, padded at the end with the symbol V + 1. There is no mask; its id V is
    not used.
    """

    vocab_size: int
    schedule: Schedule = Linear()

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], which ends in absent_id if it is shorter."""
        return self.delete(keys, x, t, jnp.zeros(x.shape, bool)).z

    def delete(self, keys: Array, x: Array, t: Array, fixed: Array) -> Deleted:
        """Draws z_t and what is deleted; tokens marked by `fixed`, bool [B, L], are kept."""
        text = x != self.absent_id
        kept = uniforms(keys, x.shape[1]) >= self.schedule.one_minus_alpha(t)[:, None]
        present = text & (kept | fixed)
        z, source, missing = aligned(x, present, text, self.absent_id)
        # The count of a present token includes itself.
        gap = jnp.cumsum(present, axis=1, dtype=jnp.int32) - present
        return Deleted(z, source, missing, text & ~present, gap)

    def prior(self, keys: Array, length: int) -> Array:
        """Returns empty texts, int32 [B, length]: exact if alpha_1 = 0."""
        return jnp.full((keys.shape[0], length), self.absent_id, jnp.int32)
