"""Feed-forward layers of the transformer. Array names end in their shapes: B, L, D, F hidden.

Size (a) is that of tools/sizes.py. Options are those of `Transformer`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.dropout import folded, for_adapter, kept, scaled
from md4_jax.networks.linear import Linear
from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, CONTEXT, constrain

# Folded into a layer's keys, in addition to the numbers of layers.py.
HIDDEN = 3


@jax.checkpoint
def swiglu(gate: Array, up: Array) -> Array:
    """Computes silu(gate) * up; the backward pass recomputes the sigmoid.

    A training step of size (a) has 465 instead of 503 MiB of temporaries on 2 CPU cores.
    """
    return nn.silu(gate) * up


@jax.checkpoint
def glu(gate: Array, up: Array) -> Array:
    """Computes sigmoid(gate) * up; the backward pass recomputes the sigmoid."""
    return nn.sigmoid(gate) * up


@jax.checkpoint
def geglu(gate: Array, up: Array) -> Array:
    """Computes GELU(gate) * up, with the exact GELU; the backward pass recomputes it."""
    return nn.gelu(gate, approximate=False) * up


@jax.checkpoint
def geglu_tanh(gate: Array, up: Array) -> Array:
    """Computes GELU(gate) * up, with the tanh approximation; see `geglu`."""
    return nn.gelu(gate, approximate=True) * up


# Activations of layers without gates: GELU with the tanh approximation, and exactly.
PLAIN = {
    "gelu": partial(nn.gelu, approximate=True),
    "gelu_exact": partial(nn.gelu, approximate=False),
}
GATED = {"swiglu": swiglu, "glu": glu, "geglu": geglu, "geglu_tanh": geglu_tanh}


class FeedForward(nn.Module):
    """Gated layer f(x W_gate) * (x W_up) W_down (arXiv:2002.05202), or two layers with GELU.

    length: number of positions for which dropout is drawn. needed: selects those of x.
    """

    options: Any
    zero_output: bool

    @nn.compact
    def __call__(
        self, x_BxLxD: Array, keys: Array | None, length: int, needed: Callable[[Array], Array]
    ) -> Array:
        o, dtype = self.options, jnp.dtype(self.options.dtype)
        scale = 2.0 / o.depth if o.initial == "depth_scaled" else 1.0
        plain = o.feed_forward in PLAIN

        def layer(name: str, x: Array, size: int, zeros: bool = False) -> Array:
            made = Linear(
                size, dtype, zeros, plain, o.initial, scale, o.products, o.lora_rank, o.lora_alpha,
                name=name,
            )  # fmt: skip
            return made(x, for_adapter(o, name, x, keys, length, needed))

        if plain:
            hidden_BxLxF = PLAIN[o.feed_forward](layer("up", x_BxLxD, o.hidden))
        else:
            gated = GATED[o.feed_forward]
            hidden_BxLxF = gated(*(layer(name, x_BxLxD, o.hidden) for name in ("gate", "up")))
        if keys is not None and o.hidden_dropout:
            keep = kept(folded(keys, HIDDEN), o.hidden_dropout, hidden_BxLxF.shape[1:])
            hidden_BxLxF = scaled(hidden_BxLxF, keep, o.hidden_dropout)
        hidden_BxLxF = constrain(hidden_BxLxF, BATCH_AXES, CONTEXT, "tensor")
        return layer("down", hidden_BxLxF, x_BxLxD.shape[-1], self.zero_output)
