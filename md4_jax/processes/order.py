"""Orders in which tokens are unmasked: some in a random order, the rest from left to right."""

import jax.numpy as jnp

from md4_jax.protocols import Array, UserError


def check_clean_share(key: str, alpha_0: float) -> None:
    """Raises UserError for a fraction outside [0, 1]."""
    if not 0.0 <= alpha_0 <= 1.0:
        raise UserError(f"{key} must lie in [0, 1], not {alpha_0}")


def ranks(draws: Array, given: Array, first: Array, *, alpha_0: float, sorted_rest: Array) -> Array:
    """Returns the rank of each position in the order of its sequence: int32 [B, L].

    Given positions come first, then those marked by `first`, then the rest. Within each part
    positions are ordered by their draws.

    draws        [B, L] in [0, 1)
    given        bool [B, L], positions that are never masked, such as prompts. With alpha_0 = 0,
                 where the network is not trained on random orders, they come from left to right
    first        bool [B, L]
    sorted_rest  bool [B, 1]: the rest comes from left to right, not in the order of the draws
    """
    place = jnp.arange(draws.shape[1], dtype=draws.dtype)
    of_given = place / draws.shape[1] if alpha_0 == 0.0 else draws
    rest = 1.0 + jnp.where(sorted_rest, place, draws)
    value = jnp.where(given, of_given - 2.0, jnp.where(first, draws, rest))
    order = jnp.argsort(value, axis=1, stable=True)
    return jnp.argsort(order, axis=1).astype(jnp.int32)


def tokens_first(masks: Array, place: Array, length: int) -> Array:
    """Returns ranks in the order of WeDLM: tokens, then masks, both from left to right.

    masks   bool [B, P]
    place   int32 [P] or [B, P], positions in a text of this length
    """
    return jnp.where(masks, length + place, place)


def lowest(values: Array, count: Array) -> Array:
    """Marks the count[b] lowest values of each row; ties go to the first: bool [B, L]."""
    order = jnp.argsort(values, axis=1, stable=True)
    return jnp.argsort(order, axis=1) < count[:, None]


def numbered(rounds: Array) -> Array:
    """Numbers the rounds of each sequence from 0 on, without gaps: int32 [B, L]."""
    order = jnp.argsort(rounds, axis=1, stable=True)
    ascending = jnp.take_along_axis(rounds, order, axis=1)
    first = jnp.pad(ascending[:, 1:] != ascending[:, :-1], ((0, 0), (1, 0)))
    number = jnp.cumsum(first, axis=1, dtype=jnp.int32)
    return jnp.take_along_axis(number, jnp.argsort(order, axis=1), axis=1)
