"""Attention of a causal network to the tokens that it has read, whose keys and values are kept."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.networks.attention import operand_of, product_of
from md4_jax.networks.rotary import Turns, rotate
from md4_jax.protocols import Array


class Past(NamedTuple):
    """Keys, after rotation, and values of the first tokens of texts of up to L tokens.

    keys, values  [..., B, L, H, Dh], of one layer or of all
    count         int32 [], number of tokens so far
    near          [..., B, N, D], the last N inputs of a convolution, if there is one
    """

    keys: Array
    values: Array
    count: Array
    near: Array | None = None

    @property
    def first(self) -> Array:
        """Position of the first token that comes next."""
        return self.count

    def attend(
        self,
        query: Array,
        own: tuple[Array, Array],
        segments: Array | None,
        *,
        kernel: str,
        turns: Turns,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Attends from the next P tokens to those so far and to themselves, each to its left.

        query [B, P, H, Dh]. Returns (result, own keys, rotated, and values). The text is one
        document. Nothing is written here, so that no layer's keys are copied.
        """
        del segments
        rows, length, heads, each = query.shape
        places = jnp.broadcast_to(self.count + jnp.arange(length), (rows, length))
        query, key = (
            rotate(x, places, length=self.keys.shape[1], turns=turns) for x in (query, own[0])
        )
        operand = operand_of(kernel == "rounded")
        groups = query.reshape(rows, length, key.shape[2], -1, each)
        before, among = (
            product_of("bqhgd,bkhd->bhgqk", operand(groups), operand(keys))
            for keys in (self.keys, key)
        )
        known = jnp.arange(self.keys.shape[1]) < self.count
        causal = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.concatenate(
            [jnp.where(known, before, -jnp.inf), jnp.where(causal, among, -jnp.inf)], axis=-1
        )
        weights = jax.nn.softmax(scores * each**-0.5, axis=-1).astype(query.dtype)
        parts = jnp.split(weights, [self.keys.shape[1]], axis=-1)
        mixed = sum(
            product_of("bhgqk,bkhd->bqhgd", operand(part), operand(values))
            for part, values in zip(parts, (self.values, own[1]), strict=True)
        )
        return mixed.astype(query.dtype).reshape(rows, length, heads, each), (key, own[1])

    def append(self, keys: Array, values: Array, near: Array | None = None) -> "Past":
        """Puts tokens [..., B, P, H, Dh] behind those so far, of which there is room."""
        put = jax.lax.dynamic_update_slice_in_dim
        if near is not None:
            near = jnp.concatenate([self.near, near], axis=-2)[..., near.shape[-2] :, :]
        return Past(
            put(self.keys, keys, self.count, axis=-3),
            put(self.values, values, self.count, axis=-3),
            self.count + keys.shape[-3],
            near,
        )
