"""Partition network: each token is predicted from the other group (arXiv:2505.18883).

docs/families/partition.md explains it. Array names end in their shapes: B, L, P, D.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.networks.binding import repeated
from md4_jax.networks.context import check_fixed, check_least, checked_context
from md4_jax.networks.dropout import DROPOUT, folded
from md4_jax.networks.flops import formula
from md4_jax.networks.groups import PartitionModule, Slots
from md4_jax.networks.layers import rows
from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import Accelerator, Array, Denoiser, Network, Params, UserError
from md4_jax.runtime.sharding import token_groups

# Keys of the transformer that this network does not support, with their only values.
WITHOUT = {
    "time_conditioning": False, "causal": False, "shifted": False, "local_width": 0, "tables": 0,
    "gaps": False, "edits": False, "experts": 0, "dense_layers": 0, "lora_dropout": 0.0,
    "classes": 0, "attention_dropout": 0.0, "output": "categorical", "positions": 0,
    "out_bias": False, "causal_context": False, "query_scaling": (),
}  # fmt: skip
# Candidate sizes of the encoder's input, smallest first, as fractions of the length. Short texts
# are read whole: there is little to gain, and each size is compiled separately.
PARTS, SHORTEST = 8, 64


@dataclasses.dataclass(frozen=True)
class Partition(Transformer):
    """Options of the partition network; `build()` makes it. Those of Transformer, and

    depth          number of blocks of encoder and decoder together
    decoder_depth  number of these that belong to the decoder; 0: half of them

    Between them there is an additional layer of attention. The network has no time input.
    """

    takes: ClassVar[tuple[str, ...]] = ("segments",)

    time_conditioning: bool = False
    decoder_depth: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_least(self, depth=2, decoder_depth=0)
        check_fixed(self, "partition", WITHOUT)
        if self.attention not in ("auto", "plain"):
            raise UserError(
                "network.name='partition' needs network.attention='plain', not "
                f"{self.attention!r}: each token attends to a different set of tokens"
            )
        if self.decoder_depth >= self.depth:
            raise UserError(
                f"network.decoder_depth={self.decoder_depth} must be below network.depth="
                f"{self.depth}, the blocks of encoder and decoder together"
            )

    @property
    def decoder_layers(self) -> int:
        """Number of the decoder's blocks."""
        return self.decoder_depth or self.depth // 2

    @property
    def encoder_depth(self) -> int:
        """Number of the encoder's blocks."""
        return self.depth - self.decoder_layers

    def resolved(self, platform: str) -> "Partition":
        """Returns the options with widths and kernel in place of 0 and auto."""
        return dataclasses.replace(super().resolved(platform), attention="plain")

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options = self.resolved(platform)
        module = PartitionModule(options)

        def init(key: Array) -> Params:
            return module.init(key, jnp.zeros((1, 2), jnp.int32), jnp.zeros((1,)))["params"]

        counted = formula(options, options.depth + 1)
        return Network(
            init, Binding(options, module, platform), time_free=True, flops=counted,
            padding=self._padding(), products=options.products, adapters=self.adapters,
            parameters=options.parameters, swapped=True,
        )  # fmt: skip


class Binding(NamedTuple):
    """Binds parameters, context and dropout keys to the functions of the module."""

    options: Partition
    module: PartitionModule
    platform: str

    def __call__(
        self,
        params: Params,
        context: Mapping[str, Array] | None = None,
        keys: Array | None = None,
    ) -> Denoiser:
        """Returns the denoiser; UserError for a context that the network cannot use."""
        keys = None if keys is None else folded(keys, DROPOUT)
        context = checked_context(self.options, context, None, self.options.takes)
        if keys is not None and (self.options.dropout or self.options.embedding_dropout):
            context["keys"] = keys
        return self._bound(params, context)

    def _bound(self, params: Params, context: dict[str, Array]) -> Denoiser:
        mask_id, variables = self.options.vocab_size, {"params": params}
        segments, keys = context.get("segments"), context.get("keys")

        def apply(slots: Slots, places: Array, read: Array, length: int) -> Array:
            inputs = (slots, places, read, keys, length)
            return self.module.apply(variables, *inputs, method="groups")

        def swapped(x: Array, group: Array) -> Array:
            return apply(*both_groups(x, group, segments, mask_id))

        def features(z: Array, t: Array) -> Array:
            del t
            return apply(*visible_alone(z, segments, mask_id))

        def features_at(z: Array, t: Array, index: Array) -> Array:
            if keys is not None:
                return rows(features(z, t), index)
            return at_index(apply, z, segments, index, mask_id)

        def unembed(h: Array) -> Array:
            return self.module.apply(variables, h, method="unembed")

        def rebind(count: int) -> Denoiser:
            return self._bound(params, repeated(context, count))

        def padded(h: Array) -> Array:
            return self.module.apply(variables, h, padded=True, method="logits")

        shortcuts = Accelerator(
            token_groups(), features_at, padded if self.options.pads_logits else None, self.platform
        )
        return Denoiser(features, unembed, shortcuts, rebind=rebind, swapped=swapped)


