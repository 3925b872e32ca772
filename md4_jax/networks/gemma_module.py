"""Linen module of DiffusionGemma: an encoder of a text and a decoder of canvases.

Array names end in their shapes: B, L, P of a canvas, D, V. Options are those of `DiffusionGemma`.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.canvas import ContextCache, canvas_mask, text_mask
from md4_jax.networks.depth import REMAT
from md4_jax.networks.gemma import KeysValues, Layer, SelfConditioning
from md4_jax.networks.linear import Normalize, embedding_init, rounded
from md4_jax.networks.products import product
from md4_jax.networks.unembedding import of_symbols, tied_head
from md4_jax.networks.vectors import vectors_of
from md4_jax.protocols import Array, Conditioned


class DiffusionGemmaModule(nn.Module):
    """Encoder of a text and decoder of canvases with shared layers.

    The output of a layer is scaled. The factors of encoder and decoder differ and are not trained.
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
        """Calls all parts, to initialise their parameters."""
        signal = self.recall(jnp.zeros((*z_BxL.shape, self.options.vocab_size)))
        return self.logits(self.block_features(Conditioned(z_BxL, signal), z_BxL, 1))

    def features(self, z: Array | Conditioned, segments_BxL: Array | None = None) -> Array:
        """Returns h [B, L, D] of a canvas without preceding text."""
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
        """Returns h [B, L, D] of canvases of `block` tokens, each given the clean text before it.

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
        """Returns (h [B, P, D] of z as a canvas after the cached text, cache with z added)."""
        tokens = z.tokens if isinstance(z, Conditioned) else z
        length, before = tokens.shape[1], list(zip(cache.keys, cache.values, strict=True))
        mask = partial(cache.mask, length, reads=False)
        h = self._decoded(self._canvas(z), cache.places(length), mask, before)
        return h, self.read(tokens, cache)

    def read(self, tokens_BxP: Array, cache: ContextCache) -> ContextCache:
        """Returns the cache with these tokens of the text added."""
        length, before = tokens_BxP.shape[1], list(zip(cache.keys, cache.values, strict=True))
        mask = partial(cache.mask, length, reads=True)
        return cache.append(self._encoded(tokens_BxP, cache.places(length), mask, before))

    def reading(self, tokens_BxL: Array, segments: Array | None = None) -> Array:
        """Returns the encoder's h [B, L, D]; the features of a token predict the next one."""
        length, x = tokens_BxL.shape[1], self._vectors(tokens_BxL)
        mask = lambda reach: text_mask(length, reach, segments)  # noqa: E731
        places = jnp.arange(length)[None]
        return self.final_norm(self._layers(x, places, mask, self.encoder_scales, None)[0])

    def recall(self, logits_BxLxV: Array) -> Array:
        """Returns the expected vectors under these logits, the signal of a `Conditioned`."""
        o, dtype = self.options, jnp.dtype(self.options.dtype)
        shares = jax.nn.softmax(logits_BxLxV.astype(jnp.float32), axis=-1).astype(dtype)
        vectors = self.embedding[: o.vocab_size].astype(dtype)
        return self._scaled(product(shares, vectors, o.products))

    def logits(self, h: Array) -> Array:
        """Returns float32 logits [..., V] of h [..., D]."""
        o, head = self.options, tied_head(self.embedding, None, self.options)
        return o.cap * jnp.tanh(of_symbols(head, h, o.vocab_size, padded=False) / o.cap)

    def _canvas(self, z: Array | Conditioned) -> Array:
        """Returns the vectors of a canvas's tokens with the self-conditioning signal."""
        tokens = z.tokens if isinstance(z, Conditioned) else z
        x_BxPxD = self._vectors(tokens)
        signal = z.signal if isinstance(z, Conditioned) else jnp.zeros_like(x_BxPxD)
        return self.self_conditioning(x_BxPxD, signal.astype(x_BxPxD.dtype))

    def _vectors(self, tokens: Array) -> Array:
        return self._scaled(vectors_of(self.embedding, tokens, jnp.dtype(self.options.dtype), 0))

    def _scaled(self, x: Array) -> Array:
        # Rounded to the type of x first, as in the published code.
        return x * jnp.asarray(self.options.size**0.5, x.dtype)

    def _encoded(
        self, tokens: Array, places: Array, mask: Any, before: list[KeysValues] | None = None
    ) -> list[KeysValues]:
        """Returns the keys and values of the tokens of a text in each layer."""
        return self._layers(self._vectors(tokens), places, mask, self.encoder_scales, before)[1]

    def _decoded(
        self, x_BxPxD: Array, places: Array, mask: Any, before: list[KeysValues] | None = None
    ) -> Array:
        """Returns the features of canvases given the keys and values of the text before them."""
        return self.final_norm(self._layers(x_BxPxD, places, mask, self.decoder_scales, before)[0])

    def _layers(
        self,
        x_BxPxD: Array,
        places: Array,
        mask: Any,
        scales: Array,
        before: list[KeysValues] | None,
    ) -> tuple[Array, list[KeysValues]]:
        """Applies all layers; mask: reach -> attention mask."""
        o, own = self.options, []
        masks = {True: mask(reach=o.window), False: mask(reach=None)}
        for number, layer in enumerate(self.blocks):
            scale = jax.lax.stop_gradient(scales[number])
            earlier = None if before is None else before[number]
            x_BxPxD, found = layer(x_BxPxD, places, masks[o.is_near(number)], scale, earlier)
            own.append(found)
        return x_BxPxD, own
