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
    """A text after deletions, and where the deleted tokens would have to be inserted.

    z        int32 [B, L], the tokens that are left, then `absent_id`
    source   int32 [B, L], position in x of each token of z; without meaning behind the last one
    missing  int32 [B, L + 1], number of tokens of x that are missing before each token of z, and
             behind the last one; 0 at later positions
    deleted  bool [B, L], the tokens of x that are missing
    gap      int32 [B, L], of each token of x the number of tokens of z before it: if it is
             missing, the gap in which it is
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

    A token is present at t with probability alpha_t. The noisy text is the string of the tokens
    that are present: z [B, L] holds them from its first position on, and the symbol V + 1 behind
    them. There is no mask; its number V is not used.
    """

    vocab_size: int
    schedule: Schedule = Linear()

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], which ends in absent_id if it is shorter."""
        return self.delete(keys, x, t, jnp.zeros(x.shape, bool)).z

    def delete(self, keys: Array, x: Array, t: Array, fixed: Array) -> Deleted:
        """Draws z_t with what is missing; the tokens that `fixed` marks, bool [B, L], stay."""
        text = x != self.absent_id
        kept = uniforms(keys, x.shape[1]) >= self.schedule.one_minus_alpha(t)[:, None]
        present = text & (kept | fixed)
        z, source, missing = aligned(x, present, text, self.absent_id)
        # A token that is present counts itself.
        gap = jnp.cumsum(present, axis=1, dtype=jnp.int32) - present
        return Deleted(z, source, missing, text & ~present, gap)

    def prior(self, keys: Array, length: int) -> Array:
        """Returns empty texts, int32 [B, length]: exact if alpha_1 = 0."""
        return jnp.full((keys.shape[0], length), self.absent_id, jnp.int32)
