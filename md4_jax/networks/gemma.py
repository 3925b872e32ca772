"""Layers of Gemma 4 with experts (Gemma Team, 2026), for `DiffusionGemma`.

Array names end in their shapes: B, L, D, H heads, Dh, K keys. Options are those of
`DiffusionGemma`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.attention import attend_masked, rounding
from md4_jax.networks.experts import LOAD, Kernel, choices, counted, mixed
from md4_jax.networks.feed_forward import FeedForward
from md4_jax.networks.keys import repeated
from md4_jax.networks.linear import Linear, Normalize, kernel_init
from md4_jax.networks.rotary import rotate_at
from md4_jax.protocols import Array
from md4_jax.runtime.sharding import BATCH_AXES, constrain

KeysValues = tuple[Array, Array]


class Attention(nn.Module):
    """Attention to own tokens and to earlier ones with given keys and values.

    Queries, keys and values are normalised, and scores are not divided by sqrt(Dh). A global layer
    (`near` False) has heads of another size, and uses its keys as values.
    """

    options: Any
    near: bool

    @nn.compact
    def __call__(
        self, x_BxLxD: Array, places: Array, mask: Array, before: KeysValues | None
    ) -> tuple[Array, KeysValues]:
        o, dtype = self.options, jnp.dtype(self.options.dtype)
        batch, length, size = x_BxLxD.shape
        each, kv_heads = o.shape_of(self.near)

        def heads(name: str, count: int) -> Array:
            made = linear(o, count * each, name)(x_BxLxD).reshape(batch, length, count, each)
            return constrain(made, BATCH_AXES, None, "tensor", None)

        def normal(x: Array, name: str, *, gain: bool = True) -> Array:
            return Normalize(gain, eps=o.norm_eps, name=name)(x)

        query, key = heads("query", o.heads), heads("key", kv_heads)
        value = heads("value", kv_heads) if self.near else key
        rope = o.rope_of(self.near)
        query = rotate_at(normal(query, "query_norm"), places, rope)
        own = (
            rotate_at(normal(key, "key_norm"), places, rope),
            normal(value, "value_norm", gain=False),
        )
        seen = own
        if before is not None:
            seen = tuple(jnp.concatenate(x, axis=1) for x in zip(before, own, strict=True))
        keys, values = (repeated(x, o.heads) for x in seen)
        query = query * jnp.asarray(each**0.5, dtype)  # `attend_masked` divides by it
        kernel = rounding(o.attention, o.products)
        out = attend_masked(query, keys, values, mask, kernel).reshape(batch, length, -1)
        return linear(o, size, "out")(out), own


class Router(nn.Module):
    """Chooses K experts for each token from scores in float32.

    Scores are the softmax of a linear layer on the normalised and scaled input. Weights are the
    scores of the chosen experts divided by their sum, times a learned scale of each expert. `load`:
    as in `experts.Router`.
    """

    options: Any

    @nn.compact
    def __call__(self, x_BxLxD: Array) -> tuple[Array, Array]:
        o, size = self.options, x_BxLxD.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (size,))
        kernel = self.param("kernel", kernel_init("torch"), (size, o.experts))
        of_expert = self.param("expert_scale", nn.initializers.ones, (o.experts,))
        normal = Normalize(gain=False, eps=o.norm_eps)(x_BxLxD.astype(jnp.float32))
        logits = jnp.matmul(
            normal * scale * size**-0.5, kernel.astype(jnp.float32), precision="highest"
        )
        weights, index = jax.lax.top_k(jax.nn.softmax(logits), o.experts_per_token)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        if self.has_variable("params", LOAD):
            tally = self.get_variable("params", LOAD)
            weights = counted(weights, tally, choices(index, o.experts))
        return weights * of_expert[index], index


class Experts(nn.Module):
    """Computes sum_k w_k f_k(y) with the experts and weights that the router chooses for x."""

    options: Any

    @nn.compact
    def __call__(self, x_BxLxD: Array, y_BxLxD: Array) -> Array:
        o, size = self.options, x_BxLxD.shape[-1]
        chosen = Router(o, name="router")(x_BxLxD)
        sides = {"gate": (size, o.expert_hidden), "up": (size, o.expert_hidden)}
        sides["down"] = (o.expert_hidden, size)
        kernels = [
            Kernel(
                (o.experts, *shape), jnp.dtype(o.dtype), "torch", 1.0, False, name=f"experts_{name}"
            )()
            for name, shape in sides.items()
        ]
        return mixed(o, y_BxLxD, chosen, kernels)


class Layer(nn.Module):
    """Block with a normalisation before and after each sublayer, and a scaled result.

    Experts, if there are any, are computed in parallel with the feed-forward layer.
    Returns (x, own keys and values).
    """

    options: Any
    near: bool

    @nn.compact
    def __call__(
        self,
        x_BxLxD: Array,
        places: Array,
        mask: Array,
        scale: Array,
        before: KeysValues | None = None,
    ) -> tuple[Array, KeysValues]:
        o = self.options

        def normal(x: Array, name: str) -> Array:
            return Normalize(gain=True, eps=o.norm_eps, name=name)(x)

        y, own = Attention(o, self.near, name="attention")(
            normal(x_BxLxD, "attention_norm"), places, mask, before
        )
        x_BxLxD = x_BxLxD + normal(y, "attention_out_norm")
        feed_forward = FeedForward(o, False, name="feed_forward")
        y = feed_forward(normal(x_BxLxD, "feed_forward_norm"), None, x_BxLxD.shape[1], lambda x: x)
        if o.experts:
            routed = Experts(o, name="experts")(x_BxLxD, normal(x_BxLxD, "experts_norm"))
            y = normal(y, "dense_out_norm") + normal(routed, "experts_out_norm")
        x_BxLxD = x_BxLxD + normal(y, "feed_forward_out_norm")
        return constrain(x_BxLxD * scale.astype(x_BxLxD.dtype), BATCH_AXES, None, None), own


class SelfConditioning(nn.Module):
    """Computes norm(x + f(norm(signal))) with a gated layer f, for the vectors x of tokens.

    The signal is the expected vector under the prediction of the previous step (self-conditioning,
    arXiv:2208.04202), or 0 if there was none.
    """

    options: Any

    @nn.compact
    def __call__(self, x_BxLxD: Array, signal_BxLxD: Array) -> Array:
        o = self.options
        y = Normalize(gain=True, eps=o.norm_eps, name="signal_norm")(signal_BxLxD)
        y = FeedForward(o, False, name="feed_forward")(y, None, x_BxLxD.shape[1], lambda x: x)
        return Normalize(gain=False, eps=o.norm_eps)(x_BxLxD + y)


def linear(o: Any, size: int, name: str) -> Linear:
    """Makes a linear layer without a bias, with an adapter if the options have a rank."""
    return Linear(
        size, jnp.dtype(o.dtype), initial="torch", products=o.products, rank=o.lora_rank,
        alpha=o.lora_alpha, name=name,
    )  # fmt: skip
