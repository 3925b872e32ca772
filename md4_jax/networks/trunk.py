"""Linen module of the transformer. Array names end in their shapes: B, L, D, G groups."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.blocks import KVCache
from md4_jax.networks.layers import (
    Block,
    Normalize,
    TimeEmbedding,
    modulation,
    noisy_half,
)
from md4_jax.networks.ordinal import TruncatedLogistic
from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, constrain

# Vocabulary sizes are rounded up to this multiple, so that mesh axes divide them.
ROW_MULTIPLE = 128

# What the backward pass of a block reuses, by name.
REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def rounded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


class TransformerModule(nn.Module):
    """Maps tokens z [B, L] in 0..V and times t [B] to features [B, L, D] and logits [B, L, V].

    options   those of `Transformer`
    segments  int32 [B, L]: a token sees only tokens of its own segment
    label     int32 [B]: a class in 0..classes-1, any other number for none
    """

    options: Any
    block: int = 0

    def setup(self):
        o = self.options
        self.compute_dtype = jnp.dtype(o.dtype)
        self.embedding = self.param(
            "embedding", nn.initializers.normal(1.0), (rounded(o.vocab_size + 1), o.size)
        )
        if o.time_conditioning:
            self.time = TimeEmbedding(o.size, self.compute_dtype)
        if o.classes:
            table = nn.initializers.normal(1.0)
            self.label_table = self.param("label_table", table, (o.classes + 1, o.size))
        if self.is_conditioned:
            self.final_modulation = FinalModulation(self.compute_dtype)
        self.final_norm = Normalize(gain=not self.is_conditioned)
        if o.is_ordinal:
            self.head = TruncatedLogistic(o.vocab_size)
        else:
            self.head = nn.Dense(
                rounded(o.vocab_size),
                kernel_init=nn.initializers.zeros,
                dtype=self.compute_dtype,
                use_bias=True,
            )
        block = Block
        if o.remat != "none":
            block = nn.remat(Block, prevent_cse=not o.scan_blocks, policy=REMAT[o.remat])
        arguments = (
            o.heads, o.hidden, o.qk_norm, o.local_width, o.causal, self.compute_dtype,
            o.attention, self.block,
        )  # fmt: skip
        self.block_arguments = arguments
        if o.scan_blocks:
            self.blocks = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=o.depth,
            )(*arguments)
        else:
            lasts = [False] * (o.depth - 1) + [True]
            self.blocks = [block(*arguments, last) for last in lasts]

    @property
    def is_conditioned(self) -> bool:
        """Whether every layer is given the time or the class of the sequence."""
        return self.options.time_conditioning or self.options.classes > 0

    def __call__(self, z_BxL: Array, t_B: Array) -> Array:
        return self.unembed(self.features(z_BxL, t_B))

    def features(
        self,
        z_BxL: Array,
        t_B: Array,
        segments: Array | None = None,
        label: Array | None = None,
        index: Array | None = None,
    ) -> Array:
        """Returns h [B, L, D], or with index [B, P] the features of these positions, [B, P, D].

        The last block computes only keys and values for the other positions.
        """
        return self._trunk(z_BxL, self._condition(t_B[:, None], label), segments, index)

    def block_features(
        self,
        z_BxL: Array,
        t_BxG: Array,
        clean_BxL: Array,
        clean_t: Array,
        segments: Array | None = None,
        label: Array | None = None,
    ) -> Array:
        """Returns h [B, L, D] of z, where a block sees itself and the earlier blocks of clean.

        t holds a time for each of the G = L / block blocks, and clean_t is the time of clean. One
        pass of length 2 L reads both. Its last layer computes only keys and values for clean.
        """
        both_Bx2L = jnp.concatenate([z_BxL, clean_BxL], axis=1)
        times = jnp.concatenate([t_BxG, jnp.full_like(t_BxG, clean_t)], axis=1)
        return self._trunk(both_Bx2L, self._condition(times, label), segments, None)

    def _condition(self, t_BxG: Array, label_B: Array | None) -> Array | None:
        """Embeds the time of each group, plus the class: [B, G, D]."""
        o, condition_BxGxD = self.options, None
        if o.time_conditioning:
            condition_BxGxD = self.time(t_BxG)
        if o.classes:
            if label_B is None:
                label_B = jnp.full(len(t_BxG), o.classes)
            known_B = (label_B >= 0) & (label_B < o.classes)
            row_BxD = self.label_table[jnp.where(known_B, label_B, o.classes)]
            row_Bx1xD = row_BxD.astype(self.compute_dtype)[:, None]
            if condition_BxGxD is None:
                return jnp.broadcast_to(row_Bx1xD, (*t_BxG.shape, o.size))
            condition_BxGxD = condition_BxGxD + row_Bx1xD
        return condition_BxGxD

    def _trunk(
        self,
        z_BxL: Array,
        condition_BxGxD: Array | None,
        segments: Array | None,
        index: Array | None,
    ) -> Array:
        x_BxLxD = self._embedded(z_BxL)
        if self.options.scan_blocks and (index is not None or self.block):
            x_BxLxD = self._gathered(x_BxLxD, condition_BxGxD, segments, index)
        elif self.options.scan_blocks:
            x_BxLxD, _ = self.blocks(x_BxLxD, condition_BxGxD, segments)
        else:
            for block in self.blocks[:-1]:
                x_BxLxD, _ = block(x_BxLxD, condition_BxGxD, segments)
            x_BxLxD, _ = self.blocks[-1](x_BxLxD, condition_BxGxD, segments, index)
        if self.block and condition_BxGxD is not None:
            condition_BxGxD = noisy_half(condition_BxGxD)
        return self._headed(x_BxLxD, condition_BxGxD)

    def _embedded(self, z_BxL: Array) -> Array:
        # Rows stay whole: otherwise devices would look up parts of rows and exchange them.
        table = constrain(self.embedding.astype(self.compute_dtype), "tensor", None)
        return constrain(table[z_BxL], BATCH_AXES, None, None)

    def _headed(self, x_BxLxD: Array, condition_BxGxD: Array | None) -> Array:
        x_BxLxD = self.final_norm(x_BxLxD)
        if condition_BxGxD is None:
            return x_BxLxD
        shift, scale = self.final_modulation(condition_BxGxD, x_BxLxD.shape)
        return x_BxLxD * (1.0 + scale) + shift

    def append_block(
        self, z_BxP: Array, t_B: Array, cache: KVCache, label: Array | None = None
    ) -> tuple[Array, KVCache]:
        """Returns (h [B, P, D], cache with z) of one block z after the tokens of the cache."""
        x_BxPxD, condition = self._embedded(z_BxP), self._condition(t_B[:, None], label)
        layers = (cache.keys, cache.values)
        if self.options.scan_blocks:
            x_BxPxD, appended = jax.lax.scan(
                lambda x, layer: self._block(layer[0])(
                    x, condition, None, None, KVCache(*layer[1], cache.count)
                ),
                x_BxPxD, (self.variables["params"]["blocks"], layers),
            )  # fmt: skip
        else:
            found = []
            for number, block in enumerate(self.blocks):
                own = KVCache(*(x[number] for x in layers), cache.count)
                x_BxPxD, appended = block(x_BxPxD, condition, None, None, own)
                found.append(appended)
            appended = jax.tree.map(lambda *x: jnp.stack(x), *found)
        return self._headed(x_BxPxD, condition), cache.append(*appended)

    def _gathered(
        self, x_BxLxD: Array, condition: Array | None, segments: Array | None, index: Array | None
    ) -> Array:
        """Scans all blocks but the last, which returns fewer positions than it is given."""
        stacked = self.variables["params"]["blocks"]
        rest, last = (jax.tree.map(lambda x, p=part: x[p], stacked) for part in (slice(-1), -1))

        def apply(x_BxLxD: Array, params) -> tuple[Array, None]:
            return self._block(params)(x_BxLxD, condition, segments)

        if self.options.remat != "none":
            policy = REMAT[self.options.remat]
            apply = jax.checkpoint(apply, prevent_cse=False, policy=policy)
        x_BxLxD, _ = jax.lax.scan(apply, x_BxLxD, rest)
        return self._block(last, last=True)(x_BxLxD, condition, segments, index)[0]

    def _block(self, params, *, last: bool = False) -> Callable:
        """Returns a block with these parameters, outside of the scan."""
        block = Block(*self.block_arguments, last, parent=None)
        return functools.partial(block.apply, {"params": params})

    def unembed(self, h: Array) -> Array:
        rows = h.reshape(-1, h.shape[-1])  # as in layers.Linear
        logits = self.head(rows).astype(jnp.float32).reshape(*h.shape[:-1], -1)
        return jax.lax.slice_in_dim(logits, 0, self.options.vocab_size, axis=-1)


class FinalModulation(nn.Module):
    """Shift and scale before the head, initially zero."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, condition_BxGxD: Array, shape: tuple[int, ...]) -> list[Array]:
        return modulation(2, shape, condition_BxGxD, self.dtype)
