"""Modules of the partition network. Array names end in their shapes: B, P, M, H, Dh, D.

A token attends to tokens of its own group, and is predicted from those of the other group. M slots
contain the start, a learned vector that all tokens may attend to, and tokens. There are P query
positions.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from md4_jax.networks.attention import Form, attend_where, rounding
from md4_jax.networks.depth import REMAT
from md4_jax.networks.dropout import EMBEDDING, folded, kept, layer_keys, scaled
from md4_jax.networks.feed_forward import FeedForward
from md4_jax.networks.keys import repeated
from md4_jax.networks.layers import FIRST, SECOND, dropped, normalized, whole
from md4_jax.networks.linear import Linear, Normalize
from md4_jax.networks.rotary import rotate
from md4_jax.networks.trunk import TransformerModule
from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, constrain

NO_CONDITION = (None,) * 3


class Slots(NamedTuple):
    """Input of the encoder; slot 0 is the start.

    symbols  int32 [B, M]; the start uses the mask's id, which no token needs
    places   int32 [B, M], positions: 0 for the start and n + 1 for the token n
    own      bool [B or 1, M, M], the slots that each slot attends to in the encoder
    """

    symbols: Array
    places: Array
    own: Array


class GroupAttention(nn.Module):
    """Attention from x to a memory, with rotary positions at the places of both.

    length: a number above all places. asks: whether queries have a bias
    """

    options: Any
    length: int
    zero_output: bool = False
    asks: bool = False

    @nn.compact
    def __call__(
        self, x_BxPxD: Array, places_BxP: Array, memory_BxMxD: Array, at_BxM: Array, seen: Array
    ) -> Array:
        o, dtype, each = self.options, jnp.dtype(self.options.dtype), self.options.attention_size

        def heads(name: str, x: Array, count: int, bias: bool) -> Array:
            layer = Linear(
                count * each, dtype, bias=bias, initial=o.initial, products=o.products,
                rank=o.lora_rank, alpha=o.lora_alpha, name=name,
            )  # fmt: skip
            return layer(x).reshape(*x.shape[:2], count, each)

        query = heads("query", x_BxPxD, o.heads, o.qkv_bias or self.asks)
        key, value = (heads(n, memory_BxMxD, o.kv_heads, o.qkv_bias) for n in ("key", "value"))
        if o.qk_norm:
            query = Normalize(gain=True, eps=o.norm_eps, name="query_norm")(query)
            key = Normalize(gain=True, eps=o.norm_eps, name="key_norm")(key)
        query, key, value = (
            constrain(a, BATCH_AXES, None, "tensor", None) for a in (query, key, value)
        )
        query = rotate(query, places_BxP, length=self.length, rope=o.rope)
        key = rotate(key, at_BxM, length=self.length, rope=o.rope)
        key, value = (repeated(a, o.heads) for a in (key, value))
        form = Form(rounded=rounding(o.attention, o.products) == "rounded")
        mixed = attend_where(query, key, value, seen[:, None], form)
        out = Linear(
            o.size, dtype, self.zero_output, initial=o.initial, products=o.products,
            rank=o.lora_rank, alpha=o.lora_alpha, name="out",
        )  # fmt: skip
        return out(mixed.reshape(*x_BxPxD.shape[:2], -1))


class GroupBlock(nn.Module):
    """Pre-norm block with attention to a memory, or to its own input if there is none."""

    options: Any
    length: int

    @nn.compact
    def __call__(
        self,
        x_BxPxD: Array,
        places_BxP: Array,
        memory_BxMxD: Array | None,
        at_BxM: Array,
        seen: Array,
        keys: Array | None,
    ) -> tuple[Array, None]:
        o = self.options
        zero = o.initial == "lecun"
        y_BxPxD = normalized(o, x_BxPxD, NO_CONDITION, "attention_norm")
        memory = y_BxPxD if memory_BxMxD is None else memory_BxMxD
        attention = GroupAttention(o, self.length, zero, name="attention")
        y_BxPxD = attention(y_BxPxD, places_BxP, memory, at_BxM, seen)
        x_BxPxD = x_BxPxD + dropped(o, y_BxPxD, keys, FIRST, x_BxPxD.shape, whole)
        y_BxPxD = normalized(o, x_BxPxD, NO_CONDITION, "feed_forward_norm")
        feed_forward = FeedForward(o, zero, name="feed_forward")
        y_BxPxD = feed_forward(y_BxPxD, keys, x_BxPxD.shape[1], whole)
        x_BxPxD = x_BxPxD + dropped(o, y_BxPxD, keys, SECOND, x_BxPxD.shape, whole)
        return constrain(x_BxPxD, BATCH_AXES, None, None), None


def stacked(o: Any, count: int, length: int, name: str):
    """Returns the function that applies `count` blocks: (x, keys of each, *rest) -> x."""
    block = GroupBlock
    if o.remat != "none":
        block = nn.remat(block, prevent_cse=not o.scan_blocks, policy=REMAT[o.remat])
    if o.scan_blocks and count:
        block = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(*(nn.broadcast,) * 4, 0),
            length=count,
        )
        scanned = block(o, length, name=name)
        return lambda x, keys, *rest: scanned(x, *rest, keys)[0]
    blocks = [block(o, length, name=f"{name}_{n}") for n in range(count)]

    def apply(x: Array, keys: Array | None, *rest: Array | None) -> Array:
        for n, one in enumerate(blocks):
            x, _ = one(x, *rest, None if keys is None else keys[n])
        return x

    return apply


class PartitionModule(TransformerModule):
    """Encoder within groups, swap layer, decoder across groups; options of `Partition`.

    Embedding, last norm and head are those of the transformer.
    """

    def __call__(self, z_BxL: Array, t_B: Array) -> Array:
        del t_B
        length = z_BxL.shape[1]
        places = jnp.broadcast_to(jnp.arange(length + 1), (len(z_BxL), length + 1))
        symbols = jnp.pad(z_BxL, ((0, 0), (1, 0)), constant_values=self.options.vocab_size)
        seen = jnp.ones((1, length + 1, length + 1), bool)
        return self.unembed(self.groups(Slots(symbols, places, seen), places[:, 1:], seen[:, 1:]))

    @nn.compact
    def groups(
        self,
        slots: Slots,
        places_BxP: Array,
        read: Array,
        keys: Array | None = None,
        length: int = 0,
    ) -> Array:
        """Returns h [B, P, D] of the query positions.

        places  n + 1 for the token n
        read    bool [B or 1, P, M], the slots from which each is predicted
        keys    [B]: for dropout; None: nothing is dropped
        length  a number above all places; 0: the number of slots
        """
        o, length = self.options, length or slots.symbols.shape[1]
        first, second = o.encoder_depth, o.decoder_layers
        each = layer_keys(keys, first + second)
        one, two = (None, None) if each is None else (each[:first], each[first:])
        x_BxMxD = self._embedded_slots(slots.symbols, keys)
        encoder = stacked(o, first, length, "encoder")
        x_BxMxD = encoder(x_BxMxD, one, slots.places, None, slots.places, slots.own)
        memory_BxMxD = normalized(o, x_BxMxD, NO_CONDITION, "memory_norm")
        asking_BxPxD = sinusoids(places_BxP, o.size).astype(self.compute_dtype)
        swap = GroupAttention(o, length, asks=True, name="swap_attention")
        # Without queries of their own, all positions of a fully masked text would be equal, since
        # they attend only to the start.
        h_BxPxD = asking_BxPxD + swap(asking_BxPxD, places_BxP, memory_BxMxD, slots.places, read)
        decoder = stacked(o, second, length, "decoder")
        h_BxPxD = decoder(h_BxPxD, two, places_BxP, memory_BxMxD, slots.places, read)
        return self._headed(h_BxPxD, None)

    def _embedded_slots(self, symbols_BxM: Array, keys: Array | None) -> Array:
        """Embeds the symbols, with dropout except for the start."""
        o, x_BxMxD = self.options, self.embedded(symbols_BxM, None)
        if keys is not None and o.embedding_dropout:
            keep = kept(folded(keys, EMBEDDING), o.embedding_dropout, x_BxMxD.shape[1:])
            tokens = scaled(x_BxMxD, keep, o.embedding_dropout)
            x_BxMxD = jnp.concatenate([x_BxMxD[:, :1], tokens[:, 1:]], axis=1)
        return x_BxMxD


def sinusoids(places: Array, size: int) -> Array:
    """Returns cosines and sines of places at frequencies from 1 to 1e-4, float32 [..., size]."""
    frequency = 10_000.0 ** (-jnp.arange(size // 2, dtype=jnp.float32) / (size // 2))
    angle = places[..., None].astype(jnp.float32) * frequency
    waves = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    return jnp.pad(waves, [(0, 0)] * places.ndim + [(0, size % 2)])
