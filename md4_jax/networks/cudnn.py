"""Attention on NVIDIA GPUs with cuDNN's kernel, which needs half precision."""

import jax

from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, CONTEXT, dividing, splits_sequences

# Head sizes that the kernel supports: multiples of the first, up to the second.
MULTIPLE, LARGEST = 8, 128


def cudnn(
    query: Array, key: Array, value: Array, mask: Array | None, *, causal: bool = False
) -> Array:
    """Calls cuDNN's kernel, which takes a causal mask as a flag and any other mask as a matrix.

    The kernel does not support queries that are split over devices: each device calls it for its
    own queries.
    """

    def local(query: Array, key: Array, value: Array, mask: Array | None) -> Array:
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, is_causal=causal, implementation="cudnn"
        )

    if not splits_sequences():
        return local(query, key, value, mask)
    asking = dividing(query.shape, BATCH_AXES, CONTEXT, "tensor", None)
    known = dividing(key.shape, BATCH_AXES, None, "tensor", None)
    seen = None if mask is None else dividing(mask.shape, BATCH_AXES, None, CONTEXT, None)
    specs = asking, known, known, seen
    return jax.shard_map(local, in_specs=specs, out_specs=asking, check_vma=False)(
        query, key, value, mask
    )
