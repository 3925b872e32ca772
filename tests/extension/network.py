"""A network in plain jax: gated convolutions over the tokens."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Denoiser, Network, Params, UserError


@dataclasses.dataclass(frozen=True)
class GatedConvolutions:
    """Sizes of the network; `build` makes it.

    taps: positions that a layer sees, an odd number; dropout: part of the features of a sequence
    that are set to zero in training.
    """

    vocab_size: int
    width: int = 64
    layers: int = 3
    taps: int = 7
    dropout: float = 0.1

    def __post_init__(self):
        if self.taps % 2 == 0:
            raise UserError(f"network.taps must be odd, not {self.taps}")

    def build(self, platform: str = "cpu") -> Network:
        """A network that is told the time and looks to both sides."""
        del platform
        return Network(self.init, self.bind, time_free=False, flops=self.flops)

    def init(self, key: Array) -> Params:
        """The parameters; the last layer starts at zero."""
        table, mix = jax.random.split(key)
        shape = (self.layers, self.taps, self.width, 2 * self.width)
        scale = (self.taps * self.width) ** -0.5
        return {
            "table": jax.random.normal(table, (self.vocab_size + 1, self.width)),
            "mix": scale * jax.random.normal(mix, shape),
            "time": jnp.zeros((self.layers, 2 * self.width)),
            "out": jnp.zeros((self.width, self.vocab_size)),
        }

    def bind(
        self, params: Params, context: Mapping[str, Array] | None = None, keys: Array | None = None
    ) -> Denoiser:
        """The denoiser; keys [B] draw the dropout, None for none."""
        del context

        def features(z: Array, t: Array) -> Array:
            h = params["table"][z]
            for kernel, of_time in zip(params["mix"], params["time"], strict=True):
                y = jax.lax.conv_general_dilated(
                    h, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
                )
                value, gate = jnp.split(y + t[:, None, None] * of_time, 2, axis=-1)
                h = h + jnp.tanh(value) * jax.nn.sigmoid(gate)
            return h if keys is None else self._dropped(h, keys)

        def rebind(count: int) -> Denoiser:
            return self.bind(params, None, None if keys is None else jnp.repeat(keys, count))

        return Denoiser(features, lambda h: h @ params["out"], rebind=rebind)

    def flops(self, params: Params, length: int, block: int) -> float:
        """FLOPs of one token through the network once."""
        del length, block
        return 2.0 * (params["mix"].size + params["out"].size)

    def _dropped(self, h: Array, keys: Array) -> Array:
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - self.dropout, (self.width,)))
        return h * kept(keys)[:, None] / (1.0 - self.dropout)
