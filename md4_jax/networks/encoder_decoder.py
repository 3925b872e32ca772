"""Encoder-decoder for block diffusion (E2D2, arXiv:2510.22852): docs/families/e2d2.md."""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.networks.binding import Binding
from md4_jax.networks.blocks import KVCache
from md4_jax.networks.context import check_choices, check_fixed, check_least
from md4_jax.networks.depth import unrolled
from md4_jax.networks.encoder_decoder_module import EncoderDecoderModule
from md4_jax.networks.flops import weights
from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import Array, Blockwise, Denoiser, Network, Params, UserError

# Keys of the transformer that this network does not support, with their only values.
WITHOUT = {
    "time_conditioning": False, "causal": False, "causal_context": False, "shifted": False,
    "local_width": 0, "tables": 0, "gaps": False, "edits": False, "experts": 0, "dense_layers": 0,
    "classes": 0, "attention_dropout": 0.0, "positions": 0, "query_scaling": (),
    "output": "categorical",
}  # fmt: skip
FEATURES, KEYS_VALUES = "features", "keys_values"


@dataclasses.dataclass(frozen=True)
class EncoderDecoder(Transformer):
    """Options of the encoder-decoder; `build()` makes the network. Those of Transformer, and

    depth          number of layers of the encoder, which reads clean tokens; each attends to its
                   own block of the text and to earlier ones
    decoder_depth  number of layers of the decoder, which reads a noisy block and attends to the
                   encoder's representation of earlier blocks
    decoder_reads  features: each decoder layer computes its own keys and values from the encoder's
                   final features; keys_values: each decoder layer attends to the keys and values of
                   one of the last `decoder_depth` encoder layers
    shared_blocks  the decoder layers are the last layers of the encoder, with shared parameters

    The network has no time input.
    """

    takes: ClassVar[tuple[str, ...]] = ("segments",)

    time_conditioning: bool = False
    decoder_depth: int = 2
    decoder_reads: str = FEATURES
    shared_blocks: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_choices(self, {"decoder_reads": (FEATURES, KEYS_VALUES)})
        check_least(self, depth=1, decoder_depth=1)
        check_fixed(self, "encoder_decoder", WITHOUT)
        one_each = self.shared_blocks or self.decoder_reads == KEYS_VALUES
        if one_each and self.decoder_depth > self.depth:
            raise UserError(
                f"network.decoder_depth={self.decoder_depth} must be at most "
                f"network.depth={self.depth}: with network.shared_blocks or "
                "network.decoder_reads='keys_values' each block of the decoder uses a block of "
                "the encoder"
            )

    @property
    def of_decoder(self) -> "EncoderDecoder":
        """Options of the decoder's layers."""
        return dataclasses.replace(
            self, depth=self.decoder_depth, decoder_reads=FEATURES, shared_blocks=False
        )

    @property
    def reads_features(self) -> bool:
        """Whether decoder layers compute their own keys and values from features."""
        return self.decoder_reads == FEATURES

    @property
    def cached_layers(self) -> int:
        """Number of layers whose keys and values a sampler caches.

        The encoder's come first. The decoder attends to those of the last `decoder_depth` layers.
        """
        return self.depth + self.decoder_depth * self.reads_features

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options = self.resolved(platform)
        module = EncoderDecoderModule(options, unroll=unrolled(options, platform))

        def init(key: Array) -> Params:
            # Not unrolled, as for `Transformer`.
            rolled, tokens = EncoderDecoderModule(options), jnp.zeros((1, 2), jnp.int32)
            return rolled.init(key, tokens, method="everything")["params"]

        return Network(
            init, EncoderDecoderBinding(options, module, True, platform), time_free=True,
            blockwise=True, flops=functools.partial(_flops, options=options),
            padding=self._padding(), products=options.products, adapters=self.adapters,
            parameters=options.parameters, encodes=True,
        )  # fmt: skip


class EncoderDecoderBinding(Binding):
    """Binding of a transformer with an encoder that reads the clean blocks."""

    def _bound(self, params: Params, context: dict[str, Array], counts: None) -> Denoiser:
        return super()._bound(params, context, counts)._replace(ordered=None, within=None)

    def _blocks(self, variables: dict, context: dict[str, Array]) -> Blockwise:
        o = self.options

        def empty_cache(rows: int, window: int) -> KVCache:
            shape = (o.cached_layers, rows, window, o.kv_heads, o.attention_size)
            return KVCache(jnp.zeros(shape, o.dtype), jnp.zeros(shape, o.dtype), jnp.int32(0))

        def read_block(clean: Array, t: Array, cache: KVCache) -> tuple[None, KVCache]:
            return None, self.module.apply(variables, clean, cache, method="read")

        def read_blocks(clean: Array, cache: KVCache, block: int) -> KVCache:
            return self.module.apply(variables, clean, cache, block, method="read")

        blocks = super()._blocks(variables, context)
        return blocks._replace(
            empty_cache=empty_cache, read_block=read_block, read_blocks=read_blocks, around=None
        )


def _flops(params: Params, length: int, block: int = 0, *, options: EncoderDecoder) -> float:
    """Returns the FLOPs of a forward pass per token; without blocks, of the decoder alone.

    They are counted as in `flops.forward_flops`: 2 for each weight that is applied to a token. In
    blocks, the encoder is applied to the clean token, and so are the decoder's key and value
    matrices if the decoder reads features. Each of the two tokens sees (L + block) / 2 others.
    """
    o, kernels = options, weights(params)
    attended = o.heads * o.attention_size
    of_encoder = sum(count for path, count in kernels if path[0].startswith("blocks"))
    own = [(path, n) for path, n in kernels if path[0].startswith("decoder_blocks")]
    if o.shared_blocks:
        share = o.decoder_depth / o.depth
        own = [(path, n * share) for path, n in kernels if path[0].startswith("blocks")]
    of_decoder = sum(count for _, count in own)
    head = sum(count for path, count in kernels if path[0] == "head")
    if o.tied and "embedding" in params:  # the trained parameters lack a frozen one
        head += o.vocab_size * params["embedding"].shape[-1]
    if not block:
        return 2.0 * (of_decoder + head) + 4.0 * length * attended * o.decoder_depth
    again = sum(count for path, count in own if path[-2] in ("key", "value"))
    matrices = of_encoder + of_decoder + head + again * o.reads_features
    return 2.0 * matrices + 2.0 * (length + block) * attended * (o.depth + o.decoder_depth)
