"""DiT of images (arXiv:2212.09748): the transformer on patches, with a head for each dimension."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.networks.binding import Binding
from md4_jax.networks.context import check_choices, check_least
from md4_jax.networks.depth import unrolled
from md4_jax.networks.flops import active_part, weights
from md4_jax.networks.images import INPUTS, check_images, patches, unpatched
from md4_jax.networks.layers import rows
from md4_jax.networks.linear import Linear, rounded
from md4_jax.networks.ordinal import around_input, intensity, log_probabilities
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.trunk import TransformerModule
from md4_jax.protocols import Array, Network, Params, UserError

# Keys of the transformer for texts.
OF_TEXTS = ("causal", "local_width", "tables", "shifted", "gaps", "edits", "positions")
OF_TEXTS += ("causal_context", "query_scaling")


@dataclasses.dataclass(frozen=True)
class DiT(Transformer):
    """Options of the DiT on patches; `build()` makes the network. Those of Transformer, and

    shape      height, width and channels of the images, from the data
    patch      side of the squares of pixels that are its tokens
    input      embedding, a vector for each level; intensity, for ordered levels: the number between
               -1 and 1, and whether it is masked. With output=truncated_logistic the location is
               then added to the input
    embedding  width of the vector of each level; the vectors of a patch are concatenated
    head_size  number of features of each dimension of the image, from which the head computes
               logits
    """

    name: ClassVar[str] = "dit"  # in a config
    takes: ClassVar[tuple[str, ...]] = ("label",)

    embedding: int = 32
    rotary_base: float = dataclasses.field(default=100.0, kw_only=True)
    shape: tuple[int, ...] = ()
    patch: int = 2
    input: str = "embedding"
    head_size: int = 64

    def __post_init__(self):
        super().__post_init__()
        check_choices(self, {"input": INPUTS})
        check_least(self, patch=1, embedding=1, head_size=1)
        check_images(self, self.name, self.patch, f"network.patch={self.patch}")
        for key in OF_TEXTS:
            if getattr(self, key):
                raise UserError(
                    f"network.{key}={getattr(self, key)} is only for texts: with "
                    f"network.name={self.name!r} set network.{key}={type(getattr(self, key))()}"
                )
        if self.rotary_part * self.attention_size % 4:
            raise UserError(
                f"network.size={self.size} must be a multiple of four times "
                f"network.heads={self.heads}, or network.head_dim a multiple of four, for the "
                "rotary positions of rows and columns"
            )

    @property
    def has_vectors(self) -> bool:
        """Whether each level has a learned vector."""
        return self.input == "embedding"

    @property
    def starts_at_input(self) -> bool:
        """Whether the location of an ordinal output is added to the input."""
        return self.is_ordinal and not self.has_vectors

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.shape[0] // self.patch, self.shape[1] // self.patch

    @property
    def dimensions(self) -> int:
        """Number of levels in a patch."""
        return self.patch**2 * self.shape[2]

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options = self.resolved(platform)
        module = PatchModule(options, unroll=unrolled(options, platform))

        def init(key: Array) -> Params:
            z = jnp.zeros((1, math.prod(options.shape)), jnp.int32)
            return PatchModule(options).init(key, z, jnp.zeros((1,)))["params"]

        counted = functools.partial(forward_flops, options=options)
        bind = Binding(options, module, False, platform)
        return Network(
            init, bind, not self.time_conditioning, flops=counted, padding=self._padding(),
            products=options.products, adapters=self.adapters, parameters=self.parameters,
        )  # fmt: skip

    def _padding(self) -> int:
        """Returns the number of entries of embedding and head that stand for no level."""
        levels = self.vocab_size
        rows = rounded(levels + 1) - levels - 1 if self.has_vectors else 0
        entries = rows * self.embedding
        columns = 0 if self.is_ordinal else rounded(levels) - levels
        return entries + columns * (self.head_size + self.head_bias)


class PatchModule(TransformerModule):
    """Transformer that reads patches and returns features of single dimensions."""

    def setup(self):
        super().setup()
        o = self.options
        self.head_in = Linear(
            o.dimensions * o.head_size, self.compute_dtype, bias=True, products=o.products
        )

    def features(self, z_BxL, t_B, segments=None, label=None, keys=None, index=None) -> Array:
        """Returns h [B, L, D] of all dimensions, or [B, P, D] of those of index [B, P].

        With `starts_at_input` the result is the location and the scale, [B, L, 2].
        """
        h_BxLxD = super().features(z_BxL, t_B, segments, label, keys)
        if self.options.starts_at_input:
            # Not bounded, so that black and white need not be learned either.
            symbols = self.options.vocab_size
            h_BxLxD = around_input(self.head(h_BxLxD), z_BxL, symbols, bounded=False)
        return h_BxLxD if index is None else rows(h_BxLxD, index)

    def unembed(self, h: Array) -> Array:
        if self.options.starts_at_input:
            return log_probabilities(h, self.options.vocab_size)
        return super().unembed(h)

    def _vectors(self, z_BxL: Array) -> Array:
        """Embeds the levels: [B, N, D], where the vectors of a patch are concatenated."""
        o = self.options
        if not o.has_vectors:
            masked = (z_BxL == o.vocab_size).astype(jnp.float32)
            each_BxLxD = jnp.stack([intensity(z_BxL, o.vocab_size), masked], axis=-1)
            each_BxLxD = each_BxLxD.astype(self.compute_dtype)
        else:
            each_BxLxD = super()._vectors(z_BxL)
        return patches(each_BxLxD.reshape(len(each_BxLxD), *o.shape[:2], -1), o.patch)

    def _headed(self, x_BxNxD: Array, condition_BxGxD: Array | None) -> Array:
        o = self.options
        h_BxNxD = self.head_in(super()._headed(x_BxNxD, condition_BxGxD))
        shape = (*o.shape[:2], o.shape[2] * o.head_size)
        return unpatched(h_BxNxD, shape, o.patch).reshape(len(h_BxNxD), -1, o.head_size)


def forward_flops(params: Params, length: int, block: int = 0, *, options: DiT) -> float:
    """Returns the FLOPs of a forward pass per dimension of an image.

    They are 2 for each weight of a linear layer and patch (for the head: and dimension), plus 4 N D
    for each layer and patch, with N patches and D features of all heads. Only the experts that a
    patch uses count.
    """
    del block
    attended = options.heads * options.attention_size
    per_patch, per_dimension = 4.0 * math.prod(options.grid) * attended * options.depth, 0.0
    for path, count in weights(params, active_part(options)):
        if path[0] == "head":
            per_dimension += 2.0 * count
        else:
            per_patch += 2.0 * count
    return per_dimension + per_patch / options.dimensions
