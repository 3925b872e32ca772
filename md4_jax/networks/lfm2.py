"""LFM2 (arXiv:2511.23404): a transformer with gated short convolutions in most of its layers."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.networks.binding import Binding
from md4_jax.networks.context import check_fixed, check_least
from md4_jax.networks.flops import formula
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.trunk import TransformerModule
from md4_jax.protocols import Array, Network, Params, UserError

# Keys of the transformer that this network does not support, with their only values.
WITHOUT = {
    "scan_blocks": False, "time_conditioning": False, "shifted": False, "local_width": 0,
    "tables": 0, "gaps": False, "experts": 0, "dense_layers": 0, "classes": 0,
    "output": "categorical", "positions": 0, "embedding": 0, "causal_context": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Lfm2(Transformer):
    """Options of LFM2; `build()` makes the network. Those of Transformer, and

    attention_layers  numbers of the layers with attention, from 0; the others have a convolution
    convolution_width  number of tokens that a convolution reads: those up to its own token with
                      `causal`; else an odd number, since a token sees as many neighbours on each
                      side

    The published left-to-right models are causal. In the encoders that were made of them, and in
    the masked diffusion model that was made of an encoder, all layers see both sides. The network
    has no time input. A causal one keeps no cache: its samplers read the whole text again.
    """

    takes: ClassVar[tuple[str, ...]] = ("segments",)

    time_conditioning: bool = False
    norm_eps: float = 1e-5
    norm_parameters: str = "scale"
    qk_norm: bool = True
    scan_blocks: bool = False
    attention_layers: tuple[int, ...] = (2, 5, 8, 10)
    convolution_width: int = 3

    def __post_init__(self):
        super().__post_init__()
        check_least(self, depth=1, convolution_width=1)
        check_fixed(self, "lfm2", WITHOUT)
        if self.convolution_width % 2 == 0 and not self.causal:
            raise UserError(
                f"network.convolution_width={self.convolution_width} must be odd: a token and as "
                "many neighbours on each side. It may be even with network.causal=True"
            )
        if wrong := [n for n in self.attention_layers if not 0 <= n < self.depth]:
            raise UserError(
                f"network.attention_layers={tuple(self.attention_layers)}: there is no layer "
                f"{wrong[0]}, since network.depth={self.depth} and layers are numbered from 0"
            )

    def of_layer(self, number: int) -> "Layer":
        """Returns the options of a block."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(Transformer)}
        width = 0 if number in self.attention_layers else self.convolution_width
        return Layer(**own, convolution=width)

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options = self.resolved(platform)
        module, hides = TransformerModule(options), not self.causal

        def init(key: Array) -> Params:
            return module.init(key, jnp.zeros((1, 2), jnp.int32), jnp.zeros((1,)))["params"]

        return Network(
            init, Binding(options, module, False, platform, hides), time_free=True,
            causal=self.causal, padding=self._padding(), products=options.products, mixtures=True,
            flops=formula(options, len(set(options.attention_layers))),
            adapters=self.adapters, parameters=options.parameters, splits=True, hides=hides,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layer(Transformer):
    """Options of one block: the tokens that its convolution reads; 0 means attention."""

    convolution: int = 0
