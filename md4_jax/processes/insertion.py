"""Process of variable-length texts that masks tokens, then removes the masks: FlexMDM.

docs/families/flexible_length.md
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.processes.event_rates import reveal_probability
from md4_jax.processes.growing import Growing
from md4_jax.processes.schedules import Linear
from md4_jax.protocols import Array, Schedule, pytree


class Noised(NamedTuple):
    """A noisy text and its alignment with the clean text.

    z        int32 [B, L], the symbols that are present, then `absent_id`
    source   int32 [B, L], position in x of each symbol of z; undefined after the last symbol
    missing  int32 [B, L + 1], number of absent tokens of x before each symbol of z, and after the
             last one; 0 at later positions
    """

    z: Array
    source: Array
    missing: Array


@pytree()
@dataclasses.dataclass(frozen=True)
class Insertion(Growing):
    """Masking of tokens, and removal of the masks (FlexMDM, arXiv:2509.01025).

    A token is present at t with probability a_t, the alpha of `insertion`. A token that is removed
    at time tau is a mask at t < tau with probability (1 - b_t) / (1 - b_tau), where b is the alpha
    of `schedule`. The noisy text z [B, L] consists of the present symbols in order, padded at the
    end with the symbol V + 1. The mask is V.
    """

    vocab_size: int
    schedule: Schedule = Linear()
    insertion: Schedule = Linear()

    @property
    def mask_id(self) -> int:
        return self.vocab_size

    @property
    def presence(self) -> Schedule:
        """Schedule whose alpha, a_t, is the probability that a token is present."""
        return self.insertion

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], which ends in absent_id if it is shorter."""
        return self.noised(keys, x, t, jnp.zeros(x.shape, bool)).z

    def noised(self, keys: Array, x: Array, t: Array, fixed: Array) -> Noised:
        """Draws z_t with its alignment; tokens marked by `fixed`, bool [B, L], stay clean."""
        first, second = split_keys(keys)
        removal, masking = uniforms(first, x.shape[1]), uniforms(second, x.shape[1])
        present, clean = self.states(removal, masking, t)
        text = x != self.absent_id
        present, clean = text & (present | fixed), clean | fixed
        return aligned(jnp.where(clean, x, self.mask_id), present, text, self.absent_id)

    def states(self, removal: Array, masking: Array, t: Array) -> tuple[Array, Array]:
        """Returns (token is present, and if it is, whether it is clean) from two uniforms [B, L].

        `removal` is 1 - a at the time of the token's removal.
        """
        noise = self.schedule.one_minus_alpha
        at_t, removed = noise(t)[:, None], noise(self.insertion.inverse(removal))
        present = removal >= self.insertion.one_minus_alpha(t)[:, None]
        return present, masking * removed >= at_t

    def unmask_probability(self, s: Array, t: Array) -> Array:
        """Returns P(a token is clean at s | it is masked at t) = (b_s - b_t) / (1 - b_t)."""
        return reveal_probability(self.schedule, s, t)

    def prior(self, keys: Array, length: int) -> Array:
        """Returns empty texts, int32 [B, length]: exact if a_1 = 0."""
        return jnp.full((keys.shape[0], length), self.absent_id, jnp.int32)


def aligned(symbols: Array, present: Array, text: Array, absent_id: int) -> Noised:
    """Moves the present symbols to the front, and counts the missing ones.

    All arguments are [B, L]; `text` marks the positions of the clean text, which come first.
    """
    place, count = jnp.arange(symbols.shape[1]), jnp.sum(present, axis=1, keepdims=True)
    source = jnp.argsort(jnp.logical_not(present), axis=1, stable=True).astype(jnp.int32)
    held = place < count
    z = jnp.where(held, jnp.take_along_axis(symbols, source, axis=1), absent_id)
    # The last gap ends with the clean text.
    length = jnp.sum(text, axis=1, keepdims=True)
    ends = jnp.concatenate([jnp.where(held, source, length), length], axis=1)
    begins = jnp.concatenate([jnp.full_like(length, -1), ends[:, :-1]], axis=1)
    return Noised(z, source, jnp.maximum(ends - begins - 1, 0).astype(jnp.int32))
