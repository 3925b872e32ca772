"""The vocabulary head only at the positions that count, a chunk of logits at a time."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Batch, Denoiser, Process

# Logits of one device that are alive at once: 64 MiB of float32. More are made chunk by chunk,
# and again in the backward pass.
CHUNK = 2**24
# As many are kept for the backward pass, if the chosen positions have no more: 256 MiB.
KEPT = 2**26
# Below this vocabulary the head is too small a part of a step for gathering to pay.
LEAST_VOCABULARY = 1024
KEEP = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def capacity(
    expected: float, rows: int, length: int, *, parts: int = 1, exact: bool = False
) -> int:
    """Returns how many of rows x length positions get room in the gathered head.

    expected  mean share of chosen positions, for antithetic pairs of noise levels
    parts     noise levels that a sequence draws, one for each block of it
    exact     their number is drawn itself; otherwise each position is drawn on its own, and five
              standard deviations of the binomial are added

    The levels of an odd row have no partners: as much as one of them may choose all positions.
    """
    odd = rows % 2 / (rows * parts)
    spread = 1.0 / length if exact else 2.5 / math.sqrt(rows * length)
    share = expected * (1.0 - odd) + odd + spread
    return min(rows * length, math.ceil(share * rows * length))


class Noise(NamedTuple):
    """Positions whose logits a loss needs, and how many they are likely to be.

    positions  bool [B, L], counted positions that `is_noise` marks
    expected, parts, exact  as in `capacity`
    """

    positions: Array
    expected: float
    parts: int = 1
    exact: bool = False


def noise_of(
    process: Process, batch: Batch, z: Array, expected: float | None = None, **draws: Any
) -> Noise:
    """Finds the noise of z; expected: mean share of such positions, None for the process's own."""
    expected = process.expected_noise() if expected is None else expected
    return Noise(process.is_noise(z) & batch.loss_mask, expected, **draws)


def at_noise(
    denoiser: Denoiser,
    h_BxLxD: Array,
    noise: Noise,
    *,
    reduce: Callable[..., Array],
    rows: tuple[Array, ...],
) -> Array:
    """reduce(logits, *rows) where there is noise and 0 elsewhere, float [B, L]."""
    rows_of_part = len(h_BxLxD) // denoiser.accelerator.groups
    room = capacity(
        noise.expected, rows_of_part, h_BxLxD.shape[1], parts=noise.parts, exact=noise.exact
    )
    return at_positions(denoiser, h_BxLxD, noise.positions, reduce=reduce, rows=rows, room=room)


def at_positions(
    denoiser: Denoiser,
    h_BxLxD: Array,
    chosen: Array,
    *,
    reduce: Callable[..., Array],
    rows: tuple[Array, ...],
    room: int | None = None,
) -> Array:
    """reduce(logits, *rows) at the chosen positions and 0 elsewhere, float [B, L].

    h are the denoiser's features, chosen bool [B, L]; each of rows is [B, L] and reaches
    reduce as [...] beside logits [..., V]. room: positions that the head is computed for in each
    part of the batch (`Accelerator.groups`), None for all. If more are chosen, all positions are
    computed, in the same program: no token is dropped.
    """
    vocabulary = jax.eval_shape(denoiser.unembed, h_BxLxD[0, 0]).shape[-1]
    groups = denoiser.accelerator.groups
    h, chosen_GxN, *rows_GxN = (_grouped(x, groups) for x in (h_BxLxD, chosen, *rows))
    count = chosen_GxN.shape[1]
    room = count if room is None else min(room, count)

    def at(h: Array, rows: list[Array], kept: int) -> Array:
        policy = KEEP if h.shape[1] * vocabulary <= kept else None
        one = jax.checkpoint(lambda h, *rows: reduce(denoiser.unembed(h), *rows), policy=policy)
        return _chunked(one, vocabulary, h, rows)

    def everywhere() -> Array:
        return jnp.where(chosen_GxN, at(h, rows_GxN, CHUNK), 0.0)

    def gathered() -> Array:
        order_GxC = jnp.argsort(jnp.logical_not(chosen_GxN), axis=1, stable=True)[:, :room]
        picked = [jnp.take_along_axis(x, order_GxC, axis=1) for x in (chosen_GxN, *rows_GxN)]
        found = at(jnp.take_along_axis(h, order_GxC[..., None], axis=1), picked[1:], KEPT)
        found = jnp.where(picked[0], found, 0.0)
        group = jnp.arange(len(order_GxC))[:, None]
        return jnp.zeros(chosen_GxN.shape, found.dtype).at[group, order_GxC].set(found)

    if room == count or vocabulary < LEAST_VOCABULARY:
        return everywhere().reshape(chosen.shape)
    fits = jnp.max(jnp.sum(chosen_GxN, axis=1)) <= room
    return jax.lax.cond(fits, gathered, everywhere).reshape(chosen.shape)


def _grouped(x: Array, groups: int) -> Array:
    """[B, L, ...] -> [G, B / G * L, ...]: what lies on one device stays together."""
    return x.reshape(groups, x.shape[0] // groups * x.shape[1], *x.shape[2:])


def _chunked(one: Callable, vocabulary: int, h: Array, rows: list[Array]) -> Array:
    """one(h, *rows), [G, N], with no more than about CHUNK logits at a time."""
    groups, count = h.shape[:2]
    chunks = -(-count * vocabulary // CHUNK)
    if chunks == 1:
        return one(h, *rows)
    size = -(-count // chunks)

    def split(x: Array) -> Array:
        padding = [(0, 0), (0, chunks * size - count), *[(0, 0)] * (x.ndim - 2)]
        parts = jnp.pad(x, padding).reshape(groups, chunks, size, *x.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    out = jax.lax.map(lambda part: one(*part), tuple(split(x) for x in (h, *rows)))
    return jnp.moveaxis(out, 0, 1).reshape(groups, chunks * size)[:, :count]
