"""Linen module of the encoder-decoder for block diffusion (E2D2, arXiv:2510.22852).

Array names end in their shapes: B, L, P of a block, D. Options are those of `EncoderDecoder`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.networks.blocks import KVCache, attend_blocks, attend_cached
from md4_jax.networks.depth import REMAT, bound, stack
from md4_jax.networks.dropout import layer_keys
from md4_jax.networks.keys import for_queries
from md4_jax.networks.layers import norm, rows
from md4_jax.networks.rotary import Rope, rotate
from md4_jax.networks.trunk import TransformerModule
from md4_jax.protocols import Array

KeysValues = tuple[Array, Array]
Step = Callable[[Any, Array, Any], tuple[Array, Any]]


class WholeText(NamedTuple):
    """Keys and values for a layer of encoder or decoder, in one pass over all blocks of a text.

    block         number of tokens of a block
    keys, values  [B, L, H, Dh], before rotation, of the clean tokens; a noisy block attends to
                  itself and to clean tokens of earlier blocks. None: a block attends to itself and
                  to earlier blocks of the same text
    """

    block: int
    keys: Array | None = None
    values: Array | None = None

    def attend(
        self, query: Array, own: KeysValues, segments: Array | None, *, kernel: str, rope: Rope
    ) -> tuple[Array, KeysValues]:
        """Attends from all queries [B, L, H, Dh]; returns (result, own keys and values)."""

        def ready(key: Array, value: Array) -> KeysValues:
            heads = query.shape[2]
            return for_queries(rotate(key, rope=rope), heads), for_queries(value, heads)

        clean = None if self.keys is None else ready(self.keys, self.values)
        mixed = attend_blocks(
            rotate(query, rope=rope), ready(*own), clean,
            block=self.block, segments=segments, kernel=kernel,
        )  # fmt: skip
        return mixed, own


class SeveralBlocks(NamedTuple):
    """A ring buffer for several blocks at once, each of which sees itself and earlier ones.

    The text so far, with these blocks, is not longer than the buffer.
    """

    cache: KVCache
    block: int

    @property
    def first(self) -> Array:
        """Position in its text of the next token to be read, [] or [B, 1]."""
        return self.cache.first

    def attend(
        self,
        query: Array,
        own: tuple[Array, Array],
        segments: Array | None,
        *,
        kernel: str,
        rope: Rope,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Attends from each block to the cache, to itself and to earlier blocks."""
        del segments
        step = self.block
        return attend_cached(query, own, self.cache, kernel=kernel, rope=rope, step=step), own


class KeysAlone:
    """Takes the place of a cache where only the layer's own keys and values are needed."""

    def attend(
        self, query: Array, own: KeysValues, segments: Array | None, **form: Any
    ) -> tuple[Array, KeysValues]:
        """Returns the queries in place of a result, which is not used."""
        return query, own


