"""Denoisers of the transformers: the functions of a module, bound to parameters and context."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.networks import chosen
from md4_jax.networks.blocks import KVCache, LeftToRight, Surroundings
from md4_jax.networks.cache import Cache
from md4_jax.networks.context import checked_context
from md4_jax.networks.dropout import DROPOUT, folded
from md4_jax.networks.growing import with_edits, with_gaps
from md4_jax.networks.layers import rows
from md4_jax.networks.ordered import ordered_functions, reads_in_order
from md4_jax.networks.past import Past
from md4_jax.networks.positions import check_length
from md4_jax.networks.routing import check_elsewhere, check_window
from md4_jax.networks.rows import COUNTED, Bound
from md4_jax.networks.shift import (
    remembering,
    shifted_blocks,
    shifted_features,
    shifted_halves,
)
from md4_jax.networks.trunk import TransformerModule
from md4_jax.protocols import Accelerator, Array, Blockwise, Denoiser, Params, UserError
from md4_jax.runtime.sharding import token_groups


class Binding(NamedTuple):
    """Binds parameters, context and dropout keys to the functions of the module.

    cached  whether its denoisers have `blocks`
    hides   whether they have `within`
    """

    options: Any
    module: TransformerModule
    cached: bool
    platform: str
    hides: bool = False

    def __call__(
        self,
        params: Params,
        context: Mapping[str, Array] | None = None,
        keys: Array | None = None,
        counts: Bound | None = None,
    ) -> Denoiser:
        """Returns the denoiser. Raises UserError for a context that the network cannot use."""
        # The keys also draw the noise of the forward process.
        keys = None if keys is None else folded(keys, DROPOUT)
        context = self._context(context, keys)
        return self._bound(params, context, counts)._replace(label=context.get("label"))

    def _bound(self, params: Params, context: dict[str, Array], counts: Bound | None) -> Denoiser:
        module, variables = self.module, {"params": params}
        first = () if counts is None else (counts.first,)

        if self.options.gaps:
            return self._growing(variables, context)

        def features(z: Array, t: Array, index: Array | None = None) -> Array:
            check_length(self.options, z)
            inputs = {name: x for name, x in context.items() if name != COUNTED}
            if counts is not None:
                own = context.get("segments"), context.get(COUNTED)
                inputs["evidence"] = counts.evidence(z, *own)
            at = partial(module.apply, variables, z, t, **inputs, method="features")
            at = of_all(at) if self.options.router_block else at
            if self.options.shifted:
                return shifted_features(at, inputs.get("segments"), index)
            return at(index=index)

        def where(z: Array, t: Array, marked: Array) -> Array:
            return features(z, t, marked if z.size * self.options.size >= chosen.LEAST else None)

        def unembed(h: Array) -> Array:
            return module.apply(variables, h, *first, method="unembed")

        def rebind(count: int) -> Denoiser:
            return self._bound(params, repeated(context, count), counts)

        def hiding(segments: Array) -> Denoiser:
            return self._bound(params, {**context, "segments": segments}, counts)

        def padded(h: Array) -> Array:
            return module.apply(variables, h, padded=True, method="logits")

        blocks = self._blocks(variables, context) if self.cached else None
        shortcuts = Accelerator(
            token_groups(), features, padded if self.options.pads_logits else None, self.platform,
            where if self._computes_chosen else None,
        )  # fmt: skip
        within = hiding if self.hides else None
        found = Denoiser(features, unembed, shortcuts, blocks, rebind, within=within)
        if not (self.cached and reads_in_order(self.options)):
            return found
        return found._replace(ordered=ordered_functions(self.options, module, variables, context))

    @property
    def _computes_chosen(self) -> bool:
        """Whether `features` accepts a mask of positions, and is then faster."""
        own = type(self.module) is TransformerModule
        return own and self.platform == "cpu" and chosen.suits(self.options)

    def _growing(self, variables: dict, context: dict[str, Array]) -> Denoiser:
        """Returns the denoiser of variable-length texts, where z says which tokens are present."""
        inputs = {name: x for name, x in context.items() if name != "segments"}

        def gaps(z: Array, t: Array) -> tuple[Array, Array]:
            check_length(self.options, z, 1)
            return self.module.apply(variables, z, t, **inputs, method=with_gaps)

        def edits(z: Array, t: Array) -> tuple[Array, Array, Array]:
            check_length(self.options, z, 1)
            return self.module.apply(variables, z, t, **inputs, method=with_edits)

        def unembed(h: Array) -> Array:
            return self.module.apply(variables, h, method="unembed")

        def rebind(count: int) -> Denoiser:
            return self._growing(variables, repeated(context, count))

        def features(z: Array, t: Array) -> Array:
            return gaps(z, t)[0][:, :-1]

        shortcuts = Accelerator(token_groups(), platform=self.platform)
        found = Denoiser(features, unembed, shortcuts, rebind=rebind, gaps=gaps)
        return found._replace(edits=edits) if self.options.edits else found

    def _context(self, context: Mapping[str, Array] | None, keys: Array | None) -> dict[str, Array]:
        """Returns the checked context, with some labels hidden in training, and dropout keys."""
        o = self.options
        takes = (*o.takes, COUNTED) if o.tables else o.takes
        context = checked_context(o, context, keys, takes)
        rates = (o.dropout, o.attention_dropout, o.embedding_dropout, o.lora_dropout)
        if keys is not None and (any(rates) or o.balance or o.router_z):
            context["keys"] = keys
        return context

    def _blocks(self, variables: dict, context: dict[str, Array]) -> Blockwise:
        o, label, keys = self.options, context.get("label"), context.get("keys")

        def features(z: Array, t: Array, clean: Array, block: int, clean_t: Array | float = 0.0):
            if keys is not None and o.attention_dropout:
                raise UserError(
                    f"network.attention_dropout={o.attention_dropout} must be 0 in block diffusion"
                )
            check_window(o, block)
            check_length(o, z)
            length, more = z.shape[1], -z.shape[1] % block
            segments = context.get("segments")
            if more:
                # Padding of the last block is a separate segment, which no token sees.
                segments = jnp.zeros_like(clean) if segments is None else segments
                segments = jnp.pad(segments, ((0, 0), (0, more)), constant_values=-1)
                z, clean = (jnp.pad(x, ((0, 0), (0, more))) for x in (z, clean))
            module = self.module.clone(block=block)
            h = module.apply(
                variables, z, t, clean, clean_t, segments, label, keys, method="block_features"
            )
            h = shifted_halves(h, block, segments) if o.shifted else h
            return h[:, :length]

        def empty_cache(rows: int, window: int) -> KVCache | Past:
            shape = (o.depth, rows, window, o.kv_heads, o.attention_size)
            empty, none = jnp.zeros(shape, o.dtype), jnp.int32(0)
            check_length(o, jax.ShapeDtypeStruct((rows, window), jnp.int32))
            if not o.causal:
                return KVCache(empty, empty, none)
            near = (o.depth, rows, o.local_width - 1, o.size)
            return Past(empty, empty, none, jnp.zeros(near, o.dtype) if o.local_width else None)

        def append_block(z: Array, t: Array, cache: Cache) -> tuple[Array, Cache]:
            check_window(o, z.shape[1])
            return self.module.apply(variables, z, t, cache, label, None, method="append_block")

        def around(
            z: Array, t: Array, begin: Array | int, cache: Surroundings | None
        ) -> tuple[Array, Surroundings]:
            check_elsewhere(o)
            begin = jnp.broadcast_to(jnp.asarray(begin), len(z))
            if cache is None:
                cache = Surroundings(*empty_cache(*z.shape)[:2], begin)
            cache = cache._replace(begin=begin)
            inputs = (z, t, cache, label, context.get("segments"))
            return self.module.apply(variables, *inputs, method="append_block")

        if o.causal:
            return Blockwise(None, empty_cache, append_block)
        blocks = Blockwise(
            features, empty_cache, append_block, around,
            beginning=lambda cache, first: cache._replace(begin=first),
        )  # fmt: skip
        if o.causal_context:
            blocks = self._from_the_left(blocks, variables, context)
        if o.shifted:
            return shifted_blocks(blocks, context.get("segments"))
        return remembering(blocks) if o.causal_context else blocks

    def _from_the_left(self, blocks: Blockwise, variables: dict, context: dict) -> Blockwise:
        """Returns the functions of a network with causal attention among clean tokens."""
        o, label, keys = self.options, context.get("label"), context.get("keys")

        def read_block(z: Array, t: Array, cache: KVCache) -> tuple[Array, KVCache]:
            return blocks.append_block(z, t, LeftToRight(*cache))

        def reading(clean: Array, t: Array) -> Array:
            # This needs the features of the tokens themselves, not of their left neighbours.
            causal = dataclasses.replace(o, causal=True, causal_context=False, shifted=False)
            module, segments = self.module.clone(options=causal), context.get("segments")
            return module.apply(variables, clean, t, segments, label, keys, method="features")

        ordered = ordered_functions(o, self.module, variables, {"label": label})
        return blocks._replace(
            around=None, read_block=read_block, reading=reading, anywhere=True, ordered=ordered
        )


def of_all(at: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the function of `features` whose last layer reads all positions, too."""

    def picked(index: Array | None = None) -> Array:
        return at(index=None) if index is None else rows(at(index=None), index)

    return picked


def repeated(context: dict[str, Array], count: int) -> dict[str, Array]:
    """Returns the context of a batch with each row repeated `count` times consecutively."""
    return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), context)
