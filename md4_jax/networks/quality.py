"""Head that predicts the quality of each token: docs/families/prism.md."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.linear import Linear, Normalize
from md4_jax.protocols import Array, Denoiser, Network, Params, UserError

# Name of its parameters, and the regular expression of their paths.
HEAD = "quality"
QUALITY = rf"(^|/){HEAD}/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """Option of networks whose output says how good each token is.

    quality  also predicts the logit of the probability that a token is right, from its features
    """

    quality: bool = False


class QualityHead(nn.Module):
    """Maps features h [..., D] to logits [...]: LayerNorm, linear layer, GELU, linear layer.

    It is the head of PRISM for LLaDA (arXiv:2510.01384). At the start all logits are 0.

    options  those of `Transformer`
    """

    options: Any

    @nn.compact
    def __call__(self, h: Array) -> Array:
        o = self.options
        wide = h[..., : o.size].astype(jnp.float32)
        x = Normalize(gain=True, centred=True, bias=True, eps=1e-5, name="norm")(wide)
        x = Linear(
            o.size, jnp.float32, bias=True, initial=o.initial, products=o.products, name="hidden"
        )(x)
        x = nn.gelu(x, approximate=False)
        return Linear(1, jnp.float32, zeros=True, bias=True, name="out")(x)[..., 0]


def built(options: Any, platform: str) -> Network:
    """Makes the network of a class's options, with the head of `quality` if it is asked for."""
    network = options.build(platform)
    return with_quality(network, options, platform) if getattr(options, "quality", 0) else network


def with_quality(network: Network, options: Any, platform: str) -> Network:
    """Returns the network with a head of quality, whose parameters are network/quality/...

    Raises UserError for a network without features of each token of a text.
    """
    refused = (network.causal, "causal=True"), (network.gaps, "gaps=True")
    for is_so, said in (*refused, (network.classifies, "name of a classifier")):
        if is_so:
            raise UserError(
                "network.quality=True is for networks that predict the tokens of a text from both "
                f"sides, not for network.{said}"
            )
    head = QualityHead(options.resolved(platform))

    def init(key: Array) -> Params:
        own = head.init(jax.random.fold_in(key, 1), jnp.zeros((1, options.size)))["params"]
        return {**network.init(key), HEAD: own}

    def bind(params: Params, *rest: Any) -> Denoiser:
        return _judging(network.bind(params, *rest), partial(head.apply, {"params": params[HEAD]}))

    return network._replace(init=init, bind=bind, quality=True, added=QUALITY)


def _judging(denoiser: Denoiser, quality: Any) -> Denoiser:
    """Returns the denoiser with the head, also where its context changes."""
    rebind, within = denoiser.rebind, denoiser.within
    return denoiser._replace(
        quality=quality,
        rebind=rebind and (lambda count: _judging(rebind(count), quality)),
        within=within and (lambda segments: _judging(within(segments), quality)),
    )
