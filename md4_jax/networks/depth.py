"""Blocks one after another: in a loop, unrolled, or as modules of their own."""

from typing import Any

import flax.linen as nn
import jax

from md4_jax.networks.layers import Block

# What the backward pass of a block reuses, by name.
REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def stack(o: Any, block_size: int = 0, unroll: int = 1) -> nn.Module | list[nn.Module]:
    """Makes the blocks: one module that scans all depths, or a list of modules.

    unroll: blocks that an iteration of the scan computes.
    """
    block = Block
    if o.remat != "none":
        block = nn.remat(Block, prevent_cse=not o.scan_blocks, policy=REMAT[o.remat])
    if not o.scan_blocks:
        last = -1 if o.shifted else o.depth - 1  # all layers of a shifted one compute both halves
        return [block(o, block_size, n == last) for n in range(o.depth)]
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(nn.broadcast, nn.broadcast, 0),
        length=o.depth,
        unroll=unroll,
    )(o, block_size)


def unrolled(o: Any, platform: str) -> int:
    """Returns the number of blocks that an iteration of the loop computes.

    All of them on GPUs, where a loop copies what the backward pass keeps, unless that pass is to
    compute it again: of equal operations side by side XLA would keep the results. A training step
    of MD4-S took 0.85 of the time on an H200.
    """
    return o.depth if platform == "gpu" and o.depth and o.remat == "none" else 1
