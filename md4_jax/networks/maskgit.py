"""Halton-MaskGIT (arXiv:2503.17076): a transformer on the codes of an image and its class.

Array names end in their shapes: B, L codes, M = L + registers, D.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp

from md4_jax.networks.binding import Binding
from md4_jax.networks.context import check_fixed, check_least
from md4_jax.networks.depth import unrolled
from md4_jax.networks.flops import formula
from md4_jax.networks.linear import embedding_init
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.trunk import TransformerModule
from md4_jax.protocols import Array, Network, Params

# Keys of the transformer that this network does not support, with their only values.
WITHOUT = {
    "time_conditioning": False, "causal": False, "causal_context": False, "shifted": False,
    "local_width": 0, "tables": 0, "gaps": False, "edits": False, "experts": 0, "dense_layers": 0,
    "output": "categorical", "embedding": 0, "norm": "rms", "norm_parameters": "scale",
    "query_scaling": (), "qk_norm": True,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MaskGit(Transformer):
    """Options of Halton-MaskGIT; `build()` makes the network. Those of Transformer, and

    registers  number of learned vectors that are read after the codes; nothing is predicted there

    Positions are learned: `positions` is the number of codes of an image. Queries and keys are
    normalised over all heads together, without a gain. The norms of blocks have a gain and the last
    one a bias too, besides shift and scale from the class. The network has no time input.
    """

    takes: ClassVar[tuple[str, ...]] = ("label",)
    joint_norm: ClassVar[bool] = True

    time_conditioning: bool = False
    positions: int = 256
    norm_parameters: str = "scale"
    norm_eps: float = 1e-5
    qk_norm: bool = True
    tied: bool = True
    initial: str = "torch"
    registers: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_least(self, depth=1, positions=1, registers=0)
        check_fixed(self, "maskgit", WITHOUT)

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options = self.resolved(platform)
        module = MaskGitModule(options, unroll=unrolled(options, platform))

        def init(key: Array) -> Params:
            z = jnp.zeros((1, 2), jnp.int32)
            return MaskGitModule(options).init(key, z, jnp.zeros((1,)))["params"]

        return Network(
            init, Binding(options, module, False, platform), time_free=True,
            flops=formula(options, options.depth),
            padding=self._padding(), products=options.products,
            adapters=self.adapters, parameters=options.parameters,
        )  # fmt: skip


class MaskGitModule(TransformerModule):
    """Transformer with registers, and with a bias after the last norm."""

    def setup(self):
        super().setup()
        o = self.options
        if o.registers:
            rows = (o.registers, o.size)
            self.registers = self.param("registers", embedding_init(o.initial, o.size), rows)
        self.final_bias = self.param("final_bias", nn.initializers.zeros, (o.size,))

    def features(
        self,
        z_BxL: Array,
        t_B: Array,
        label: Array | None = None,
        keys: Array | None = None,
        index: Array | None = None,
    ) -> Array:
        """Returns h [B, L, D], or with index [B, P] the features of these positions, [B, P, D]."""
        h_BxMxD = super().features(z_BxL, t_B, None, label, keys, index)
        return h_BxMxD if index is not None else h_BxMxD[:, : z_BxL.shape[1]]

    def embedded(self, z_BxL: Array, where: Callable | None, keys: Array | None = None) -> Array:
        x_BxLxD = super().embedded(z_BxL, where, keys)
        if not self.options.registers:
            return x_BxLxD
        rows = (len(x_BxLxD), *self.registers.shape)
        return jnp.concatenate(
            [x_BxLxD, jnp.broadcast_to(self.registers, rows).astype(x_BxLxD.dtype)], axis=1
        )

    def _headed(self, x_BxMxD: Array, condition_BxGxD: Array | None) -> Array:
        x_BxMxD = self.final_norm(x_BxMxD) + self.final_bias.astype(x_BxMxD.dtype)
        if condition_BxGxD is None:
            return x_BxMxD
        shift, scale = self.final_modulation(condition_BxGxD, x_BxMxD.shape)
        return x_BxMxD * (1.0 + scale) + shift
