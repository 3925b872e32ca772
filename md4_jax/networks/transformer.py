"""The transformer: bidirectional as MD4 trains it or causal, with or without time."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.layers import Block, Normalize, TimeEmbedding, modulation
from md4_jax.networks.ordinal import TruncatedLogistic
from md4_jax.protocols import Array, Denoiser, Network, UserError
from md4_jax.sharding import BATCH_AXES, batch_groups, constrain

# Vocabulary rows are rounded up, since V + 1 divides by no mesh axis.
ROW_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of the network; `build()` makes it.

    size D, depth, heads; hidden is the width of the gated feed-forward layer (0:
    8/3 D rounded up to a multiple of 64). time_conditioning feeds t by adaLN-zero;
    without it the network is time-free. scan_blocks compiles one block for all
    depths (compile time does not grow); unrolled blocks are faster on CPU.
    remat recomputes each block in the backward pass to save memory. causal lets a
    position see nothing to its right. output is what the head says of a token: a number for each
    symbol (categorical), or for ordered symbols a location and a scale (truncated_logistic).
    """

    vocab_size: int
    size: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 0
    time_conditioning: bool = True
    qk_norm: bool = False
    local_width: int = 0
    scan_blocks: bool = True
    remat: bool = False
    dtype: str = "float32"
    causal: bool = False
    output: str = "categorical"

    def __post_init__(self):
        if self.size % (2 * self.heads):
            raise UserError(
                f"network.size={self.size} must be a multiple of twice network.heads={self.heads} "
                "(rotary positions need an even head size)"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"network.dtype must be float32 or bfloat16, not {self.dtype!r}")
        if self.output not in ("categorical", "truncated_logistic"):
            raise UserError(
                f"network.output must be categorical or truncated_logistic, not {self.output!r}"
            )
        if self.is_ordinal and self.vocab_size < 2:
            raise UserError(
                "network.output=truncated_logistic needs two symbols at least, "
                f"not a vocabulary of {self.vocab_size}"
            )

    @property
    def is_ordinal(self) -> bool:
        """Whether the symbols are taken as ordered."""
        return self.output == "truncated_logistic"

    def build(self) -> Network:
        """init and bind of the linen module, with the padded vocabulary rows cut off."""
        module = TransformerModule(self)
        tokens = jnp.zeros((1, 2), jnp.int32)

        def init(key: Array):
            return module.init(key, tokens, jnp.zeros((1,)))["params"]

        def bind(params) -> Denoiser:
            variables = {"params": params}

            def features(z, t, **context):
                return module.apply(variables, z, t, **context, method="features")

            def unembed(h):
                return module.apply(variables, h, method="unembed")

            def gathered(z, t, index):
                return sampled.apply(
                    {"params": unstacked(params, self)}, z, t, index=index, method="features"
                )

            return Denoiser(features, unembed, batch_groups(), gathered)

        sampled = TransformerModule(dataclasses.replace(self, scan_blocks=False, remat=False))
        return Network(init, bind, time_free=not self.time_conditioning, causal=self.causal)


def rounded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def unstacked(params: Mapping[str, Any], options: Transformer) -> dict[str, Any]:
    """Parameters of scanned blocks as those of single ones: sampling wants the last apart."""
    params = dict(params)
    if options.scan_blocks:
        stacked = params.pop("blocks")
        for index in range(options.depth):
            params[f"blocks_{index}"] = jax.tree.map(lambda x, i=index: x[i], stacked)
    return params


class TransformerModule(nn.Module):
    """Tokens z [B, L] in 0..V and times t [B] -> features [B, L, D] -> logits [B, L, V]."""

    options: Transformer

    def setup(self):
        o = self.options
        self.compute_dtype = jnp.dtype(o.dtype)
        self.embedding = self.param(
            "embedding", nn.initializers.normal(1.0), (rounded(o.vocab_size + 1), o.size)
        )
        if o.time_conditioning:
            self.time = TimeEmbedding(o.size, self.compute_dtype)
            self.final_modulation = FinalModulation(o.size, self.compute_dtype)
        self.final_norm = Normalize(gain=not o.time_conditioning)
        if o.is_ordinal:
            self.head = TruncatedLogistic(o.vocab_size)
        else:
            self.head = nn.Dense(
                rounded(o.vocab_size),
                kernel_init=nn.initializers.zeros,
                dtype=self.compute_dtype,
                use_bias=True,
            )
        hidden = o.hidden or -(-8 * o.size // (3 * 64)) * 64
        block = nn.remat(Block, prevent_cse=not o.scan_blocks) if o.remat else Block
        arguments = (o.heads, hidden, o.qk_norm, o.local_width, o.causal, self.compute_dtype)
        if o.scan_blocks:
            self.blocks = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=o.depth,
            )(*arguments)
        else:
            self.blocks = [block(*arguments) for _ in range(o.depth)]

    def __call__(self, z_BxL: Array, t_B: Array, segments: Array | None = None) -> Array:
        return self.unembed(self.features(z_BxL, t_B, segments=segments))

    def features(
        self, z_BxL: Array, t_B: Array, segments: Array | None = None, index: Array | None = None
    ) -> Array:
        """h [B, L, D], or with index [B, P] those of these positions: [B, P, D].

        The last block then computes no more than keys and values for the other positions.
        """
        x_BxLxD = self.embedding.astype(self.compute_dtype)[z_BxL]
        x_BxLxD = constrain(x_BxLxD, BATCH_AXES, None, None)
        condition_BxD = self.time(t_B) if self.options.time_conditioning else None
        if self.options.scan_blocks:
            x_BxLxD, _ = self.blocks(x_BxLxD, condition_BxD, segments)
        else:
            for block in self.blocks[:-1]:
                x_BxLxD, _ = block(x_BxLxD, condition_BxD, segments)
            x_BxLxD, _ = self.blocks[-1](x_BxLxD, condition_BxD, segments, index)
        x_BxLxD = self.final_norm(x_BxLxD)
        if condition_BxD is None:
            return x_BxLxD
        shift, scale = self.final_modulation(condition_BxD)
        return x_BxLxD * (1.0 + scale) + shift

    def unembed(self, h: Array) -> Array:
        logits = self.head(h).astype(jnp.float32)
        return jax.lax.slice_in_dim(logits, 0, self.options.vocab_size, axis=-1)


class FinalModulation(nn.Module):
    """Shift and scale before the head, zero at initialisation."""

    size: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, condition_BxD: Array) -> list[Array]:
        return modulation(2, self.size, condition_BxD, self.dtype)
