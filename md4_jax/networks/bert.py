"""Transformer with an additional layer before the head, as in BERT."""

from typing import ClassVar

import flax.linen as nn

from md4_jax.networks.layers import norm
from md4_jax.networks.linear import Linear
from md4_jax.networks.trunk import TransformerModule
from md4_jax.protocols import Array


class BertModule(TransformerModule):
    """Transformer with a linear layer, GELU and a normalisation before the head."""

    head_in_bias: ClassVar[bool] = True

    def setup(self):
        super().setup()
        o = self.options
        self.head_in = Linear(
            o.size,
            self.compute_dtype,
            bias=self.head_in_bias,
            initial=o.initial,
            products=o.products,
        )
        self.head_norm = norm(o, conditioned=False)

    def logits(self, h: Array, *, padded: bool = False) -> Array:
        """Returns the logits of all symbols; padded: and -inf for the other rows of the head."""
        h = self.head_norm(nn.gelu(self.head_in(h), approximate=False))
        return super().logits(h, padded=padded)
