"""DiffusionGemma (Google, 2026): block diffusion by uniform noise with the layers of Gemma 4.

An encoder reads the text from left to right. A decoder with the same layers predicts the next
canvas, a block of noisy tokens that see one another and all keys and values of the encoder. Array
names end in their shapes: B, L, P of a canvas, D, V.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.adapters import check_adapters
from md4_jax.networks.canvas import ContextCache, canvas_mask, empty_cache, text_mask
from md4_jax.networks.context import check_choices, check_least, checked_context
from md4_jax.networks.depth import REMAT
from md4_jax.networks.gemma import KeysValues, Layer, SelfConditioning
from md4_jax.networks.linear import ADAPTERS, Normalize, embedding_init, rounded
from md4_jax.networks.products import PRODUCTS, product, products_for
from md4_jax.networks.rotary import BASE, Turns
from md4_jax.networks.unembedding import of_symbols, tied_head
from md4_jax.networks.vectors import vectors_of
from md4_jax.protocols import (
    Accelerator,
    Array,
    Blockwise,
    Conditioned,
    Denoiser,
    Network,
    Params,
    UserError,
)
from md4_jax.runtime.sharding import batch_groups

CHOICES = {
    "dtype": ("float32", "bfloat16"),
    "parameters": ("float32", "bfloat16"),
    "products": PRODUCTS,
    "remat": tuple(REMAT),
}


@dataclasses.dataclass(frozen=True)
class DiffusionGemma:
    """Options of DiffusionGemma; `build()` makes the network, which is told no time.

    kv_heads, head_dim  heads of keys and values, and features of a head, of layers of near tokens
    global_kv_heads, global_head_dim  the same of layers that see all tokens
    window         tokens that the former see in the text, with their own
    global_every   the last of each so many layers sees all tokens
    hidden         width of the feed-forward layer
    experts        number of gated layers beside it, of which a token takes `experts_per_token`
    expert_hidden  width of an expert
    local_base, rotary_base, rotary_part  base of rotary positions of near layers and of the others,
                   and the share of the latter's pairs of features that turn
    cap            logits become cap tanh(logits / cap)

    Other keys are those of `Transformer`.
    """

    takes: ClassVar[tuple[str, ...]] = ("segments",)
    feed_forward: ClassVar[str] = "geglu_tanh"
    attention: ClassVar[str] = "plain"
    initial: ClassVar[str] = "torch"
    scan_blocks: ClassVar[bool] = False
    causal: ClassVar[bool] = False
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
        """Returns whether a layer sees only near tokens."""
        return (layer + 1) % self.global_every != 0

    def shape_of(self, near: bool) -> tuple[int, int]:
        """Returns features of a head and heads of keys and values of a layer."""
        if near:
            return self.head_dim, self.kv_heads
        return self.global_head_dim, self.global_kv_heads

    def turns_of(self, near: bool) -> Turns:
        """Returns the angles of a layer's positions."""
        return Turns(self.local_base) if near else Turns(self.rotary_base, pairs=self.rotary_part)

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
        )  # fmt: skip


