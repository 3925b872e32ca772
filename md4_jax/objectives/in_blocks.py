"""Texts in blocks, and noise with a time for each block."""

import jax.numpy as jnp

from md4_jax.objectives.draws import early_times
from md4_jax.objectives.noising import SMALLEST_TIME, noised, prompted
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.protocols import Array, Batch, Conditioned, Denoiser, Process, UserError


def in_blocks(x_BxL: Array, block: int, value: float = 0) -> Array:
    """Reshapes [B, L] to [B, G, block], with `value` after a short last block."""
    more = -x_BxL.shape[1] % block
    filled = jnp.pad(x_BxL, ((0, 0), (0, more)), constant_values=value)
    return filled.reshape(len(x_BxL), -1, block)


def of_positions(x: Array, block: int, length: int, begin: Array | None = None) -> Array:
    """Repeats the entries of blocks for their positions: [B, G] -> [B, length]; [B] -> [B, 1].

    begin: int32 [B], where the first block begins; positions before it have its entry.
    """
    if not block:
        return x[:, None]
    if begin is None:
        return jnp.repeat(x, block, axis=1)[:, :length]
    number = jnp.maximum(jnp.arange(length) - begin[:, None], 0) // block
    return jnp.take_along_axis(x, number, axis=1)


def beginning(denoiser: Denoiser, batch: Batch) -> Array | None:
    """Returns where the first block begins, int32 [B]: at the first token that counts.

    None: at position 0, for a network whose blocks must begin there.
    """
    if denoiser.blocks is None or not denoiser.blocks.takes_begin:
        return None
    return jnp.argmax(batch.loss_mask, axis=1)


def check_block(block: int) -> None:
    """Raises UserError for a negative block size; 0 is the whole text."""
    if block < 0:
        raise UserError(f"objective.block must be at least 1, or 0 for the whole text, not {block}")


def check_blocks(block: int, length: int, key: str) -> None:
    """Raises UserError if blocks of an objective do not divide the length of a sequence.

    key: key of the length in the config
    """
    if block and length % block:
        raise UserError(
            f"objective.block={block} must divide the length of a sequence, {key}={length}"
        )


def spread(u: Array, keys: Array, groups: int) -> Array:
    """Spreads [0, 1) over the blocks of a sequence in random order, shifted by u: [B, groups].

    Each number is uniform if u [B] is, and any block may get any part of [0, 1).
    """
    rank = jnp.argsort(uniforms(keys, groups), axis=1)
    return (u[:, None] + rank / groups) % 1.0


def noised_in_blocks(
    process: Process,
    batch: Batch,
    v: Array,
    keys: Array,
    block: int,
    power: float = 1.0,
    begin: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Draws (z_t [B, L], t, weight), with a time and a weight for each block [B, G].

    Times are `spread` over the blocks and then early, v^power; the mean of the weight times an
    integrand is its integral. Tokens that do not count stay clean. block=0: one block, the text,
    with t and weight [B]. begin: as in `of_positions`; no token before it counts.
    """
    if not block:
        u, weight = early_times(v, power)
        return *noised(process, batch, u, keys), weight
    time_keys, noise_keys = split_keys(keys)
    x_BxGxP = in_blocks(_moved(batch.tokens, begin), block)
    groups = x_BxGxP.shape[1]
    u_BxG, weight_BxG = early_times(spread(v, time_keys, groups), power)
    t_BxG = jnp.maximum(u_BxG, SMALLEST_TIME)
    own_keys = split_keys(noise_keys, groups).T.reshape(-1)
    z = process.corrupt(own_keys, x_BxGxP.reshape(-1, block), t_BxG.reshape(-1))
    z_BxL = z.reshape(len(x_BxGxP), -1)[:, : batch.tokens.shape[1]]
    z_BxL = _moved(z_BxL, None if begin is None else -begin)
    return prompted(batch, z_BxL), t_BxG, weight_BxG


def _moved(x: Array, by: Array | None) -> Array:
    """Shifts x [B, L] cyclically to the left by a number of positions [B]."""
    if by is None:
        return x
    index = (jnp.arange(x.shape[1]) + by[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, index, axis=1)


def features(
    denoiser: Denoiser, batch: Batch, z: Array | Conditioned, t: Array, block: int
) -> Array:
    """Returns h [B, L, D] of z, where each block sees itself and the clean tokens before it.

    t is [B, G]. Blocks begin at `beginning`. block=0: each position sees all of z, and t is [B].
    """
    if not block:
        return denoiser.features(z, t)
    begin = beginning(denoiser, batch)
    where = {} if begin is None else {"begin": begin}
    return denoiser.blocks.features(z, t, batch.tokens, block, **where)
