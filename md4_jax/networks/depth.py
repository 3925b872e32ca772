"""Stacks of transformer blocks: a scan, an unrolled scan, or separate modules."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from md4_jax.networks.by_symbol import Symbols
from md4_jax.networks.chosen import Chosen, computed, is_mask
from md4_jax.networks.layers import Block
from md4_jax.protocols import Array, Params

# What the backward pass of a block reuses, by name.
REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
# Prefixes of the paths of blocks' parameters that have a leading depth axis.
STACKED = ("blocks/", "decoder_blocks/")


def first_blocks(o: Any, block_size: int = 0) -> list[nn.Module]:
    """Makes the first `dense_layers` blocks, which have no experts and come before `stack`.

    They are not scanned, since they have different parameters.
    """
    if not o.dense_layers:
        return []
    none = dict.fromkeys(("experts", "dense_layers", "shared_hidden", "balance", "router_z"), 0)
    plain = dataclasses.replace(o, **none)
    block = _recomputed(o, prevent_cse=True)
    return [block(plain, block_size) for _ in range(o.dense_layers)]


def _recomputed(o: Any, *, prevent_cse: bool) -> type[nn.Module]:
    """Returns the class of blocks whose backward pass recomputes what `remat` says."""
    if o.remat == "none":
        return Block
    return nn.remat(Block, prevent_cse=prevent_cse, policy=REMAT[o.remat])


def stack(o: Any, block_size: int = 0, unroll: int = 1) -> nn.Module | list[nn.Module]:
    """Makes the blocks after `first_blocks`: one module scanned over depth, or a list of modules.

    unroll: number of blocks that an iteration of the scan computes.
    """
    count = o.depth - o.dense_layers
    if not o.scan_blocks:
        # All layers of a shifted network compute both halves of block diffusion.
        block, last = _recomputed(o, prevent_cse=True), -1 if o.shifted else count - 1
        return [block(o.of_layer(n), block_size, n == last) for n in range(count)]
    block = _recomputed(o, prevent_cse=False)
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(nn.broadcast, nn.broadcast, 0),
        length=count,
        unroll=unroll,
    )(o, block_size)


def unrolled(o: Any, platform: str) -> int:
    """Returns the number of blocks that an iteration of the scan computes.

    On GPUs it is all of them, since a loop copies what is stored for the backward pass. A training
    step of MD4-S took 0.85 of the time on an H200. With recomputation (`remat`) the loop is not
    unrolled: XLA would merge the equal operations and store their results.
    """
    return o.depth if platform == "gpu" and o.depth and o.remat == "none" else 1


def bound(o: Any, block_size: int, params: Params, *, last: bool = False) -> Callable:
    """Returns a block bound to these parameters, outside of the scan."""
    block = Block(o, block_size, last, parent=None)
    return functools.partial(block.apply, {"params": params})


def one_by_one(
    blocks: list[Block],
    x_BxLxD: Array,
    around: tuple,
    each_DxB: Array | None,
    index: Array | None = None,
    symbols: Symbols | None = None,
) -> Array:
    """Applies unrolled blocks; the last one to the positions of index alone, as `features`.

    symbols   the tokens and their vectors, if the first block can use them; then there are more
    around    the condition and the segments
    each_DxB  keys of each block, or None
    """
    for number, block in enumerate(blocks):
        keys = None if each_DxB is None else each_DxB[number]
        if number < len(blocks) - 1:
            x_BxLxD, _ = block(x_BxLxD, *around, keys, None if number else symbols)
        elif is_mask(index):
            x_BxLxD = _where(block, x_BxLxD, around, keys, index)
        else:
            x_BxLxD, _ = block(x_BxLxD, *around, keys, index)
    return x_BxLxD


def _where(
    block: Block, x_BxLxD: Array, around: tuple, keys: Array | None, chosen_BxL: Array
) -> Array:
    """Returns the output of a block, which is 0 at some positions that are not chosen."""
    condition, segments = around

    def rows(inputs: tuple, others: tuple, part: Chosen) -> Array:
        params, x, condition = inputs
        return bound(block.options, 0, params)(x, condition, *others, part)[0]

    return computed(
        rows, (block.variables["params"], x_BxLxD, condition), (segments, keys), chosen_BxL
    )


def gathered(
    o: Any,
    block_size: int,
    stacked: tuple[Params, Array | None],
    x_BxLxD: Array,
    around: tuple,
    *,
    index: Array | None,
    unroll: int,
) -> Array:
    """Scans all blocks except the last, which returns fewer positions than it reads.

    stacked  (parameters, keys or None) of the blocks, with the depth axis first
    around   the condition and the segments
    """
    rest, last = (jax.tree.map(lambda x, p=part: x[p], stacked) for part in (slice(-1), -1))

    def apply(x_BxLxD: Array, layer) -> tuple[Array, None]:
        params, keys = layer
        return bound(o, block_size, params)(x_BxLxD, *around, keys)

    if o.remat != "none":
        apply = jax.checkpoint(apply, prevent_cse=False, policy=REMAT[o.remat])
    x_BxLxD, _ = jax.lax.scan(apply, x_BxLxD, rest, unroll=unroll)
    params, keys = last
    return bound(o, block_size, params, last=not o.shifted)(x_BxLxD, *around, keys, index)[0]
