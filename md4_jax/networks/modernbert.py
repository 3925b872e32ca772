"""ModernBERT (arXiv:2412.13663): a transformer with mostly local (sliding-window) attention.

Array names end in their shapes: B, L, D.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.networks.bert import BertModule
from md4_jax.networks.binding import Binding
from md4_jax.networks.context import check_fixed, check_least
from md4_jax.networks.dropout import EMBEDDING, folded, kept, scaled
from md4_jax.networks.flops import formula
from md4_jax.networks.layers import norm
from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import Array, Network, Params, UserError

# Keys of the transformer that this network does not support, with their only values.
WITHOUT = {
    "scan_blocks": False, "time_conditioning": False, "causal": False, "shifted": False,
    "local_width": 0, "tables": 0, "gaps": False, "experts": 0, "dense_layers": 0, "classes": 0,
    "output": "categorical", "positions": 0, "embedding": 0,
    "attention_dropout": 0.0, "causal_context": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModernBert(Transformer):
    """Options of ModernBERT; `build()` makes the network. Those of Transformer, and

    window        window of local attention: half of these tokens on each side of a token
    global_every  the layers 0, global_every, 2 global_every, ... attend to all tokens
    local_base    rotary_base of local layers

    The embeddings are normalised, and the first attention layer has no norm. Before the head there
    is a linear layer with GELU and a normalisation. The network has no time input. Local layers
    compute all scores and mask those outside the window.
    """

    takes: ClassVar[tuple[str, ...]] = ("segments",)

    feed_forward: str = "geglu"
    time_conditioning: bool = False
    norm: str = "layer"
    norm_parameters: str = "scale"
    scan_blocks: bool = False
    window: int = 128
    global_every: int = 3
    local_base: float = 10_000.0

    def __post_init__(self):
        super().__post_init__()
        check_least(self, depth=1, window=0, global_every=1)
        check_fixed(self, "modernbert", WITHOUT)
        if self.attention not in ("auto", "plain"):
            raise UserError(
                "network.name='modernbert' needs network.attention='plain', not "
                f"{self.attention!r}: its local layers attend only to nearby tokens"
            )
        if self.local_base <= 0:
            raise UserError(f"network.local_base={self.local_base} must be above 0")

    def of_layer(self, number: int) -> "Layer":
        """Returns the options of a block."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(Transformer)}
        near = number % self.global_every != 0
        own["rotary_base"] = self.local_base if near else self.rotary_base
        return Layer(**own, reach=self.window // 2 if near else None, bare=number == 0)

    def resolved(self, platform: str) -> "ModernBert":
        """Returns the options with widths and kernel in place of 0 and auto."""
        return dataclasses.replace(super().resolved(platform), attention="plain")

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options = self.resolved(platform)
        module = ModernBertModule(options)

        def init(key: Array) -> Params:
            return module.init(key, jnp.zeros((1, 2), jnp.int32), jnp.zeros((1,)))["params"]

        return Network(
            init, Binding(options, module, False, platform, True), time_free=True,
            flops=formula(options, options.depth),
            padding=self._padding(), products=options.products, mixtures=True,
            adapters=self.adapters, parameters=options.parameters, splits=True, hides=True,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layer(Transformer):
    """Options of one block: how far its attention reaches, and whether its input is normalised."""

    reach: int | None = None
    bare: bool = False


class ModernBertModule(BertModule):
    """Transformer with a normalisation after the embedding and a layer before the head."""

    head_in_bias: ClassVar[bool] = False

    def setup(self):
        super().setup()
        self.embedding_norm = norm(self.options, conditioned=False)

    def embedded(self, z_BxL: Array, where: Callable | None, keys: Array | None = None) -> Array:
        o, x_BxLxD = self.options, self.embedding_norm(super().embedded(z_BxL, where))
        if keys is not None and o.embedding_dropout:
            keep = kept(folded(keys, EMBEDDING), o.embedding_dropout, x_BxLxD.shape[1:])
            x_BxLxD = scaled(x_BxLxD, keep, o.embedding_dropout)
        return x_BxLxD
