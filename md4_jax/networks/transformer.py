"""The transformer: bidirectional as MD4 trains it or causal, with or without time."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.attention import KERNELS, kernel_for
from md4_jax.networks.blocks import Past
from md4_jax.networks.layers import (
    Block,
    Normalize,
    TimeEmbedding,
    first_half,
    modulation,
    padded_size,
)
from md4_jax.networks.ordinal import TruncatedLogistic
from md4_jax.protocols import Array, Denoiser, Memory, Network, UserError
from md4_jax.runtime.sharding import BATCH_AXES, batch_groups, constrain

# Vocabulary rows are rounded up, since V + 1 divides by no mesh axis.
ROW_MULTIPLE = 128

# What is kept of a block for its backward pass, by name.
REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of the network; `build()` makes it.

    size D, depth, heads; hidden is the width of the gated feed-forward layer (0:
    8/3 D rounded up to a multiple of 64). time_conditioning feeds t by adaLN-zero;
    without it the network is time-free. scan_blocks compiles one block for all
    depths (compile time does not grow); unrolled blocks are faster on CPU.
    remat says what the backward pass computes again to save memory: none of it, all of each block
    but its matrix products (dots), or each block in full. causal lets a
    position see nothing to its right. output is what the head says of a token: a number for each
    symbol (categorical), or for ordered symbols a location and a scale (truncated_logistic).
    attention is the kernel that computes it: plain, splash (TPU), cudnn (NVIDIA), or auto, the
    platform's best.
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
    remat: str = "none"
    dtype: str = "float32"
    causal: bool = False
    output: str = "categorical"
    attention: str = "auto"

    def __post_init__(self):
        if self.size % (2 * self.heads):
            raise UserError(
                f"network.size={self.size} must be a multiple of twice network.heads={self.heads} "
                "(rotary positions need an even head size)"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"network.dtype must be float32 or bfloat16, not {self.dtype!r}")
        if self.attention not in KERNELS:
            raise UserError(
                f"network.attention must be one of {', '.join(KERNELS)}, not {self.attention!r}"
            )
        if self.remat not in REMAT:
            raise UserError(f"network.remat must be one of {', '.join(REMAT)}, not {self.remat!r}")
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

    def build(self, platform: str = "cpu") -> Network:
        """init and bind of the linen module, with the padded vocabulary rows cut off."""
        kernel = kernel_for(self.attention, platform, self.size // self.heads, self.dtype)
        hidden = self.hidden or -(-8 * self.size // (3 * 64)) * 64
        options = dataclasses.replace(self, attention=kernel, hidden=hidden)
        module = TransformerModule(options, padded_size(hidden, platform))
        tokens = jnp.zeros((1, 2), jnp.int32)

        # Neighbours of a convolution and a causal mask cross the borders of blocks.
        blockwise = not self.causal and not self.local_width

        def init(key: Array):
            return module.init(key, tokens, jnp.zeros((1,)))["params"]

        def bind(params) -> Denoiser:
            variables = {"params": params}

            def features(z, t, *, clean=None, block=0, **context):
                if clean is None:
                    return module.apply(variables, z, t, **context, method="features")
                blocks = module.clone(block=block)
                return blocks.apply(variables, z, t, clean, **context, method="block_features")

            def unembed(h):
                return module.apply(variables, h, method="unembed")

            def gathered(z, t, index):
                return module.apply(variables, z, t, index=index, method="features")

            def empty(rows, window):
                shape = (self.depth, rows, window, self.heads, self.size // self.heads)
                held = jnp.zeros(shape, self.dtype)
                return Past(held, held, jnp.int32(0))

            def after(z, t, past):
                return module.apply(variables, z, t, past, method="after")

            memory = Memory(empty, after) if blockwise else None
            return Denoiser(features, unembed, batch_groups(), gathered, memory)

        return Network(init, bind, not self.time_conditioning, self.causal, blockwise)


def rounded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


class TransformerModule(nn.Module):
    """Tokens z [B, L] in 0..V and times t [B] -> features [B, L, D] -> logits [B, L, V]."""

    options: Transformer
    padded: int
    block: int = 0

    def setup(self):
        o = self.options
        self.compute_dtype = jnp.dtype(o.dtype)
        self.embedding = self.param(
            "embedding", nn.initializers.normal(1.0), (rounded(o.vocab_size + 1), o.size)
        )
        if o.time_conditioning:
            self.time = TimeEmbedding(o.size, self.compute_dtype)
            self.final_modulation = FinalModulation(self.compute_dtype)
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
        block = Block
        if o.remat != "none":
            block = nn.remat(Block, prevent_cse=not o.scan_blocks, policy=REMAT[o.remat])
        arguments = (
            o.heads, o.hidden, self.padded, o.qk_norm, o.local_width, o.causal,
            self.compute_dtype, o.attention, self.block,
        )  # fmt: skip
        self.block_arguments = arguments
        if o.scan_blocks:
            self.blocks = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=o.depth,
            )(*arguments)
        else:
            lasts = [False] * (o.depth - 1) + [True]
            self.blocks = [block(*arguments, last) for last in lasts]

    def __call__(self, z_BxL: Array, t_B: Array, segments: Array | None = None) -> Array:
        return self.unembed(self.features(z_BxL, t_B, segments=segments))

    def features(
        self, z_BxL: Array, t_B: Array, segments: Array | None = None, index: Array | None = None
    ) -> Array:
        """h [B, L, D], or with index [B, P] those of these positions: [B, P, D].

        The last block then computes no more than keys and values for the other positions.
        """
        return self._trunk(z_BxL, t_B[:, None], segments, index)

    def block_features(
        self, z_BxL: Array, t_BxG: Array, clean_BxL: Array, segments: Array | None = None
    ) -> Array:
        """h [B, L, D] of z, each block of which sees itself and the blocks of clean before it.

        t holds a time for each block, G = L / block. Both are read in one pass of length 2 L, of
        which the last layer computes no more than keys and values for clean.
        """
        both_Bx2L = jnp.concatenate([z_BxL, clean_BxL], axis=1)
        times = jnp.concatenate([t_BxG, jnp.zeros_like(t_BxG)], axis=1)
        return self._trunk(both_Bx2L, times, segments, None)

    def _trunk(
        self, z_BxL: Array, t_BxG: Array, segments: Array | None, index: Array | None
    ) -> Array:
        x_BxLxD = self._embedded(z_BxL)
        condition_BxGxD = self.time(t_BxG) if self.options.time_conditioning else None
        if self.options.scan_blocks and (index is not None or self.block):
            x_BxLxD = self._gathered(x_BxLxD, condition_BxGxD, segments, index)
        elif self.options.scan_blocks:
            x_BxLxD, _ = self.blocks(x_BxLxD, condition_BxGxD, segments)
        else:
            for block in self.blocks[:-1]:
                x_BxLxD, _ = block(x_BxLxD, condition_BxGxD, segments)
            x_BxLxD, _ = self.blocks[-1](x_BxLxD, condition_BxGxD, segments, index)
        if self.block and condition_BxGxD is not None:
            condition_BxGxD = first_half(condition_BxGxD)
        return self._headed(x_BxLxD, condition_BxGxD)

    def _embedded(self, z_BxL: Array) -> Array:
        # Whole rows, lest the rows that are looked up be split as the table is and then gathered.
        table = constrain(self.embedding.astype(self.compute_dtype), "tensor", None)
        return constrain(table[z_BxL], BATCH_AXES, None, None)

    def _headed(self, x_BxLxD: Array, condition_BxGxD: Array | None) -> Array:
        x_BxLxD = self.final_norm(x_BxLxD)
        if condition_BxGxD is None:
            return x_BxLxD
        shift, scale = self.final_modulation(condition_BxGxD, x_BxLxD.shape)
        return x_BxLxD * (1.0 + scale) + shift

    def after(self, z_BxP: Array, t_B: Array, past: Past) -> tuple[Array, Past]:
        """(h [B, P, D], past with z): one block z, after the tokens that past holds."""
        x_BxPxD, condition = self._embedded(z_BxP), None
        if self.options.time_conditioning:
            condition = self.time(t_B[:, None])
        layers = (past.keys, past.values)
        if self.options.scan_blocks:
            x_BxPxD, held = jax.lax.scan(
                lambda x, layer: self._block(layer[0])(
                    x, condition, None, None, Past(*layer[1], past.count)
                ),
                x_BxPxD, (self.variables["params"]["blocks"], layers),
            )  # fmt: skip
        else:
            found = []
            for number, block in enumerate(self.blocks):
                own = Past(*(x[number] for x in layers), past.count)
                x_BxPxD, held = block(x_BxPxD, condition, None, None, own)
                found.append(held)
            held = jax.tree.map(lambda *x: jnp.stack(x), *found)
        return self._headed(x_BxPxD, condition), past.append(*held)

    def _gathered(
        self, x_BxLxD: Array, condition: Array | None, segments: Array | None, index: Array | None
    ) -> Array:
        """Scanned blocks of which the last, taken out of the scan, gives less than comes in."""
        stacked = self.variables["params"]["blocks"]
        rest, last = (jax.tree.map(lambda x, p=part: x[p], stacked) for part in (slice(-1), -1))

        def apply(x_BxLxD: Array, params) -> tuple[Array, None]:
            return self._block(params)(x_BxLxD, condition, segments)

        if self.options.remat != "none":
            policy = REMAT[self.options.remat]
            apply = jax.checkpoint(apply, prevent_cse=False, policy=policy)
        x_BxLxD, _ = jax.lax.scan(apply, x_BxLxD, rest)
        return self._block(last, last=True)(x_BxLxD, condition, segments, index)[0]

    def _block(self, params, *, last: bool = False) -> Callable:
        """One of the scanned blocks, taken out of the scan."""
        block = Block(*self.block_arguments, last, parent=None)
        return functools.partial(block.apply, {"params": params})

    def unembed(self, h: Array) -> Array:
        rows = h.reshape(-1, h.shape[-1])  # as in layers.Linear
        logits = self.head(rows).astype(jnp.float32).reshape(*h.shape[:-1], -1)
        return jax.lax.slice_in_dim(logits, 0, self.options.vocab_size, axis=-1)


class FinalModulation(nn.Module):
    """Shift and scale before the head, zero at initialisation."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, condition_BxGxD: Array, shape: tuple[int, ...]) -> list[Array]:
        return modulation(2, shape, condition_BxGxD, self.dtype)
