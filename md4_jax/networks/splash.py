"""Attention on TPUs with JAX's Pallas kernel, which stores no [L, L] array."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from md4_jax.networks.halves import halves_seen
from md4_jax.networks.keys import repeated
from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, CONTEXT, token_groups

# Smallest tile of the kernel, in positions.
TILE = 128
LARGEST_TILE = 512


def fits(length: int) -> bool:
    """Returns whether the kernel supports this length, split over the devices."""
    return length % (TILE * token_groups()[1]) == 0


@dataclasses.dataclass(frozen=True)
class BlockDiffusionMask(masks.Mask):
    """Mask of `blocks.block_diffusion_attention`, of 2 length positions.

    The first `asks` positions are queries. The kernel evaluates the mask for each of the
    (2 length / tile)^2 tiles, and skips empty tiles.
    """

    length: int
    block: int
    asks: int
    causal: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.asks, 2 * self.length

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        query, key = (part.indices(2 * self.length) for part in index)
        alike = self._alike(query, key)
        if alike is not None:
            return _full(alike, query[1] - query[0], key[1] - key[0])
        query, key = np.arange(*query), np.arange(*key)
        return halves_seen(query, key, length=self.length, block=self.block, causal=self.causal)

    def _alike(self, query: tuple[int, int, int], key: tuple[int, int, int]) -> bool | None:
        """Returns the common value of all entries of a tile; None if they may differ.

        query, key  (start, stop, step) of its rows and columns
        """
        of_clean, first = divmod(query[0], self.length)
        is_clean, least = divmod(key[0], self.length)
        half, last = divmod(query[1] - 1, self.length)
        other_half, most = divmod(key[1] - 1, self.length)
        if (of_clean, is_clean, 1, 1) != (half, other_half, query[2], key[2]):
            return None
        # First and last block of each range; positions of a block have equal masks.
        group = 1 if self.causal and of_clean else self.block
        first, last, least, most = first // group, last // group, least // group, most // group
        if is_clean:  # those before a noisy group, and those up to a clean one
            ahead = 0 if of_clean else 1
            return True if most + ahead <= first else False if least + ahead > last else None
        if of_clean or last < least or most < first:
            return False
        return True if first == last == least == most else None


class CausalMask(masks.CausalMask):
    """JAX's causal mask, evaluated only for the tiles on the diagonal."""

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        query, key = (part.indices(n) for part, n in zip(index, self.shape, strict=True))
        if key[1] - 1 <= query[0]:
            return _full(True, query[1] - query[0], key[1] - key[0])
        if key[0] > query[1] - 1:
            return _full(False, query[1] - query[0], key[1] - key[0])
        return super().__getitem__(index)


@functools.lru_cache(maxsize=16)
def _full(value: bool, rows: int, columns: int) -> np.ndarray:
    found = np.full((rows, columns), value)
    found.flags.writeable = False
    return found


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
    """Computes softmax(q k^T / sqrt(Dh)) v, on each device for its own queries and heads.

    block > 0: the arrays have a noisy and a clean half, with `BlockDiffusionMask`; queries may be
    the noisy half alone, and causal applies to the clean half.
    """
    asks, heads, length = *query_BxLxHxDh.shape[1:3], key_BxLxHxDh.shape[1]
    asking = None if segments is None else segments[:, :asks]
    mesh = jax.sharding.get_abstract_mesh()
    form = functools.partial(kernel_of, causal=causal, block=block, interpret=interpret)
    if mesh.empty:
        attention = form(asks, length, heads)
        return _local(attention, query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, asking, segments)
    tensor, parts = mesh.shape["tensor"], mesh.shape[CONTEXT]
    if key_BxLxHxDh.shape[2] % tensor:
        key_BxLxHxDh, value_BxLxHxDh = (repeated(x, heads) for x in (key_BxLxHxDh, value_BxLxHxDh))
    attention = form(asks, length, heads // tensor, parts=parts)
    positions = P(BATCH_AXES, CONTEXT, "tensor", None)
    of_segments = (None, None) if segments is None else (P(BATCH_AXES, CONTEXT), P(BATCH_AXES))
    # Each device has the rows of the mask for its queries. Without a mask all devices are alike.
    rows = CONTEXT if causal or block else None
    of_mask = attention.manual_sharding_spec(NamedSharding(mesh, P(None, rows)))
    specs = of_mask, positions, positions, positions, *of_segments
    local = functools.partial(_local, gathered=parts > 1)
    # The kernel does not declare over which axes its results vary, so check_vma is off.
    split = jax.shard_map(local, in_specs=specs, out_specs=positions, check_vma=False)
    return split(attention, query_BxLxHxDh, key_BxLxHxDh, value_BxLxHxDh, asking, segments)


def kernel_of(
    asks: int,
    length: int,
    heads: int,
    *,
    causal: bool,
    block: int,
    parts: int = 1,
    interpret: bool = False,
):
    """Makes the kernel for queries [H, asks, Dh], split in parts, and keys [H, length, Dh]."""
    if block:
        # At most a quarter of a half, since larger tiles have more masked entries.
        half = length // 2
        tile = _tile(half // parts, max(TILE, min(LARGEST_TILE, half // 4)))
        one = BlockDiffusionMask(half, block, asks, causal)
    else:
        tile = _tile(length // parts, LARGEST_TILE)
        one = CausalMask((length, length))
        if not causal:
            # JAX 0.10 cannot split a mask in which no entry is masked.
            one, parts = masks.FullMask((asks // parts, length)), 1
    tiles = kernel.BlockSizes(
        block_q=tile, block_kv=tile, block_kv_compute=tile,
        block_q_dkv=tile, block_kv_dkv=tile, block_kv_dkv_compute=tile,
        block_q_dq=tile, block_kv_dq=tile,
    )  # fmt: skip
    return kernel.make_splash_mha(
        masks.MultiHeadMask([one] * heads),
        block_sizes=tiles, head_shards=1, q_seq_shards=parts, interpret=interpret,
    )  # fmt: skip


def _tile(length: int, most: int) -> int:
    """Returns the largest tile up to `most` that divides the length."""
    sizes = (LARGEST_TILE, LARGEST_TILE // 2, TILE)
    return next(t for t in sizes if t <= most and length % t == 0)


def _local(
    attention: Any,
    query: Array,
    key: Array,
    value: Array,
    asking: Array | None,
    known: Array | None,
    *,
    gathered: bool = False,
) -> Array:
    """Computes attention; segments are `asking` for the queries and `known` for the keys.

    gathered: keys and values are split over the devices of `context` and must be gathered.
    """
    if gathered:
        key, value = (_all_positions(x) for x in (key, value))
    key, value = (repeated(x, query.shape[2]) for x in (key, value))

    def sequence(query: Array, key: Array, value: Array, *own: Array | None) -> Array:
        ids = None if known is None else kernel.SegmentIds(*own)
        return attention(query, key, value, segment_ids=ids)

    query = (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    found = jax.vmap(sequence)(query, key, value, asking, known)
    return jnp.swapaxes(found, 1, 2)


def _all_positions(x_BxLxHxDh: Array) -> Array:
    """Gathers the positions that are split over the devices of `context`."""
    batch, length, heads, size = x_BxLxHxDh.shape
    # Features of all heads are one axis: otherwise XLA sums whole gradients on each device.
    x_BxLxF = x_BxLxHxDh.reshape(batch, length, heads * size)
    found = jax.lax.all_gather(x_BxLxF, CONTEXT, axis=1, tiled=True)
    return found.reshape(batch, -1, heads, size)
