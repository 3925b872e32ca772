"""Networks of images: their inputs, checks and binding. Names end in shapes: B, H, W, C channels.

Symbols are the levels of an image row by row, channels last: L = H W C.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from md4_jax.networks.binding import repeated
from md4_jax.networks.context import checked_context
from md4_jax.networks.dropout import DROPOUT, folded
from md4_jax.protocols import Accelerator, Array, Denoiser, Network, Params, UserError
from md4_jax.runtime.sharding import token_groups

# Forms of the network's input.
INPUTS = ("embedding", "intensity")


def check_images(options: Any, name: str, divisor: int, key: str) -> None:
    """Raises UserError unless the data are images with sides that are multiples of the divisor.

    name  network.name
    key   key and value that determine the divisor
    """
    if len(options.shape) != 3:
        raise UserError(
            f"network.name={name!r} reads images of height x width x channels, but a sequence of "
            f"these data has the shape {options.shape or '()'}: set data.name to a source of "
            "images, or network.name='transformer'"
        )
    height, width, _ = options.shape
    if height % divisor or width % divisor:
        raise UserError(
            f"{key} needs the height and width of images to be multiples of {divisor}, but the "
            f"images have {height} x {width} pixels"
        )


def patches(x_BxHxWxC: Array, size: int) -> Array:
    """Splits images into patches: [B, H, W, C] -> [B, H W / size^2, size^2 C], row by row."""
    batch, height, width, channels = x_BxHxWxC.shape
    cut = x_BxHxWxC.reshape(batch, height // size, size, width // size, size, channels)
    return jnp.swapaxes(cut, 2, 3).reshape(batch, -1, size * size * channels)


def unpatched(x_BxNxD: Array, shape: tuple[int, int, int], size: int) -> Array:
    """Assembles images of the given shape from patches: the inverse of `patches`."""
    height, width, channels = shape
    grid = (-1, height // size, width // size, size, size, channels)
    return jnp.swapaxes(x_BxNxD.reshape(grid), 2, 3).reshape(-1, *shape)


def image_network(options: Any) -> Network:
    """Makes the network from options with `module`, `unembed`, `forward_flops` and `padding`.

    The module maps (z [B, L], t [B], label, keys) to features [B, L, D].
    """
    module = options.module()

    def init(key: Array) -> Params:
        z = jnp.zeros((1, math.prod(options.shape)), jnp.int32)
        return module.init(key, z, jnp.zeros((1,)))["params"]

    return Network(
        init,
        Binding(options, module),
        not options.time_conditioning,
        flops=options.forward_flops,
        padding=options.padding(),
    )


class Binding(NamedTuple):
    """Binds parameters, context and dropout keys to a module of images."""

    options: Any
    module: nn.Module

    def __call__(
        self, params: Params, context: Mapping[str, Array] | None = None, keys: Array | None = None
    ) -> Denoiser:
        """Returns the denoiser; UserError for a context that the network cannot use."""
        # The keys also draw the noise of the forward process.
        keys = None if keys is None else folded(keys, DROPOUT)
        context = checked_context(self.options, context, keys, ("label",))
        if keys is not None and self.options.dropout:
            context["keys"] = keys
        return self._bound(params, context)._replace(label=context.get("label"))

    def _bound(self, params: Params, context: dict[str, Array]) -> Denoiser:
        def features(z: Array, t: Array) -> Array:
            return self.module.apply({"params": params}, z, t, **context)

        def rebind(count: int) -> Denoiser:
            return self._bound(params, repeated(context, count))

        return Denoiser(features, self.options.unembed, Accelerator(token_groups()), rebind=rebind)
