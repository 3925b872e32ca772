"""Floating-point operations of a forward pass, counted from the parameters."""

import jax

from md4_jax.protocols import Params

# Layers that see only the condition of a sequence, not its tokens.
OF_A_SEQUENCE = ("modulation", "time_in", "time_out")


def forward_flops(
    params: Params,
    length: int,
    block: int = 0,
    *,
    attended: int,
    depth: int,
    whole: bool = False,
) -> float:
    """Returns the FLOPs of a forward pass per token: 2 N, and 4 L D for each layer.

    N is the number of parameters of linear layers that see tokens, D = `attended` that of features
    of all heads of a layer. In block diffusion both a noisy token and its clean copy are counted.
    The last layer computes only keys and values of the clean copy, unless `whole`, and each of the
    two sees (L + block) / 2 tokens.
    """
    named = [
        ([key.key for key in path], leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    kernels = [
        (path, leaf.size)
        for path, leaf in named
        if path[-1] == "kernel" and path[-2] not in OF_A_SEQUENCE
    ]
    matrices = sum(count for _, count in kernels)
    if not block:
        return 2.0 * matrices + 4.0 * length * attended * depth
    head = sum(count for path, count in kernels if path[0] == "head")
    of_clean = sum(count for path, count in kernels if path[-2] in ("key", "value"))
    if whole:
        return 2.0 * (2 * matrices - head) + 4.0 * depth * (length + block) * attended
    clean = (matrices - head) * (depth - 1) / depth + of_clean / depth
    seen = (2 * depth - 1) * (length + block) / 2
    return 2.0 * (matrices + clean) + 4.0 * seen * attended
