"""Mixture-of-experts feed-forward layers: each token uses a few of the experts.

Array names end in their shapes: B, L, D, E experts, K per token, N tokens, F hidden. Options are
those of `Transformer`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from md4_jax.networks.feed_forward import GATED, FeedForward
from md4_jax.networks.grouped import grouped
from md4_jax.networks.linear import kernel_init
from md4_jax.networks.routing import allowed, check_routing
from md4_jax.protocols import Array, UserError
from md4_jax.runtime.sharding import BATCH_AXES, CONTEXT, dividing, on_one_device

SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
SMALLEST = 1e-20  # sum of scores
LOAD = "load"  # name of the array whose gradient counts choices
# Mesh axes over which parameters are split and gathered by a layer before use.
GATHERED = ("fsdp", CONTEXT)
# How the experts' matrices are split after the expert axis, which is not split.
SPLIT = {
    "gate": P(None, GATHERED, "tensor"), "up": P(None, GATHERED, "tensor"),
    "down": P(None, "tensor", GATHERED),
}  # fmt: skip


class Experts(nn.Module):
    """Computes sum_k w_k f_k(x) over the experts that the router chooses for a token.

    Experts f are gated layers without biases. There is no capacity limit: no token is dropped. With
    `shared_hidden` a shared expert, which all tokens use, is added. If keys are given, which only
    training does, the backward pass adds the gradients of two auxiliary losses: `balance` times the
    mean `imbalance` of the layers, and `router_z` times the mean `size_of_logits`. length, needed:
    as in `FeedForward`.
    """

    options: Any
    zero_output: bool

    @nn.compact
    def __call__(
        self, x_BxLxD: Array, keys: Array | None, length: int, needed: Callable[[Array], Array]
    ) -> Array:
        o, dtype, size = self.options, jnp.dtype(self.options.dtype), x_BxLxD.shape[-1]
        scores_BxLxE, weights_BxLxK, index_BxLxK = Router(o, name="router")(x_BxLxD, keys)
        if keys is not None and o.balance:
            share = o.balance / (o.depth - o.dense_layers)
            weights_BxLxK = attached(weights_BxLxK, share * imbalance(scores_BxLxE, index_BxLxK))
        scale = 2.0 / o.depth if o.initial == "depth_scaled" else 1.0
        zeros = self.zero_output
        kernels = [
            Kernel((o.experts, *sides), dtype, o.initial, scale, z, name=f"experts_{name}")()
            for name, sides, z in (
                ("gate", (size, o.expert_hidden), False), ("up", (size, o.expert_hidden), False),
                ("down", (o.expert_hidden, size), zeros),
            )
        ]  # fmt: skip
        y_BxLxD = mixed(o, x_BxLxD, (weights_BxLxK, index_BxLxK), kernels)
        if o.shared_hidden:
            shared = dataclasses.replace(o, hidden=o.shared_hidden)
            layer = FeedForward(shared, zeros, name="shared")
            y_BxLxD = y_BxLxD + layer(x_BxLxD, keys, length, needed)
        return y_BxLxD


class Router(nn.Module):
    """Chooses K experts for each token from scores in float32.

    Returns (scores [B, L, E], weights [B, L, K], experts [B, L, K]). Scores are the softmax or the
    sigmoid of a linear layer. Weights are the scores of the chosen experts, divided by their sum
    with `router_normalised`, times `router_scale`.

    With `router_bias` a bias of each expert is added to its score for the choice only, without a
    gradient (arXiv:2412.19437). Experts are chosen from `router_groups_taken` of the
    `router_groups` groups: those with the largest sum of their two best scores. With
    `router_block` they are chosen from `router_block_taken` experts, which all tokens of a block of
    this length share (`routing.within_blocks`).

    The parameter `load` [E] exists only within a training step (`training/loads.py`). No result
    depends on it; its gradient is the number of times that each expert is chosen.
    """

    options: Any

    @nn.compact
    def __call__(self, x_BxLxD: Array, keys: Array | None = None) -> tuple[Array, Array, Array]:
        o, size = self.options, x_BxLxD.shape[-1]
        kernel = self.param("kernel", kernel_init(o.initial), (size, o.experts))
        wide, kernel = (x.astype(jnp.float32) for x in (x_BxLxD, kernel))
        logits = jnp.matmul(wide, kernel, precision="highest")
        ranked = scores = SCORES[o.router](logits)
        if o.router_bias:
            bias = self.param("bias", nn.initializers.zeros, (o.experts,))
            ranked = scores + bias.astype(jnp.float32)
        _, index = jax.lax.top_k(allowed(o, ranked), o.experts_per_token)
        weights = jnp.take_along_axis(scores, index, axis=-1)
        if o.router_normalised:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + SMALLEST)
        if keys is not None and o.router_z:
            share = o.router_z / (o.depth - o.dense_layers)
            weights = attached(weights, share * size_of_logits(logits))
        if self.has_variable("params", LOAD):
            tally = self.get_variable("params", LOAD)
            weights = counted(weights, tally, choices(index, o.experts))
        return scores, o.router_scale * weights, index


class Kernel(nn.Module):
    """Matrices [E, in, out], each initialised like a linear layer."""

    shape: tuple[int, int, int]
    dtype: jnp.dtype
    initial: str
    scale: float
    zeros: bool

    @nn.compact
    def __call__(self) -> Array:
        one = nn.initializers.zeros if self.zeros else kernel_init(self.initial, self.scale)

        def init(key: Array, shape: tuple[int, ...]) -> Array:
            return jax.vmap(lambda key: one(key, shape[1:]))(jax.random.split(key, shape[0]))

        return self.param("kernel", init, self.shape).astype(self.dtype)


def imbalance(scores_BxLxE: Array, index_BxLxK: Array) -> Array:
    """Computes E sum_e f_e p_e (arXiv:2101.03961, eq. 4; with K experts arXiv:2409.02060): [].

    f_e is the fraction of all choices that are expert e, and p_e its mean score, where the scores
    of a token are normalised to sum to 1. The result is 1 if all experts are chosen equally often.
    """
    experts = scores_BxLxE.shape[-1]
    scores = scores_BxLxE / jnp.sum(scores_BxLxE, axis=-1, keepdims=True)
    part = choices(index_BxLxK, experts) / index_BxLxK.size
    return experts * jnp.sum(part * jnp.mean(scores, axis=(0, 1)))


def size_of_logits(logits_BxLxE: Array) -> Array:
    """Computes the mean of (log sum_e exp logit_e)^2 over tokens (arXiv:2202.08906, eq. 5): []."""
    return jnp.mean(jax.nn.logsumexp(logits_BxLxE, axis=-1) ** 2)


def choices(index_BxLxK: Array, experts: int) -> Array:
    """Counts how often each expert is chosen, by all tokens of all devices: float32 [E]."""
    chosen = jnp.any(index_BxLxK[..., None] == jnp.arange(experts), axis=-2)
    return jnp.sum(chosen.astype(jnp.float32), axis=(0, 1))


@jax.custom_vjp
def attached(x: Array, term: Array) -> Array:
    """Returns x; the backward pass treats `term` [] as if it were added to the loss.

    The value of the loss does not include the term, so the loss of an objective remains a bound.
    """
    del term
    return x


attached.defvjp(lambda x, term: (x, None), lambda _, slope: (slope, jnp.ones(())))


@jax.custom_vjp
def counted(x: Array, load: Array, counts: Array) -> Array:
    """Returns x; the gradient of load [E] is counts, for any loss.

    Gradients carry the counts out of any objective, scan over layers or recomputed block. Counts of
    several passes, microbatches and devices are summed, as gradients are.
    """
    del load, counts
    return x


counted.defvjp(lambda x, load, counts: (x, counts), lambda counts, slope: (slope, counts, None))


def mixed(o: Any, x_BxLxD: Array, chosen: tuple[Array, Array], kernels: list[Array]) -> Array:
    """Computes sum_k w_k f_k(x), on each device of a mesh for its own tokens.

    chosen: weights and indices of the experts of each token, [B, L, K]. kernels: those of gate, up
    and down. A device gathers the parts of kernels that are split over `fsdp` and `context`. Where
    kernels are split over `tensor`, each device computes a partial result, and these are summed.
    """
    local = functools.partial(_local, o, split=not on_one_device())
    if on_one_device():
        return local(x_BxLxD, chosen, kernels)
    rows = dividing(x_BxLxD.shape, BATCH_AXES, CONTEXT, None)
    specs = rows, (rows, rows), [SPLIT[name] for name in ("gate", "up", "down")]
    # check_vma cannot infer over which axes the results of dynamic loops vary, so it is off.
    on_mesh = jax.shard_map(local, in_specs=specs, out_specs=rows, check_vma=False)
    return on_mesh(x_BxLxD, chosen, kernels)


def _local(
    o: Any, x_BxLxD: Array, chosen: tuple[Array, Array], kernels: list[Array], *, split: bool
) -> Array:
    (weights_BxLxK, index_BxLxK), (gate, up, down) = chosen, kernels
    if split:
        gather = functools.partial(jax.lax.all_gather, axis_name=GATHERED, tiled=True)
        gate, up, down = gather(gate, axis=1), gather(up, axis=1), gather(down, axis=2)
    per_token, act = index_BxLxK.shape[-1], GATED[o.feed_forward]
    x_NxD, expert = x_BxLxD.reshape(-1, x_BxLxD.shape[-1]), index_BxLxK.reshape(-1)
    order = jnp.argsort(expert)
    places = jnp.argsort(order)
    sizes = jnp.bincount(expert, length=o.experts).astype(jnp.int32)
    product = functools.partial(grouped, sizes=sizes, products=o.products)
    rows = sorted_rows(x_NxD.astype(gate.dtype), order, places)
    out = product(act(product(rows, gate), product(rows, up)), down)
    out_NxKxD = moved(out, places, order).reshape(-1, per_token, out.shape[-1])
    weights_NxK = weights_BxLxK.reshape(-1, per_token)
    y_NxD = jnp.einsum("nk,nkd->nd", weights_NxK, out_NxKxD.astype(jnp.float32))
    if split:
        y_NxD = jax.lax.psum(y_NxD, "tensor")
    return y_NxD.astype(x_BxLxD.dtype).reshape(x_BxLxD.shape)


@jax.custom_vjp
def sorted_rows(x_NxD: Array, order: Array, places: Array) -> Array:
    """Repeats each row of x [N, D] K times and permutes the copies by order: [N K, D].

    places: the inverse of order. The custom gradient is a gather; that of a gather is a scatter.
    """
    return x_NxD[order // (len(order) // len(x_NxD))]


def _sorted_forward(x_NxD: Array, order: Array, places: Array):
    return sorted_rows(x_NxD, order, places), (places, len(x_NxD))


def _sorted_backward(kept: tuple, slope: Array):
    places, rows = kept
    return jnp.sum(slope[places].reshape(rows, -1, slope.shape[-1]), axis=1), None, None


sorted_rows.defvjp(_sorted_forward, _sorted_backward)


@jax.custom_vjp
def moved(x: Array, order: Array, places: Array) -> Array:
    """Returns x[order]; the custom gradient is a gather by `places`, the inverse of order."""
    return x[order]


moved.defvjp(lambda x, order, places: (x[order], places), lambda p, slope: (slope[p], None, None))


def check_experts(o: Any) -> None:
    """Raises UserError for inconsistent keys of experts."""
    if not o.experts:
        for key in ("dense_layers", "shared_hidden", "balance", "router_z"):
            if getattr(o, key):
                raise UserError(
                    f"network.{key}={getattr(o, key)} is only for mixture-of-experts layers: set "
                    f"network.experts, or network.{key}=0"
                )
        return
    if o.feed_forward not in ("swiglu", "glu"):
        raise UserError(
            f"network.experts needs network.feed_forward swiglu or glu, not {o.feed_forward!r}"
        )
    if o.depth and o.dense_layers >= o.depth:
        raise UserError(
            f"network.dense_layers={o.dense_layers} must be below network.depth={o.depth}: at "
            "least one layer must have experts. For none set network.experts=0"
        )
    check_routing(o)
