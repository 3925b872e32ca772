"""Masking of sub-tokens: docs/families/partial_masking.md."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from md4_jax.processes.conditioning import check_conditioning
from md4_jax.processes.draws import uniforms
from md4_jax.processes.masking import Masks
from md4_jax.processes.outputs import widened
from md4_jax.processes.schedules import Linear
from md4_jax.protocols import Array, Schedule, UserError, pytree
from md4_jax.protocols.sub_tokens import base_of, check_parts, joined_code, split_code


@pytree()
@dataclasses.dataclass(frozen=True)
class PartialMasking(Masks):
    """Masking of each sub-token of a token independently (MDM-Prime, arXiv:2505.18495).

    A token is a number of `parts` digits in base b, the smallest b with b^parts >= V. Each digit, a
    sub-token, becomes hidden with probability 1 - alpha_t. A symbol z is

        0..V-1      a token, all of whose sub-tokens are visible
        V + code    a token with hidden sub-tokens, by its code (`protocols.sub_tokens`)

    so that V, the mask, has none visible. With parts=1 the process is `Masking`. No two tokens have
    the same sub-tokens, but some sub-tokens may belong to no token.

    shuffle       seed of a random order of the tokens, whose index is then the number that is
                  written in digits (MDM-Prime-v2, arXiv:2603.16077); 0: their own order
    conditioning  as in `Masking`
    """

    vocab_size: int
    schedule: Schedule = Linear()
    parts: int = 2
    shuffle: int = 0
    conditioning: str = "time"

    def __post_init__(self):
        check_conditioning(self.conditioning)
        check_parts("process", self.vocab_size, self.parts)
        if self.shuffle < 0:
            raise UserError(f"process.shuffle must not be negative, not {self.shuffle}")

    @property
    def base(self) -> int:
        """b, the number of values of a sub-token."""
        return base_of(self.vocab_size, self.parts)

    @property
    def states(self) -> int:
        """Smallest number above every symbol."""
        return self.vocab_size + (self.base + 1) ** self.parts

    @property
    def digits(self) -> np.ndarray:
        """Sub-tokens of each token, int32 [V, parts]."""
        return _digits(self.vocab_size, self.parts, self.shuffle)

    def is_noise(self, z: Array) -> Array:
        """Returns whether each symbol has a hidden sub-token: bool like z."""
        return z >= self.vocab_size

    def hidden(self, z: Array) -> Array:
        """Returns which sub-tokens are hidden, bool [..., parts]."""
        return split_code(self.code(z), self.base, self.parts) == 0

    def hide(self, x: Array, hidden: Array) -> Array:
        """Returns the symbols of the tokens x [...] with hidden sub-tokens, bool [..., parts]."""
        digits = jnp.asarray(self.digits)[x]
        code = joined_code(jnp.where(hidden, 0, digits + 1), self.base)
        some = jnp.any(hidden, axis=-1)
        return jnp.where(some, self.vocab_size + code, x).astype(jnp.int32)

    def mask_each(self, keys: Array, x: Array, probability: Array) -> Array:
        """Hides each sub-token of row b with probability[b], independently."""
        return self.hide(x, self.chosen(keys, x.shape[1], probability[:, None, None]))

    def chosen(self, keys: Array, length: int, probability: Array) -> Array:
        """Draws sub-tokens with a probability that broadcasts: bool [B, length, parts]."""
        draws = uniforms(keys, length * self.parts)
        return draws.reshape(len(draws), length, self.parts) < probability

    def code(self, z: Array) -> Array:
        """Returns the code of each symbol, the input of the network: int32 like z."""
        own = joined_code(self.digits + 1, self.base)
        token = own[jnp.minimum(z, self.vocab_size - 1)]
        return jnp.where(z < self.vocab_size, token, z - self.vocab_size)

    def possible(self, z: Array) -> Array:
        """Returns which tokens have the visible sub-tokens of z: bool [..., V]."""
        seen = split_code(self.code(z), self.base, self.parts)
        fits = jnp.ones((), bool)
        for part in range(self.parts):
            own, at_z = self.digits[:, part] + 1, seen[..., part, None]
            fits = fits & ((at_z == 0) | (at_z == own))
        return fits

    def clean_logits(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns log p(x | z_t = z) [B, L, V]: -inf for tokens that contradict z."""
        del t
        return jnp.where(self.possible(z), widened(outputs), -jnp.inf)


@functools.lru_cache(maxsize=8)
def _digits(symbols: int, parts: int, shuffle: int) -> np.ndarray:
    """Returns the sub-tokens of each token, int32 [V, parts]."""
    number, base = np.arange(symbols), base_of(symbols, parts)
    if shuffle:
        # The sequence of this older generator is fixed for all versions of numpy.
        number = np.random.RandomState(shuffle).permutation(symbols)
    places = base ** np.arange(parts - 1, -1, -1)
    return (number[:, None] // places % base).astype(np.int32)
