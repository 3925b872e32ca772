"""DiffusionGemma (Google, 2026): block diffusion by uniform noise with the layers of Gemma 4.

An encoder reads the text with causal attention. A decoder with the same layers predicts the next
canvas, a block of noisy tokens that attend to one another and to all keys and values of the
encoder. Array names end in their shapes: B, L, P of a canvas, D, V.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.networks.adapters import check_adapters
from md4_jax.networks.binding import repeated
from md4_jax.networks.canvas import ContextCache, empty_cache
from md4_jax.networks.context import check_choices, check_least, checked_context
from md4_jax.networks.depth import REMAT
from md4_jax.networks.gemma_module import DiffusionGemmaModule
from md4_jax.networks.linear import ADAPTERS, rounded
from md4_jax.networks.products import PRODUCTS, products_for
from md4_jax.networks.rotary import BASE, Rope
from md4_jax.protocols import (
    Accelerator,
    Array,
    Blockwise,
    Denoiser,
    Network,
    Params,
    UserError,
)
from md4_jax.runtime.sharding import token_groups

CHOICES = {
    "dtype": ("float32", "bfloat16"),
    "parameters": ("float32", "bfloat16"),
    "products": PRODUCTS,
    "remat": tuple(REMAT),
}


@dataclasses.dataclass(frozen=True)
class DiffusionGemma:
    """Options of DiffusionGemma; `build()` makes the network, which has no time input.

    kv_heads, head_dim  heads of keys and values, and features of a head, in local layers
    global_kv_heads, global_head_dim  the same in global layers, which attend to all tokens
    window         number of tokens of the text that local layers attend to, the own one included
    global_every   every global_every-th layer is global, the others are local
    hidden         width of the feed-forward layer
    experts        number of gated layers in addition to it; each token uses `experts_per_token`
    expert_hidden  width of an expert
    local_base     base of the rotary positions of local layers
    rotary_base, rotary_part  base of the rotary positions of global layers, and the fraction of
                   pairs of features to which they are applied
    cap            logits become cap tanh(logits / cap)

    Other keys are those of `Transformer`.
    """

    takes: ClassVar[tuple[str, ...]] = ("segments",)
    feed_forward: ClassVar[str] = "geglu_tanh"
    attention: ClassVar[str] = "plain"
    initial: ClassVar[str] = "torch"
    scan_blocks: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    causal_context: ClassVar[bool] = False
    shifted: ClassVar[bool] = False
    hidden_dropout: ClassVar[float] = 0.0
    lora_dropout: ClassVar[float] = 0.0

    vocab_size: int
    size: int = 768
    depth: int = 12
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 64
    global_kv_heads: int = 2
    global_head_dim: int = 128
    window: int = 512
    global_every: int = 6
    hidden: int = 2048
    experts: int = 0
    experts_per_token: int = 2
    expert_hidden: int = 512
    local_base: float = BASE
    rotary_base: float = 1_000_000.0
    rotary_part: float = 0.25
    cap: float = 30.0
    norm_eps: float = 1e-6
    remat: str = "none"
    dtype: str = "float32"
    products: str = "float32"
    parameters: str = "float32"
    lora_rank: int = 0
    lora_alpha: float = 16.0

    def __post_init__(self):
        check_choices(self, CHOICES)
        names = ("size", "depth", "heads", "kv_heads", "global_kv_heads", "window", "global_every")
        check_least(self, **dict.fromkeys((*names, "hidden", "expert_hidden"), 1))
        check_least(self, experts=0, lora_rank=0, experts_per_token=1)
        for key in ("head_dim", "global_head_dim"):
            if getattr(self, key) < 2 or getattr(self, key) % 2:
                raise UserError(
                    f"network.{key}={getattr(self, key)} must be even, for rotary positions"
                )
        for key in ("kv_heads", "global_kv_heads"):
            if self.heads % getattr(self, key):
                raise UserError(
                    f"network.{key}={getattr(self, key)} must divide network.heads={self.heads}"
                )
        for key in ("cap", "norm_eps", "rotary_base", "local_base"):
            if getattr(self, key) <= 0:
                raise UserError(f"network.{key}={getattr(self, key)} must be above 0")
        if not 0 < self.rotary_part <= 1:
            raise UserError(f"network.rotary_part must lie in (0, 1], not {self.rotary_part}")
        if self.experts and self.experts_per_token > self.experts:
            raise UserError(
                f"network.experts_per_token={self.experts_per_token} must be at most "
                f"network.experts={self.experts}"
            )
        check_adapters(self)

    def is_near(self, layer: int) -> bool:
        """Returns whether a layer is local: its attention has a window."""
        return (layer + 1) % self.global_every != 0

    def shape_of(self, near: bool) -> tuple[int, int]:
        """Returns (features of a head, heads of keys and values) of a layer."""
        if near:
            return self.head_dim, self.kv_heads
        return self.global_head_dim, self.global_kv_heads

    def rope_of(self, near: bool) -> Rope:
        """Returns the angles of a layer's positions."""
        return Rope(self.local_base) if near else Rope(self.rotary_base, pairs=self.rotary_part)

    @property
    def adapters(self) -> str:
        """Regular expression of the paths of the adapters' parameters; '' without adapters."""
        return ADAPTERS if self.lora_rank else ""

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        products = products_for(self.products, platform, self.dtype)
        options = dataclasses.replace(self, products=products)
        module = DiffusionGemmaModule(options)

        def init(key: Array) -> Params:
            return module.init(key, jnp.zeros((1, 2), jnp.int32), method="everything")["params"]

        return Network(
            init, Binding(options, module, platform), time_free=True, blockwise=True,
            flops=partial(_flops, options=options),
            padding=(rounded(self.vocab_size) - self.vocab_size) * self.size,
            products=products, adapters=self.adapters, parameters=self.parameters, recalls=True,
            reads=True,
        )  # fmt: skip


