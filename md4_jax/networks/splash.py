"""Attention on TPUs by the Pallas kernel of JAX, which keeps no [L, L] array in memory."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec as P

from md4_jax.protocols import Array
from md4_jax.sharding import BATCH_AXES

# The kernel works on tiles of at least this many positions.
TILE = 128
LARGEST_TILE = 512


def fits(length: int) -> bool:
    """Whether the kernel can be used for so many positions."""
    return length % TILE == 0


def splash(
    query_BxLxHxDh: Array,
    key_BxLxHxDh: Array,
    value_BxLxHxDh: Array,
    segments: Array | None,
    *,
    causal: bool,
    interpret: bool = False,
) -> Array:
    """softmax(q k^T / sqrt(Dh)) v, each device for its own sequences and heads."""
    local = functools.partial(_local, causal=causal, interpret=interpret)
    arguments = (query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, segments)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return local(*arguments)
    heads, rows = P(BATCH_AXES, None, "tensor", None), P(BATCH_AXES, None)
    specs = (heads, heads, heads, None if segments is None else rows)
    # The kernel does not say along which axes its results vary, so that is not checked.
    return jax.shard_map(local, in_specs=specs, out_specs=heads, check_vma=False)(*arguments)


def _local(query, key, value, segments, *, causal: bool, interpret: bool) -> Array:
    length, heads, size = query.shape[1:]
    tile = next(t for t in (LARGEST_TILE, LARGEST_TILE // 2, TILE) if length % t == 0)
    tiles = kernel.BlockSizes(
        block_q=tile, block_kv=tile, block_kv_compute=tile,
        block_q_dkv=tile, block_kv_dkv=tile, block_kv_dkv_compute=tile,
        block_q_dq=tile, block_kv_dq=tile,
    )  # fmt: skip
    one = (masks.CausalMask if causal else masks.FullMask)((length, length))
    attention = kernel.make_splash_mha(
        masks.MultiHeadMask([one] * heads),
        block_sizes=tiles, head_shards=1, q_seq_shards=1, interpret=interpret,
    )  # fmt: skip

    def sequence(query: Array, key: Array, value: Array, segment: Array | None) -> Array:
        ids = None if segment is None else kernel.SegmentIds(segment, segment)
        return attention(query, key, value, segment_ids=ids)

    query = (query.astype(jnp.float32) * size**-0.5).astype(query.dtype)
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    axes = (0, 0, 0, None if segments is None else 0)
    return jnp.swapaxes(jax.vmap(sequence, axes)(query, key, value, segments), 1, 2)
