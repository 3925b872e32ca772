"""Attention on TPUs by the Pallas kernel of JAX, which keeps no [L, L] array in memory."""

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

# The kernel works on tiles of at least this many positions.
TILE = 128
LARGEST_TILE = 512


def fits(length: int) -> bool:
    """Whether the kernel can be used for so many positions."""
    return length % TILE == 0


@dataclasses.dataclass(frozen=True)
class BlockDiffusionMask(masks.Mask):
    """Mask of attention in [noisy, clean], each of `length` positions in blocks of `block`.

    A noisy position sees its own noisy block and earlier clean ones, a clean position clean
    blocks up to its own. The first `asks` of the 2 length positions are queries. The kernel asks
    for it tile by tile, and skips the tiles without an entry.
    """

    length: int
    block: int
    asks: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.asks, 2 * self.length

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        is_clean, place = np.divmod(np.arange(2 * self.length), self.length)
        block = place // self.block
        query_clean, query_block = is_clean[index[0]][:, None], block[index[0]][:, None]
        key_clean, key_block = is_clean[index[1]], block[index[1]]
        # A clean key of the same block is seen from a clean query alone.
        earlier = query_block + query_clean > key_block
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
    """softmax(q k^T / sqrt(Dh)) v, each device for its own sequences and heads.

    block > 0: the arrays hold a noisy and a clean half, which see one another as
    `BlockDiffusionMask` says; queries may be of the noisy half alone.
    """
    local = functools.partial(_local, causal=causal, block=block, interpret=interpret)
    arguments = (query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, segments)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return local(*arguments)
    heads, rows = P(BATCH_AXES, None, "tensor", None), P(BATCH_AXES, None)
    specs = (heads, heads, heads, None if segments is None else rows)
    # The kernel does not say along which axes its results vary, so that is not checked.
    return jax.shard_map(local, in_specs=specs, out_specs=heads, check_vma=False)(*arguments)


def kernel_of(
    asks: int, length: int, heads: int, *, causal: bool, block: int, interpret: bool = False
):
    """The kernel for queries [H, asks, Dh] and keys [H, length, Dh], with the tiles it computes."""
    if block:
        # Of half as many positions a quarter at most: the larger, the more empty ones it computes.
        half = length // 2
        tile = _tile(half, max(TILE, min(LARGEST_TILE, half // 4)))
        one = BlockDiffusionMask(half, block, asks)
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
    """The largest size of a tile up to `most` that divides the length."""
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
