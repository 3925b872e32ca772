"""Vocabulary head, computed in chunks and only at positions for which a loss needs logits."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.objectives import log_sum_exp
from md4_jax.protocols import Array, Batch, Denoiser, Process


class Logits(NamedTuple):
    """Limits of the number of logits on one device.

    at_once  computed at once
    kept     stored by the forward pass for the backward pass; if there are more, all are recomputed
    """

    at_once: int
    kept: int


# At once 128 MiB of float32. With chunks, a training step of size (c) of tools/sizes.py takes 942
# instead of 1,522 MiB of temporaries. With chunks of half the size it takes 855 MiB, and 1.16 times
# as long with float32 products on 2 CPU cores. (c) keeps its logits: 150 instead of 178 GFLOP a
# step, 942 instead of 736 MiB of temporaries.
LOGITS = Logits(2**25, 2**26)
# On an H200 a step of MD4-S took 0.95 of the time with 2**27 at once instead of 2**25, and 0.97 of
# that with 2**28. To keep 2**30 took 1.6 GiB more and as long.
BY_PLATFORM = {"gpu": LOGITS._replace(at_once=2**28)}
LEAST = jax.checkpoint_policies.save_only_these_names(log_sum_exp.NAME)
KEEP = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, LEAST
)
# Candidate capacities, smallest first, as fractions of all positions. Antithetic times mask half of
# the positions with the linear schedule, +- 0.01 in a batch of 2 x 1024, and up to 0.71 with the
# cosine schedule.
# 1.4 times the speed of a training step of 32 x 256 tokens, 32768 symbols and 4 layers of 256 on
# 2 CPU cores.
CAPACITIES = (17 / 32, 3 / 4)
# Smaller vocabularies are not gathered: with 27 symbols it costs 1% of that step.
LEAST_VOCABULARY = 1024
# Half of a pair's tokens, with an allowance for rounding.
HALF = 0.501


def noise_of(process: Process, batch: Batch, z: Array) -> Array:
    """Marks the counted positions with noise: bool [B, L]."""
    return process.is_noise(z) & batch.loss_mask


def features_at_noise(
    denoiser: Denoiser, process: Process, z: Array, t: Array, noise: Array
) -> Array:
    """Returns features h [B, L, D] that are correct where noise, bool [B, L], is true.

    z is a batch at antithetic times. If at most half of a pair's tokens are masked, the network can
    leave out other positions (`Denoiser.features_where`).
    """
    if len(z) % 2 == 0 and most_masked(process) <= HALF:
        return denoiser.features_where(z, t, noise)
    return denoiser.features(z, t)


def most_masked(process: Process) -> float:
    """Returns the largest expected fraction of masked tokens of a pair at times t and 1 - t.

    It is 0 for a process without a schedule common to all symbols.
    """
    schedule = getattr(process, "schedule", None)
    if schedule is None:
        return 0.0
    with jax.ensure_compile_time_eval():
        masked = np.asarray(schedule.one_minus_alpha(jnp.linspace(0.0, 1.0, 65)))
    return float(np.max(masked + masked[::-1])) / 2


def at_noise(
    denoiser: Denoiser,
    h_BxLxD: Array,
    noise: Array,
    *,
    reduce: Callable[..., Array],
    rows: tuple[Array, ...],
    padded: bool = False,
) -> Array:
    """Returns reduce(logits, *rows) at positions with noise and 0 elsewhere, float [B, L]."""
    return at_positions(
        denoiser, h_BxLxD, noise,
        reduce=reduce, rows=rows, padded=padded, capacities=CAPACITIES,
    )  # fmt: skip


def at_positions(
    denoiser: Denoiser,
    h_BxLxD: Array,
    chosen: Array,
    *,
    reduce: Callable[..., Array],
    rows: tuple[Array, ...],
    padded: bool = False,
    capacities: tuple[float, ...] = (),
) -> Array:
    """Returns reduce(logits, *rows) at the chosen positions and 0 elsewhere, float [B, L].

    h are the denoiser's features, chosen is bool [B, L]. Each of rows is [B, L] or [B, L, V] and is
    passed to reduce as [...] or [..., V], with logits [..., V], or with longer logits that end in
    -inf if reduce accepts padding. The head is computed for the smallest of the capacities
    (fractions of all positions, ascending) that suffices for the chosen positions of every part of
    the batch (`Accelerator.groups`), or else for all positions. So no token is ever dropped.
    """
    unembed = (padded and denoiser.accelerator.padded) or denoiser.unembed
    vocabulary = jax.eval_shape(unembed, h_BxLxD[0, 0]).shape[-1]
    groups, platform = denoiser.accelerator.groups, denoiser.accelerator.platform
    most = BY_PLATFORM.get(platform, LOGITS)
    if chosen.shape[1] % groups[1]:  # then each device has whole sequences
        groups = groups[0], 1
    h, chosen_GxN, *rows_GxN = (_grouped(x, groups) for x in (h_BxLxD, chosen, *rows))

    def one(h: Array, *rows: Array) -> Array:
        return reduce(unembed(h), *rows)

    if vocabulary < LEAST_VOCABULARY:
        capacities = ()
    sizes = [math.ceil(part * chosen_GxN.shape[1]) for part in capacities]

    def everywhere() -> Array:
        values = _chunked(one, vocabulary, h, rows_GxN, most._replace(kept=0) if sizes else most)
        return jnp.where(chosen_GxN, values, 0.0)

    def gathered(size: int) -> Array:
        order_GxC = jnp.argsort(jnp.logical_not(chosen_GxN), axis=1, stable=True)[:, :size]
        picked = [_taken(x, order_GxC) for x in (chosen_GxN, *rows_GxN)]
        h_GxCxD = _taken(h, order_GxC)
        allowed = most if size == sizes[0] else most._replace(kept=0)
        found = _chunked(one, vocabulary, h_GxCxD, picked[1:], allowed)
        found = jnp.where(picked[0], found, 0.0)
        group = jnp.arange(len(chosen_GxN))[:, None]
        return jnp.zeros(chosen_GxN.shape, found.dtype).at[group, order_GxC].set(found)

    needed = jnp.max(jnp.sum(chosen_GxN, axis=1))
    branches = [*(functools.partial(gathered, size) for size in sizes), everywhere]
    found = jax.lax.switch(sum(needed > size for size in sizes), branches)
    return _ungrouped(found, groups, chosen.shape)


def _grouped(x: Array, groups: tuple[int, int]) -> Array:
    """Reshapes [B, L, ...] to [G, B L / G, ...], where each group is on one device."""
    rows, parts = groups
    batch, length, *rest = x.shape
    x = jnp.swapaxes(x.reshape(rows, batch // rows, parts, length // parts, *rest), 1, 2)
    return x.reshape(rows * parts, batch * length // (rows * parts), *rest)


def _ungrouped(x: Array, groups: tuple[int, int], shape: tuple[int, int]) -> Array:
    """Inverts `_grouped`: reshapes [G, B L / G] to [B, L]."""
    (rows, parts), (batch, length) = groups, shape
    x = x.reshape(rows, parts, batch // rows, length // parts)
    return jnp.swapaxes(x, 1, 2).reshape(shape)


def _taken(x: Array, order: Array) -> Array:
    """Returns the entries of x [G, N, ...] at the indices order [G, C]: [G, C, ...]."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)


def _chunked(one: Callable, vocabulary: int, h: Array, rows: list[Array], most: Logits) -> Array:
    """Returns one(h, *rows), [G, N], computed in chunks if there are too many logits."""
    groups, count = h.shape[:2]
    one = jax.checkpoint(one, policy=KEEP if count * vocabulary <= most.kept else LEAST)
    chunks = -(-count * vocabulary // most.at_once)
    if chunks == 1:
        return one(h, *rows)
    size = -(-count // chunks)

    def split(x: Array) -> Array:
        padding = [(0, 0), (0, chunks * size - count), *[(0, 0)] * (x.ndim - 2)]
        parts = jnp.pad(x, padding).reshape(groups, chunks, size, *x.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    out = jax.lax.map(lambda part: one(*part), tuple(split(x) for x in (h, *rows)))
    return jnp.moveaxis(out, 0, 1).reshape(groups, chunks * size)[:, :count]