class DiffusionGemmaModule(nn.Module):
    """Encoder of a text and decoder of canvases, with one set of layers.

    What comes out of a layer is scaled, by other factors in the two. They are never trained.
    """

    options: Any

    def setup(self):
        o = self.options
        table = embedding_init("depth_scaled", o.size)
        self.embedding = self.param("embedding", table, (rounded(o.vocab_size), o.size))
        layer = Layer if o.remat == "none" else nn.remat(Layer, policy=REMAT[o.remat])
        self.blocks = [layer(o, o.is_near(n)) for n in range(o.depth)]
        self.final_norm = Normalize(gain=True, eps=o.norm_eps)
        self.self_conditioning = SelfConditioning(o)
        ones = nn.initializers.ones
        self.encoder_scales = self.param("encoder_scales", ones, (o.depth,))
        self.decoder_scales = self.param("decoder_scales", ones, (o.depth,))

    def everything(self, z_BxL: Array) -> Array:
        """Calls all parts, for initial values."""
        signal = self.recall(jnp.zeros((*z_BxL.shape, self.options.vocab_size)))
        return self.logits(self.block_features(Conditioned(z_BxL, signal), z_BxL, 1))

    def features(self, z: Array | Conditioned, segments_BxL: Array | None = None) -> Array:
        """Returns h [B, L, D] of a canvas without a text before it."""
        mask = None
        if segments_BxL is not None:
            mask = (segments_BxL[:, :, None] == segments_BxL[:, None, :])[:, None]
        x = self._canvas(z)
        return self._decoded(x, jnp.arange(x.shape[1])[None], lambda reach: mask)

    def block_features(
        self,
        z: Array | Conditioned,
        clean_BxL: Array,
        block: int,
        segments: Array | None = None,
        begin: Array | None = None,
    ) -> Array:
        """Returns h [B, L, D] of canvases of `block` tokens, each after the clean text before.

        begin: int32 [B], where the first canvas begins; 0 without it.
        """
        length = clean_BxL.shape[1]
        places = jnp.arange(length)[None]
        own = self._encoded(clean_BxL, places, lambda reach: text_mask(length, reach, segments))
        masks = lambda reach: canvas_mask(length, block, reach, segments, begin)  # noqa: E731
        return self._decoded(self._canvas(z), places, masks, own)

    def append_block(
        self, z: Array | Conditioned, cache: ContextCache
    ) -> tuple[Array, ContextCache]:
        """Returns h [B, P, D] of z as a canvas after the text of a cache, and the cache with z.

        A program that uses one of the two computes only that.
        """
        tokens = z.tokens if isinstance(z, Conditioned) else z
        length = tokens.shape[1]
        mask, places = partial(cache.mask, length), cache.places(length)
        before = list(zip(cache.keys, cache.values, strict=True))
        h = self._decoded(self._canvas(z), places, partial(mask, reads=False), before)
        own = self._encoded(tokens, places, partial(mask, reads=True), before)
        return h, cache.append(own)

    def recall(self, logits_BxLxV: Array) -> Array:
        """Returns the expected vectors under these logits, the signal of a `Conditioned`."""
        o, dtype = self.options, jnp.dtype(self.options.dtype)
        shares = jax.nn.softmax(logits_BxLxV.astype(jnp.float32), axis=-1).astype(dtype)
        vectors = self.embedding[: o.vocab_size].astype(dtype)
        x = product(shares.reshape(-1, o.vocab_size), vectors, o.products)
        return self._scaled(x.reshape(*logits_BxLxV.shape[:-1], -1))

    def logits(self, h: Array) -> Array:
        """Returns float32 logits [..., V] of h [..., D]."""
        o, head = self.options, tied_head(self.embedding, None, self.options)
        return o.cap * jnp.tanh(of_symbols(head, h, o.vocab_size, padded=False) / o.cap)

    def _canvas(self, z: Array | Conditioned) -> Array:
        """Returns the vectors of a canvas's tokens with their signal."""
        tokens = z.tokens if isinstance(z, Conditioned) else z
        x_BxPxD = self._vectors(tokens)
        signal = z.signal if isinstance(z, Conditioned) else jnp.zeros_like(x_BxPxD)
        return self.self_conditioning(x_BxPxD, signal.astype(x_BxPxD.dtype))

    def _vectors(self, tokens: Array) -> Array:
        return self._scaled(vectors_of(self.embedding, tokens, jnp.dtype(self.options.dtype), 0))

    def _scaled(self, x: Array) -> Array:
        # Rounded to the type of x before, as in the published code.
        return x * jnp.asarray(self.options.size**0.5, x.dtype)

    def _encoded(
        self, tokens: Array, places: Array, mask: Any, before: list[KeysValues] | None = None
    ) -> list[KeysValues]:
        """Returns the keys and values of the tokens of a text in each layer."""
        return self._layers(self._vectors(tokens), places, mask, self.encoder_scales, before)[1]

    def _decoded(
        self, x_BxPxD: Array, places: Array, mask: Any, before: list[KeysValues] | None = None
    ) -> Array:
        """Returns the features of canvases after a text with these keys and values."""
        return self.final_norm(self._layers(x_BxPxD, places, mask, self.decoder_scales, before)[0])

    def _layers(
        self,
        x_BxPxD: Array,
        places: Array,
        mask: Any,
        scales: Array,
        before: list[KeysValues] | None,
    ) -> tuple[Array, list[KeysValues]]:
        """Runs all layers; mask: reach -> what each token sees."""
        o, own = self.options, []
        masks = {True: mask(reach=o.window), False: mask(reach=None)}
        for number, layer in enumerate(self.blocks):
            scale = jax.lax.stop_gradient(scales[number])
            earlier = None if before is None else before[number]
            x_BxPxD, found = layer(x_BxPxD, places, masks[o.is_near(number)], scale, earlier)
            own.append(found)
        return x_BxPxD, own


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

    def _bound(self, params: Params, told: dict[str, Array]) -> Denoiser:
        o, segments = self.options, told.get("segments")
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

        def empty(rows: int, window: int) -> ContextCache:
            shapes = [o.shape_of(o.is_near(n))[::-1] for n in range(o.depth)]
            return empty_cache(shapes, rows, window, jnp.dtype(o.dtype))

        def rebind(count: int) -> Denoiser:
            repeat = partial(jnp.repeat, repeats=count, axis=0)
            return self._bound(params, jax.tree.map(repeat, told))

        return Denoiser(
            features, partial(call, method="logits"),
            Accelerator(batch_groups(), platform=self.platform),
            Blockwise(
                in_blocks, empty, append_block,
                beginning=lambda cache, first: cache._replace(begin=first),
            ),
            rebind,
            recall=partial(call, method="recall"),
        )  # fmt: skip


def _flops(params: Params, length: int, block: int = 0, *, options: DiffusionGemma) -> float:
    """Returns the FLOPs of a forward pass per token; in blocks, of encoder and decoder.

    Those of `flops.forward_flops`: all tokens are counted as seen by all layers.
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
