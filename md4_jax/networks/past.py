"""Attention of a causal network with a cache of keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.networks.attention import operand_of, product_of
from md4_jax.networks.rotary import Rope, rotate
from md4_jax.protocols import Array


class Past(NamedTuple):
    """Keys, after rotation, and values of the tokens so far, of texts of up to L tokens.

    keys, values  [..., B, L, H, Dh], of one layer or of all
    count         int32 [], number of tokens so far
    near          [..., B, N, D], the last N inputs of the local convolution, if there is one
    """

    keys: Array
    values: Array
    count: Array
    near: Array | None = None

    @property
    def first(self) -> Array:
        """Position of the next token to be read."""
        return self.count

    def attend(
        self,
        query: Array,
        own: tuple[Array, Array],
        segments: Array | None,
        *,
        kernel: str,
        rope: Rope,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Computes causal attention of the next P tokens to the cached tokens and themselves.

        query [B, P, H, Dh]. Returns (result, own keys after rotation and values). The text is one
        document. The cache is not changed here, so that keys of a layer are not copied.
        """
        del segments
        rows, length, heads, each = query.shape
        places = jnp.broadcast_to(self.count + jnp.arange(length), (rows, length))
        query, key = (
            rotate(x, places, length=self.keys.shape[1], rope=rope) for x in (query, own[0])
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
        """Appends tokens [..., B, P, H, Dh], for which there must be room."""
        put = jax.lax.dynamic_update_slice_in_dim
        if near is not None:
            near = jnp.concatenate([self.near, near], axis=-2)[..., near.shape[-2] :, :]
        return Past(
            put(self.keys, keys, self.count, axis=-3),
            put(self.values, values, self.count, axis=-3),
            self.count + keys.shape[-3],
            near,
        )
