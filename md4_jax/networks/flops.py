"""Floating-point operations of a forward pass, counted from the parameters."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from md4_jax.protocols import Params

# Layers that read only the condition of a sequence, not its tokens.
OF_A_SEQUENCE = ("modulation", "time_in", "time_out")


def formula(options: Any, depth: int) -> Callable[..., float]:
    """Returns `forward_flops` for options of a transformer with this number of layers."""
    return functools.partial(forward_flops, options=options, depth=depth)


def active_part(options: Any) -> float:
    """Returns the fraction of a layer's experts that a token uses; 1 without experts."""
    return options.experts_per_token / options.experts if options.experts else 1.0


def forward_flops(
    params: Params, length: int, block: int = 0, *, both: bool = False, options: Any, depth: int
) -> float:
    """Returns the FLOPs of a forward pass per token: 2 N, and 4 L D for each layer.

    N is the number of parameters of the linear layers that are applied to a token, including a head
    that is tied to the embedding. D is the number of features of all heads of a layer. Only the
    experts that a token uses count. In block diffusion a noisy token and its clean copy are both
    counted, and each of them sees (L + block) / 2 tokens. Of the clean copy the last layer computes
    only keys and values, unless the network is shifted or both are predicted (`both`).
    """
    attended = options.heads * options.attention_size
    kernels = weights(params, active_part(options))
    if options.tied and "embedding" in params:  # the trained parameters lack a frozen one
        kernels.append((["head", "kernel"], options.vocab_size * params["embedding"].shape[-1]))
    matrices = sum(count for _, count in kernels)
    if not block:
        return 2.0 * matrices + 4.0 * length * attended * depth
    head = sum(count for path, count in kernels if path[0] == "head")
    of_clean = sum(count for path, count in kernels if path[-2] in ("key", "value"))
    if options.shifted or both:
        return 2.0 * (2 * matrices - (not both) * head) + 4.0 * depth * (length + block) * attended
    clean = matrices - head + of_clean / depth - _of_last(kernels, params)
    seen = (2 * depth - 1) * (length + block) / 2
    return 2.0 * (matrices + clean) + 4.0 * seen * attended


def weights(params: Params, active: float = 1.0) -> list[tuple[list[str], float]]:
    """Lists (path, number of weights that a token uses) of the linear layers applied to tokens.

    active: the fraction of the experts that a token uses
    """
    named = [
        ([key.key for key in path], leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    return [
        (path, leaf.size * (active if path[-2].startswith("experts_") else 1))
        for path, leaf in named
        if path[-1] == "kernel" and path[-2] not in OF_A_SEQUENCE
    ]


def _of_last(kernels: list[tuple[list[str], float]], params: Params) -> float:
    """Returns the number of parameters of these kernels in the last block."""
    scanned = [count for path, count in kernels if path[0] == "blocks"]
    if scanned:
        return sum(scanned) / len(jax.tree.leaves(params["blocks"])[0])
    own = [path[0] for path, _ in kernels if path[0].startswith("blocks_")]
    if not own:  # none of its matrices is trained
        return 0.0
    last = max(own, key=lambda name: int(name.removeprefix("blocks_")))
    return sum(count for path, count in kernels if path[0] == last)
