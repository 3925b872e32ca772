"""Attention on TPUs by JAX's Pallas kernel, which keeps no [L, L] array in memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec as P

from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES

# Smallest tile of the kernel, in positions.
TILE = 128
LARGEST_TILE = 512


def fits(length: int) -> bool:
    """Returns whether the kernel can be used for this length."""
    return length % TILE == 0


@dataclasses.dataclass(frozen=True)
class BlockDiffusionMask(masks.Mask):
    """Mask of `blocks.block_diffusion_attention`, of 2 length positions.

    The first `asks` positions are queries. The kernel reads the mask tile by tile and skips tiles
    without an entry.
    """

    length: int
    block: int
    asks: int
    causal: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.asks, 2 * self.length

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        is_clean, place = np.divmod(np.arange(2 * self.length), self.length)
        block = place // self.block
        query_clean, query_block = is_clean[index[0]][:, None], block[index[0]][:, None]
        key_clean, key_block = is_clean[index[1]], block[index[1]]
        # Only a clean query sees a clean key of its own block.
        earlier = query_block + query_clean > key_block
        if self.causal:
            here = place[index[0]][:, None] >= place[index[1]]
            earlier &= here | (query_clean == 0)
        return np.where(key_clean, earlier, (query_block == key_block) & (query_clean == 0))


def splash(
    query_BxLxHxDh: Array,
    key_BxLxHxDh: Array,
    value_BxLxHxDh: Array,
    segments: Array | None,
    *,
    causal: bool = False,
    block: int = 0,
    interpret: bool = False,
) -> Array:
    """Computes softmax(q k^T / sqrt(Dh)) v, on each device for its own sequences and heads.

    block > 0: the arrays hold a noisy and a clean half, with `BlockDiffusionMask`; queries may be
    the noisy half alone, and causal is for the clean half.
    """
    local = functools.partial(_local, causal=causal, block=block, interpret=interpret)
    arguments = (query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, segments)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return local(*arguments)
    heads, rows = P(BATCH_AXES, None, "tensor", None), P(BATCH_AXES, None)
    specs = (heads, heads, heads, None if segments is None else rows)
    # The kernel does not declare over which axes its results vary, so the check is off.
    return jax.shard_map(local, in_specs=specs, out_specs=heads, check_vma=False)(*arguments)


def kernel_of(
    asks: int, length: int, heads: int, *, causal: bool, block: int, interpret: bool = False
):
    """Makes the kernel for queries [H, asks, Dh] and keys [H, length, Dh]."""
    if block:
        # At most a quarter of a half, since larger tiles compute more masked entries.
        half = length // 2
        tile = _tile(half, max(TILE, min(LARGEST_TILE, half // 4)))
        one = BlockDiffusionMask(half, block, asks, causal)
    else:
        tile = _tile(length, LARGEST_TILE)
        one = (masks.CausalMask if causal else masks.FullMask)((length, length))
    tiles = kernel.BlockSizes(
        block_q=tile, block_kv=tile, block_kv_compute=tile,
        block_q_dkv=tile, block_kv_dkv=tile, block_kv_dkv_compute=tile,
        block_q_dq=tile, block_kv_dq=tile,
    )  # fmt: skip
    return kernel.make_splash_mha(
        masks.MultiHeadMask([one] * heads),
        block_sizes=tiles, head_shards=1, q_seq_shards=1, interpret=interpret,
    )  # fmt: skip


def _tile(length: int, most: int) -> int:
    """Returns the largest tile up to `most` that divides the length."""
    sizes = (LARGEST_TILE, LARGEST_TILE // 2, TILE)
    return next(t for t in sizes if t <= most and length % t == 0)


def _local(query, key, value, segments, *, causal: bool, block: int, interpret: bool) -> Array:
    (asks, heads, size), length = query.shape[1:], key.shape[1]
    attention = kernel_of(asks, length, heads, causal=causal, block=block, interpret=interpret)

    def sequence(query: Array, key: Array, value: Array, segment: Array | None) -> Array:
        ids = None if segment is None else kernel.SegmentIds(segment[:asks], segment)
        return attention(query, key, value, segment_ids=ids)

    query = (query.astype(jnp.float32) * size**-0.5).astype(query.dtype)
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    axes = (0, 0, 0, None if segments is None else 0)
    return jnp.swapaxes(jax.vmap(sequence, axes)(query, key, value, segments), 1, 2)
