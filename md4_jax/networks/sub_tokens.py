"""Transformer that reads partly masked tokens: docs/families/partial_masking.md.

Array names end in their shapes: B, L, D, and P sub-tokens of a token.
"""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.networks.binding import Binding
from md4_jax.networks.context import check_choices, check_fixed
from md4_jax.networks.depth import unrolled
from md4_jax.networks.flops import formula
from md4_jax.networks.linear import embedding_init, rounded
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.trunk import TransformerModule
from md4_jax.networks.vectors import vectors_of
from md4_jax.protocols import Array, Network, Params, UserError
from md4_jax.protocols.sub_tokens import base_of, check_parts, split_code

# Keys of the transformer that this network does not support, with their only values.
WITHOUT = {
    "causal": False, "causal_context": False, "shifted": False, "tables": 0, "gaps": False,
    "edits": False, "tied": False,
}  # fmt: skip
VECTORS = ("concatenated", "summed")


@dataclasses.dataclass(frozen=True)
class SubTokens(Transformer):
    """Options of the transformer of partly masked tokens. Those of Transformer, and

    parts    number of sub-tokens of a token, that of the process
    vectors  concatenated: the vectors of its sub-tokens, all from one table, make up that of a
             token (arXiv:2505.18495); summed: each sub-token has a table of its own, of vectors as
             wide as the token's, which are added (arXiv:2603.16077)

    It reads the code of each token (`protocols.sub_tokens`) and predicts tokens.
    """

    has_vectors: ClassVar[bool] = False

    parts: int = 2
    vectors: str = "concatenated"

    def __post_init__(self):
        super().__post_init__()
        check_choices(self, {"vectors": VECTORS})
        check_parts("network", self.vocab_size, self.parts)
        check_fixed(self, "sub_tokens", WITHOUT)
        width = "embedding" if self.embedding else "size"
        if self.vectors == "concatenated" and self.token_width % self.parts:
            raise UserError(
                f"network.{width}={self.token_width} must be a multiple of network.parts="
                f"{self.parts}, because the vectors of the sub-tokens make up that of a token; or "
                "set network.vectors='summed'"
            )

    @property
    def token_width(self) -> int:
        """Features of the vector of a token."""
        return self.embedding or self.size

    @property
    def base(self) -> int:
        """Number of values of a sub-token."""
        return base_of(self.vocab_size, self.parts)

    @property
    def table(self) -> tuple[int, int]:
        """Rows and width of the table of vectors, without the rows that are never read."""
        if self.vectors == "concatenated":
            return self.base + 1, self.token_width // self.parts
        return self.parts * (self.base + 1), self.token_width

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options = self.resolved(platform)
        module = SubTokensModule(options, unroll=unrolled(options, platform))

        def init(key: Array) -> Params:
            tokens = jnp.zeros((1, 2), jnp.int32)
            return SubTokensModule(options).init(key, tokens, jnp.zeros((1,)))["params"]

        return Network(
            init, Binding(options, module, False, platform), not self.time_conditioning,
            flops=formula(options, options.depth), padding=self._padding(),
            products=options.products, adapters=self.adapters, parameters=self.parameters,
            splits=True, parts=self.parts,
        )  # fmt: skip

    def _padding(self) -> int:
        """Returns the number of entries of table and head that stand for no symbol."""
        rows, width = self.table
        columns = 0 if self.is_ordinal else rounded(self.vocab_size) - self.vocab_size
        return (rounded(rows) - rows) * width + columns * (self.size + self.head_bias)


class SubTokensModule(TransformerModule):
    """Transformer whose token vectors are made of those of sub-tokens."""

    def setup(self):
        super().setup()
        o, (rows, width) = self.options, self.options.table
        initial = embedding_init(o.initial, width)
        # The vector of a token has the same variance, whether its parts are joined or added.
        scale = 1.0 if o.vectors == "concatenated" else 1.0 / math.sqrt(o.parts)
        self.embedding = self.param(
            "embedding", lambda key, shape: scale * initial(key, shape), (rounded(rows), width)
        )

    def _vectors(self, z_BxL: Array) -> Array:
        o = self.options
        # Row b of a table is that of a hidden sub-token.
        rows_BxLxP = (split_code(z_BxL, o.base, o.parts) + o.base) % (o.base + 1)
        if o.vectors == "summed":
            rows_BxLxP = rows_BxLxP + (o.base + 1) * jnp.arange(o.parts)
        x_BxLxPxD = vectors_of(self.embedding, rows_BxLxP, self.compute_dtype, o.base)
        if o.vectors == "summed":
            return jnp.sum(x_BxLxPxD, axis=2)
        return x_BxLxPxD.reshape(*z_BxL.shape, -1)