class Binding(NamedTuple):
    """Binds parameters and context to the functions of the module."""

    options: Any
    module: DiffusionGemmaModule
    platform: str

    def __call__(
        self,
        params: Params,
        context: Mapping[str, Array] | None = None,
        keys: Array | None = None,
    ) -> Denoiser:
        """Returns the denoiser; UserError for a context that the network cannot use."""
        return self._bound(params, checked_context(self.options, context, keys, self.options.takes))

    def _bound(self, params: Params, context: dict[str, Array]) -> Denoiser:
        o, segments = self.options, context.get("segments")
        call = partial(self.module.apply, {"params": params})

        def features(z: Array, t: Array) -> Array:
            return call(z, segments, method="features")

        def in_blocks(
            z: Array, t: Array, clean: Array, block: int, clean_t: Any = 0.0,
            begin: Array | None = None,
        ) -> Array:  # fmt: skip
            return call(z, clean, block, segments, begin, method="block_features")

        def append_block(z: Array, t: Array, cache: ContextCache) -> tuple[Array, ContextCache]:
            return call(z, cache, method="append_block")

        def read(clean: Array, t: Array, cache: ContextCache) -> tuple[None, ContextCache]:
            return None, call(clean, cache, method="read")

        def empty(rows: int, window: int) -> ContextCache:
            shapes = [o.shape_of(o.is_near(n))[::-1] for n in range(o.depth)]
            return empty_cache(shapes, rows, window, jnp.dtype(o.dtype))

        def reading(clean: Array, t: Array) -> Array:
            return call(clean, segments, method="reading")

        def rebind(count: int) -> Denoiser:
            return self._bound(params, repeated(context, count))

        return Denoiser(
            features, partial(call, method="logits"),
            Accelerator(token_groups(), platform=self.platform),
            Blockwise(
                in_blocks, empty, append_block, read_block=read, reading=reading,
                beginning=lambda cache, first: cache._replace(begin=first), anywhere=True,
                takes_begin=True,
            ),
            rebind,
            recall=partial(call, method="recall"),
        )  # fmt: skip


def _flops(params: Params, length: int, block: int = 0, *, options: DiffusionGemma) -> float:
    """Returns the FLOPs of a forward pass per token; in blocks, of encoder and decoder.

    They are counted as in `flops.forward_flops`, as if all layers were global.
    """
    o = options
    kernels = jax.tree_util.tree_leaves_with_path(params)
    active = o.experts_per_token / o.experts if o.experts else 1.0
    matrices = sum(
        leaf.size * (active if path[-2].key.startswith("experts_") else 1.0)
        for path, leaf in kernels
        if path[-1].key == "kernel" and path[0].key != "self_conditioning"
    )
    attended = sum(o.heads * o.shape_of(o.is_near(n))[0] for n in range(o.depth))
    head = o.vocab_size * o.size
    if not block:
        return 2.0 * (matrices + head) + 4.0 * length * attended
    return 2.0 * (2 * matrices + head) + 4.0 * (length + block) * attended
