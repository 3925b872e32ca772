"""Features of only the positions that a loss reads: how the last block computes fewer rows."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array
from md4_jax.runtime.sharding import on_one_device

# Fraction of a batch's positions that are computed first. Antithetic times mask half of the tokens
# of a batch, +- 0.013 if it has 1,024.
CAPACITY = 17 / 32
# Smallest number of features, tokens times width. Compilation takes 1.5 times as long.
LEAST = 2**17


class Chosen(NamedTuple):
    """Positions of a batch [B, L] as the rows [1, P] of one sequence.

    order  int32 [P], their indices among all B L positions
    rank   int32 [B, L], the row of each position; other positions have numbers outside 0..P-1
    """

    order: Array
    rank: Array

    def pick(self, x_BxLxD: Array) -> Array:
        """Returns the rows of x at these positions: [1, P, ...]."""
        return _pick(x_BxLxD, self)

    def put(self, rows_1xPxD: Array) -> Array:
        """Returns an array [B, L, ...] with these rows at their positions and 0 elsewhere."""
        return _put(rows_1xPxD, self)

    def spread(self, query: Array, key: Array, value: Array) -> list[Array]:
        """Returns queries, keys and values of all positions; other queries than these are 0."""
        return [self.put(query), key, value]

    def kept(self, mixed: Array) -> Array:
        """Returns the results of attention at these positions."""
        return self.pick(mixed)

    def of_sequences(self, x_Bx1xC: Array) -> Array:
        """Returns for each row that of its sequence: [1, P, C]."""
        batch, length = self.rank.shape
        own = jax.nn.one_hot(self.order // length, batch, dtype=x_Bx1xC.dtype)
        return jnp.dot(own, x_Bx1xC[:, 0], precision=jax.lax.Precision.HIGHEST)[None]


@jax.custom_vjp
def _pick(x: Array, chosen: Chosen) -> Array:
    return x.reshape(-1, *x.shape[2:])[chosen.order][None]


@jax.custom_vjp
def _put(rows: Array, chosen: Chosen) -> Array:
    count = rows.shape[1]
    held = (chosen.rank >= 0) & (chosen.rank < count)
    found = rows[0][jnp.clip(chosen.rank, 0, count - 1)]
    return jnp.where(held.reshape(*held.shape, *[1] * (rows.ndim - 2)), found, 0)


# Each is the transpose of the other. Both only gather, since XLA scatters slowly on CPUs.
_pick.defvjp(
    lambda x, chosen: (_pick(x, chosen), chosen), lambda chosen, g: (_put(g, chosen), None)
)
_put.defvjp(lambda x, chosen: (_put(x, chosen), chosen), lambda chosen, g: (_pick(g, chosen), None))


def is_mask(index: Array | None) -> bool:
    """Whether an index of positions is a mask [B, L] of them."""
    return index is not None and index.dtype == bool


def own_programs(o: Any) -> bool:
    """Whether the first and the last block of a transformer may have their own programs.

    Scanned blocks have the same program: slices of their stacked parameters would cost as much as
    it saves.
    """
    plain = not (o.scan_blocks or o.experts or o.gaps)
    return plain and o.remat == "none" and on_one_device()


def suits(o: Any) -> bool:
    """Whether the last block of a transformer with these options can compute fewer positions."""
    same = not (o.dropout_shared or o.hidden_dropout)  # dropout of positions of their own
    return own_programs(o) and same and not o.shifted and o.depth > 0


def halves(chosen_BxL: Array) -> tuple[Chosen, Chosen, Array]:
    """Splits all positions, chosen ones first: (`CAPACITY` of them, the others, bool []).

    The last value says whether any of the others is chosen.
    """
    flat = chosen_BxL.reshape(-1)
    before, count = jnp.cumsum(flat), jnp.sum(flat)
    rank = jnp.where(flat, before - 1, count + jnp.arange(flat.size) - before)
    order = jnp.argsort(rank)
    size = math.ceil(CAPACITY * flat.size)
    rank = rank.reshape(chosen_BxL.shape)
    return Chosen(order[:size], rank), Chosen(order[size:], rank - size), count > size


def computed(
    block: Callable[[tuple, tuple, Chosen], Array], inputs: tuple, others: tuple, chosen_BxL: Array
) -> Array:
    """Computes a block, [B, L, D], at least at the chosen positions, and 0 at the rest.

    block   (inputs, others, positions) -> rows [1, P, D]; it is differentiated with respect to
            inputs

    Positions are split by `halves`. The second part is computed only if one of them is chosen, and
    then once more for its gradient. So no position is ever left out.
    """

    def of(inputs: tuple, others: tuple, part: Chosen) -> Array:
        return part.put(block(inputs, others, part))

    @jax.custom_vjp
    def run(inputs: tuple, others: tuple, parts: tuple) -> Array:
        return forward(inputs, others, parts)[0]

    def forward(inputs: tuple, others: tuple, parts: tuple) -> tuple[Array, tuple]:
        first, second, more = parts
        out, back = jax.vjp(lambda inputs: of(inputs, others, first), inputs)
        out = jax.lax.cond(more, lambda x: x + of(inputs, others, second), lambda x: x, out)
        return out, (back, inputs, others, second, more)

    def backward(kept: tuple, g: Array) -> tuple:
        back, inputs, others, second, more = kept
        (found,) = back(g)

        def with_second(found: tuple) -> tuple:
            (rest,) = jax.vjp(lambda inputs: of(inputs, others, second), inputs)[1](g)
            return jax.tree.map(jnp.add, found, rest)

        return jax.lax.cond(more, with_second, lambda found: found, found), None, None

    run.defvjp(forward, backward)
    return run(inputs, others, halves(chosen_BxL))
