"""Transformer: bidirectional as in MD4 or causal, with or without time."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.networks.attention import KERNELS, kernel_for
from md4_jax.networks.blocks import KVCache
from md4_jax.networks.trunk import REMAT, TransformerModule
from md4_jax.protocols import Accelerator, Array, Blockwise, Denoiser, Network, Params, UserError
from md4_jax.runtime.sharding import batch_groups


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Options of the transformer; `build()` makes the network.

    hidden             width of the gated feed-forward layer; 0: 8/3 of size, rounded up to a
                       multiple of 64
    time_conditioning  feeds t by adaLN-zero; without it the network is time-free
    scan_blocks        compiles one block for all depths, so that compile time does not grow;
                       unrolled blocks are faster on CPUs
    remat              what the backward pass computes again to save memory: nothing (none), all
                       but matrix products (dots), or whole blocks (full)
    causal             a position sees nothing to its right
    output             categorical, a logit for each symbol, or for ordered symbols
                       truncated_logistic, a location and a scale
    attention          kernel: plain, splash (TPU), cudnn (NVIDIA), or auto, the platform's best
    classes            number of class labels, fed by adaLN like the time
    label_dropout      probability of hiding a training sequence's label, so that the network
                       also learns without it
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
    classes: int = 0
    label_dropout: float = 0.0

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
        if self.classes < 0:
            raise UserError(f"network.classes must not be negative, not {self.classes}")
        if not 0 <= self.label_dropout < 1:
            raise UserError(f"network.label_dropout must lie in [0, 1), not {self.label_dropout}")
        if self.is_ordinal and self.vocab_size < 2:
            raise UserError(
                "network.output=truncated_logistic needs two symbols at least, "
                f"not a vocabulary of {self.vocab_size}"
            )

    @property
    def is_ordinal(self) -> bool:
        """Whether the head treats the symbols as ordered."""
        return self.output == "truncated_logistic"

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        kernel = kernel_for(self.attention, platform, self.size // self.heads, self.dtype)
        hidden = self.hidden or -(-8 * self.size // (3 * 64)) * 64
        options = dataclasses.replace(self, attention=kernel, hidden=hidden)
        module = TransformerModule(options)
        tokens = jnp.zeros((1, 2), jnp.int32)

        def init(key: Array):
            return module.init(key, tokens, jnp.zeros((1,)))["params"]

        # A convolution and a causal mask reach across the borders of blocks.
        blockwise = not self.causal and not self.local_width
        bind = Binding(options, module, blockwise)
        counted = functools.partial(forward_flops, size=self.size, depth=self.depth)
        return Network(init, bind, not self.time_conditioning, self.causal, blockwise, counted)


class Binding(NamedTuple):
    """Binds parameters, context and dropout keys to the functions of the module."""

    options: Transformer
    module: TransformerModule
    blockwise: bool

    def __call__(
        self, params: Params, context: Mapping[str, Array] | None = None, keys: Array | None = None
    ) -> Denoiser:
        """Returns the denoiser; UserError for a context that the network cannot use."""
        told = self._context(dict(context or {}), keys)
        module, variables = self.module, {"params": params}

        def features(z: Array, t: Array, index: Array | None = None) -> Array:
            return module.apply(variables, z, t, **told, index=index, method="features")

        def unembed(h: Array) -> Array:
            return module.apply(variables, h, method="unembed")

        def rebind(count: int) -> Denoiser:
            several = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), told)
            return self(params, several)

        blocks = self._blocks(variables, told) if self.blockwise else None
        return Denoiser(features, unembed, Accelerator(batch_groups(), features), blocks, rebind)

    def _context(self, context: dict[str, Array], keys: Array | None) -> dict[str, Array]:
        """Checks the context and, in training, hides some labels."""
        o = self.options
        if foreign := context.keys() - {"segments", "label"}:
            raise UserError(f"the transformer takes segments and label, not {sorted(foreign)[0]!r}")
        if "label" in context and not o.classes:
            raise UserError(
                "the data have labels and network.classes=0: set network.classes to the number of "
                "classes to train on them"
            )
        if "label" in context and keys is not None and o.label_dropout:
            draws = jax.vmap(jax.random.uniform)(keys)
            context["label"] = jnp.where(draws < o.label_dropout, o.classes, context["label"])
        return context

    def _blocks(self, variables: dict, told: dict[str, Array]) -> Blockwise:
        o, label = self.options, told.get("label")

        def features(z: Array, t: Array, clean: Array, block: int, clean_t: Array | float = 0.0):
            length, more = z.shape[1], -z.shape[1] % block
            segments = told.get("segments")
            if more:
                # Padding of the last block is a segment of its own, which no token sees.
                segments = jnp.zeros_like(clean) if segments is None else segments
                segments = jnp.pad(segments, ((0, 0), (0, more)), constant_values=-1)
                z, clean = (jnp.pad(x, ((0, 0), (0, more))) for x in (z, clean))
            module = self.module.clone(block=block)
            h = module.apply(
                variables, z, t, clean, clean_t, segments, label, method="block_features"
            )
            return h[:, :length]

        def empty_cache(rows: int, window: int) -> KVCache:
            shape = (o.depth, rows, window, o.heads, o.size // o.heads)
            empty = jnp.zeros(shape, o.dtype)
            return KVCache(empty, empty, jnp.int32(0))

        def append_block(z: Array, t: Array, cache: KVCache) -> tuple[Array, KVCache]:
            return self.module.apply(variables, z, t, cache, label, method="append_block")

        return Blockwise(features, empty_cache, append_block)


# Layers that see only the condition of a sequence, not its tokens.
OF_A_SEQUENCE = ("modulation", "time_in", "time_out")


def forward_flops(params: Params, length: int, block: int = 0, *, size: int, depth: int) -> float:
    """Returns the FLOPs of a forward pass per token: 2 N, and 4 L D for each layer.

    N is the number of parameters of linear layers that see tokens. In block diffusion both a noisy
    token and its clean copy are counted. The last layer computes only keys and values of the clean
    copy, and each of the two sees (L + block) / 2 tokens.
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
        return 2.0 * matrices + 4.0 * length * size * depth
    head = sum(count for path, count in kernels if path[0] == "head")
    clean = (matrices - head) * (depth - 1) / depth + 2.0 * size**2
    seen = (2 * depth - 1) * (length + block) / 2
    return 2.0 * (matrices + clean) + 4.0 * seen * size