def both_groups(x: Array, group: Array, segments: Array | None, mask_id: int) -> tuple:
    """Returns the inputs of the module for predicting each group of x from the other one.

    group  bool [B, L], the group of each token
    """
    slots = _slots(x, mask_id)
    same = group[:, :, None] == group[:, None, :]
    within = _same_segment(segments, segments)
    own, read = same, ~same
    if within is not None:
        own, read = own & within, read & within
    return slots._replace(own=_with_start(own)), slots.places[:, 1:], _first(read), x.shape[1] + 1


def visible_alone(z: Array, segments: Array | None, mask_id: int) -> tuple:
    """Returns the inputs of the module for predicting every position from the visible tokens."""
    slots, length = _slots(z, mask_id), z.shape[1]
    seen = jnp.broadcast_to((z != mask_id)[:, None], (len(z), length, length))
    within = _same_segment(segments, segments)
    seen = seen if within is None else seen & within
    return slots._replace(own=_with_start(seen)), slots.places[:, 1:], _first(seen), length + 1


def at_index(apply: Any, z: Array, segments: Array | None, index: Array, mask_id: int) -> Array:
    """Computes the features of the positions index [B, P] from the visible tokens only.

    Visible tokens are moved to the front. The encoder reads the smallest candidate number of slots
    that holds the visible tokens of every text.
    """
    length = z.shape[1]
    visible = z != mask_id
    order = jnp.argsort(~visible, axis=1, stable=True)
    count = jnp.sum(visible, axis=1)
    asked = None if segments is None else jnp.take_along_axis(segments, index, axis=1)

    def of_size(size: int) -> Array:
        first = order[:, :size]
        there = jnp.arange(size) < count[:, None]
        symbols = jnp.take_along_axis(z, first, axis=1)
        at = jnp.pad(first + 1, ((0, 0), (1, 0)))
        held = None if segments is None else jnp.take_along_axis(segments, first, axis=1)
        own, read = (
            there[:, None] if within is None else there[:, None] & within
            for within in (_same_segment(held, held), _same_segment(asked, held))
        )
        own = _with_start(jnp.broadcast_to(own, (len(z), size, size)))
        read = _first(jnp.broadcast_to(read, (len(z), index.shape[1], size)))
        slots = Slots(_slots(symbols, mask_id).symbols, at, own)
        return apply(slots, index + 1, read, length + 1)

    parts = range(1, PARTS + 1) if length >= SHORTEST else (PARTS,)
    sizes = [math.ceil(length * part / PARTS) for part in parts]
    needed = jnp.max(count)
    branch = sum(needed > size for size in sizes[:-1])
    return jax.lax.switch(branch, [functools.partial(of_size, size) for size in sizes])


def _slots(symbols: Array, mask_id: int) -> Slots:
    """Returns slots of the start and the symbols [B, L], with no attention between them yet."""
    symbols = jnp.pad(symbols, ((0, 0), (1, 0)), constant_values=mask_id)
    places = jnp.broadcast_to(jnp.arange(symbols.shape[1]), symbols.shape)
    return Slots(symbols, places, jnp.zeros((1, 1, 1), bool))


def _with_start(seen_BxLxL: Array) -> Array:
    """Adds the start, which all slots see and which sees only itself: bool [B, L + 1, L + 1]."""
    return jnp.pad(_first(seen_BxLxL), ((0, 0), (1, 0), (0, 0))).at[:, 0, 0].set(True)


def _first(seen_BxPxL: Array) -> Array:
    """Adds the start, which all positions see: bool [B, P, L + 1]."""
    return jnp.pad(seen_BxPxL, ((0, 0), (0, 0), (1, 0)), constant_values=True)


def _same_segment(asking: Array | None, held: Array | None) -> Array | None:
    """Returns which pairs are in the same segment, bool [B, P, L]; None without segments."""
    return None if held is None else asking[:, :, None] == held[:, None, :]