class EncoderDecoderModule(TransformerModule):
    """Encoder of clean blocks, and decoder of noisy blocks that attends to the encoder's output.

    The transformer's `blocks` are the encoder; its last norm and its head belong to the decoder.
    """

    def setup(self):
        super().setup()
        o = self.options
        if not o.shared_blocks:
            self.decoder_blocks = stack(o.of_decoder, 0, self._at_once)
            if o.reads_features:
                self.encoder_norm = norm(o, conditioned=False)

    def everything(self, z_BxL: Array) -> Array:
        """Calls all parts, to initialise their parameters."""
        x_BxLxD = _called(self.blocks, self.embedded(z_BxL, None))
        if not self.options.shared_blocks:
            x_BxLxD = _called(self.decoder_blocks, x_BxLxD)
        return self.logits(self._headed(self._normal(x_BxLxD), None))

    def features(
        self,
        z_BxL: Array,
        t_B: Array,
        segments: Array | None = None,
        keys: Array | None = None,
        index: Array | None = None,
    ) -> Array:
        """Returns h [B, L, D] of z as a single block without context, or [B, P, D] at index."""
        del t_B

        def decode(layer: Any, x: Array, own: Array | None) -> tuple[Array, None]:
            return bound(self.options, 0, layer)(x, None, segments, own)[0], None

        x_BxLxD = self.embedded(z_BxL, None, keys)
        h_BxLxD, _ = self._through(self._decoder(), decode, x_BxLxD, self._keys(keys)[1])
        return self._headed(h_BxLxD if index is None else rows(h_BxLxD, index), None)

    def block_features(
        self,
        z_BxL: Array,
        t_BxG: Array,
        clean_BxL: Array,
        clean_t: Array,
        segments: Array | None = None,
        label: Array | None = None,
        keys: Array | None = None,
    ) -> Array:
        """Returns h [B, L, D] of z; a block attends to itself and to earlier blocks of clean."""
        del t_BxG, clean_t, label
        o, (first, second) = self.options, self._keys(keys)
        both_Bx2L = jnp.concatenate([z_BxL, clean_BxL], axis=1)
        x_BxLxD, clean_BxLxD = jnp.split(self.embedded(both_Bx2L, None, keys), 2, axis=1)

        def encode(layer: Any, x: Array, own: Array | None) -> tuple[Array, Any]:
            return bound(o, 0, layer)(x, None, segments, own, cache=WholeText(self.block))

        def decode(layer: Any, x: Array, part: tuple) -> tuple[Array, None]:
            if o.reads_features:
                both = jnp.concatenate([x, memory], axis=1)
                return bound(o, self.block, layer, last=True)(both, None, segments, part)[0], None
            own, made = part
            seen = WholeText(self.block, **made)
            return bound(o, 0, layer)(x, None, segments, own, cache=seen)[0], None

        h_BxLxD, made = self._through(self._encoder(), encode, clean_BxLxD, first)
        memory = self._normal(h_BxLxD)
        each = second if o.reads_features else (second, self._of_decoder(made))
        h_BxLxD, _ = self._through(self._decoder(), decode, x_BxLxD, each)
        return self._headed(h_BxLxD, None)

    def append_block(
        self, z_BxP: Array, t_B: Array, cache: KVCache, label: Array | None, segments: Array | None
    ) -> tuple[Array, KVCache]:
        """Returns (h [B, P, D] of a noisy block z, cache to which z is added as clean tokens)."""
        del t_B, label, segments
        made = {"keys": cache.keys, "values": cache.values}

        def step(layer: Any, x: Array, part: dict[str, Array]) -> tuple[Array, None]:
            own = cache._replace(**part)
            return bound(self.options, 0, layer)(x, None, None, cache=own)[0], None

        x_BxPxD = self.embedded(z_BxP, None)
        h_BxPxD, _ = self._through(self._decoder(), step, x_BxPxD, self._of_decoder(made))
        return self._headed(h_BxPxD, None), self.read(z_BxP, cache)

    def read(self, clean_BxP: Array, cache: KVCache, block: int = 0) -> KVCache:
        """Encodes clean tokens and returns the cache to which they are added.

        block: the tokens are several blocks of this size; 0: they are one
        """
        o = self.options
        before = {"keys": cache.keys[: o.depth], "values": cache.values[: o.depth]}

        def encode(layer: Any, x: Array, part: dict[str, Array]) -> tuple[Array, Any]:
            own = cache._replace(**part)
            own = SeveralBlocks(own, block) if block else own
            return bound(o, 0, layer)(x, None, None, cache=own)

        def project(layer: Any, x: Array, part: None) -> tuple[Array, Any]:
            return x, bound(o, 0, layer)(x, None, None, cache=KeysAlone())[1]

        x_BxPxD = self.embedded(clean_BxP, None)
        h_BxPxD, made = self._through(self._encoder(), encode, x_BxPxD, before)
        if o.reads_features:
            _, own = self._through(self._decoder(), project, self._normal(h_BxPxD), None)
            made = jax.tree.map(lambda *x: jnp.concatenate(x), made, own)
        return cache.append(**made)

    def _normal(self, h_BxLxD: Array) -> Array:
        """Normalises the encoder's last features, if the decoder reads them."""
        o = self.options
        if not o.reads_features:
            return h_BxLxD
        return self.final_norm(h_BxLxD) if o.shared_blocks else self.encoder_norm(h_BxLxD)

    def _keys(self, keys: Array | None) -> tuple[Array | None, Array | None]:
        """Returns the dropout keys of the encoder's and of the decoder's layers, each [., B]."""
        o = self.options
        each = layer_keys(keys, o.depth + o.decoder_depth)
        return (None, None) if each is None else (each[: o.depth], each[o.depth :])

    def _of_decoder(self, made: dict[str, Array]) -> dict[str, Array]:
        """Selects the keys and values that the decoder's layers read from those of all layers."""
        return {name: x[-self.options.decoder_depth :] for name, x in made.items()}

    def _encoder(self) -> Any:
        return self._layers("blocks", 0, self.options.depth)

    def _decoder(self) -> Any:
        o = self.options
        if o.shared_blocks:
            return self._layers("blocks", o.depth - o.decoder_depth, o.decoder_depth)
        return self._layers("decoder_blocks", 0, o.decoder_depth)

    def _layers(self, name: str, first: int, count: int) -> Any:
        """Returns the parameters of layers: with a leading layer axis, or a list if unrolled."""
        params = self.variables["params"]
        if self.options.scan_blocks:
            return jax.tree.map(lambda x: x[first : first + count], params[name])
        return [params[f"{name}_{number}"] for number in range(first, first + count)]

    def _through(self, layers: Any, step: Step, x: Array, each: Any) -> tuple[Array, Any]:
        """Applies `step` layer by layer: (parameters, x, part of `each`) -> (x, output)."""
        o = self.options

        def call(x: Array, layer: tuple) -> tuple[Array, Any]:
            return step(layer[0], x, layer[1])

        if o.remat != "none":
            call = jax.checkpoint(call, prevent_cse=not o.scan_blocks, policy=REMAT[o.remat])
        if o.scan_blocks:
            count = len(jax.tree.leaves(layers)[0])
            return jax.lax.scan(call, x, (layers, each), unroll=min(self._at_once, count))
        found = []
        for number, params in enumerate(layers):
            part = jax.tree.map(lambda a, n=number: a[n], each)
            x, made = call(x, (params, part))
            found.append(made)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *found)


def _called(blocks: Any, x_BxLxD: Array) -> Array:
    """Applies the modules of blocks, one scanned module or a list, to x."""
    for block in blocks if isinstance(blocks, list | tuple) else [blocks]:
        x_BxLxD, _ = block(x_BxLxD, None, None, None)
    return x_BxLxD
