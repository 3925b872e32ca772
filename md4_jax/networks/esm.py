"""ESM-2 (Lin et al., Science 2023): a transformer of proteins with begin and end symbols.

Array names end in their shapes: B, L, M = L + 2, D.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.networks.bert import BertModule
from md4_jax.networks.binding import Binding
from md4_jax.networks.context import check_fixed
from md4_jax.networks.flops import formula
from md4_jax.networks.rotary import Rope
from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import Array, Network, Params, UserError

# Keys of the transformer that this network does not support, with their only values.
WITHOUT = {
    "time_conditioning": False, "causal": False, "causal_context": False, "shifted": False,
    "local_width": 0, "tables": 0, "gaps": False, "experts": 0, "dense_layers": 0, "classes": 0,
    "output": "categorical", "positions": 0, "embedding": 0, "embedding_dropout": 0.0,
}  # fmt: skip
# Fraction of masks in ESM's training: 15% of the tokens were chosen, and 80% of these masked.
TRAINED_MASKS = 0.15 * 0.8


@dataclasses.dataclass(frozen=True)
class Esm(Transformer):
    """Options of ESM-2; `build()` makes the network. Those of Transformer, and

    begins, ends   symbols that the network itself adds before and after each text
    token_dropout  the vector of a mask is 0, and all others are multiplied by
                   (1 - 0.12) / (1 - fraction of masks), where the begin and end symbols count as
                   tokens. ESM does this in training and in inference
    rotary_half    angles of rotary positions are rounded to float16

    A sequence is one text, optionally followed by padding, which is segment -1 and masked out. The
    network therefore knows the length of the text. It reads the symbols `begins` and `ends` but
    never predicts them. Before the head there is a linear layer with GELU and a normalisation. The
    network has no time input.
    """

    takes: ClassVar[tuple[str, ...]] = ("segments",)

    feed_forward: str = "gelu_exact"
    time_conditioning: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    norm: str = "layer"
    norm_parameters: str = "affine"
    norm_eps: float = 1e-5
    # With zero-initialised branches the features of dropped masks would remain 0.
    initial: str = "torch"
    begins: int = 0
    ends: int = 2
    token_dropout: bool = True
    rotary_half: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_fixed(self, "esm", WITHOUT)
        for key in ("begins", "ends"):
            if not 0 <= getattr(self, key) < self.vocab_size:
                raise UserError(
                    f"network.{key}={getattr(self, key)} must be one of the {self.vocab_size} "
                    f"symbols of the tokenizer, 0 to {self.vocab_size - 1}"
                )

    @property
    def rope(self) -> Rope:
        """Angles of the rotary positions."""
        return super().rope._replace(half=self.rotary_half)

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options = self.resolved(platform)
        module = EsmModule(options)

        def init(key: Array) -> Params:
            return module.init(key, jnp.zeros((1, 2), jnp.int32), jnp.zeros((1,)))["params"]

        return Network(
            init, Binding(options, module, False, platform), time_free=True,
            flops=formula(options, options.depth),
            padding=self._padding(), products=options.products,
            adapters=self.adapters, parameters=options.parameters, marked=True,
        )  # fmt: skip


class EsmModule(BertModule):
    """Transformer with begin and end symbols and an additional layer before the head."""

    def features(
        self,
        z_BxL: Array,
        t_B: Array,
        segments: Array | None = None,
        keys: Array | None = None,
        index: Array | None = None,
    ) -> Array:
        """Returns h [B, L, D], or with index [B, P] the features of these positions, [B, P, D]."""
        z_BxM, segments = marked(self.options, z_BxL, segments)
        x_BxMxD = self.embedded(z_BxM, None)
        if self.options.token_dropout:
            is_mask = z_BxM == self.options.vocab_size
            x_BxMxD = dropped_masks(x_BxMxD, is_mask, segments)
        if index is not None:
            return self._trunk(x_BxMxD, None, segments, keys, index + 1)
        return self._trunk(x_BxMxD, None, segments, keys, None)[:, 1:-1]


def marked(o: Esm, z_BxL: Array, segments: Array | None) -> tuple[Array, Array | None]:
    """Returns the tokens [B, M] with begin and end symbols, and their segments."""
    around = ((0, 0), (1, 1))
    z_BxM, place = jnp.pad(z_BxL, around), jnp.arange(z_BxL.shape[1] + 2)
    # Not .at[:, 0].set: after padding of split sequences XLA writes it to the wrong places.
    z_BxM = jnp.where(place == 0, o.begins, z_BxM)
    if segments is None:
        return jnp.where(place == len(place) - 1, o.ends, z_BxM), None
    length = jnp.sum(segments >= 0, axis=1, keepdims=True)
    last = jnp.take_along_axis(segments, jnp.maximum(length - 1, 0), axis=1)
    segments = jnp.pad(segments, around, mode="edge")
    z_BxM = jnp.where(place == length + 1, o.ends, z_BxM)
    segments = jnp.where(place == length + 1, last, segments)
    return z_BxM, jnp.where(place > length + 1, -1, segments)


def dropped_masks(x_BxMxD: Array, is_mask: Array, segments: Array | None) -> Array:
    """Sets the vectors of masks to 0 and multiplies the others by 0.88 / (1 - mask fraction)."""
    is_text = jnp.ones_like(is_mask) if segments is None else segments >= 0
    share = jnp.sum(is_mask & is_text, axis=1) / jnp.maximum(jnp.sum(is_text, axis=1), 1)
    # Begin and end count as text, so the fraction is below 1; it is 0 for a row of padding.
    factor = (1.0 - TRAINED_MASKS) / (1.0 - share)
    wide = jnp.where(is_mask[..., None], 0.0, x_BxMxD.astype(jnp.float32))
    return (wide * factor[:, None, None]).astype(x_BxMxD.dtype)
