"""Bound of discrete flow matching: docs/families/flow_matching.md."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import at_positions
from md4_jax.objectives.noising import noised
from md4_jax.objectives.score_entropy import with_ends
from md4_jax.objectives.token_nats import rate_divergence, token_nats, two_and_others
from md4_jax.processes.capabilities import FollowsDistances, RedrawsUniformly
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.processes.outputs import widened
from md4_jax.protocols import Array, Batch, Denoiser, Needs

Flowing = RedrawsUniformly | FollowsDistances


@dataclasses.dataclass(frozen=True)
class GeneralizedKL:
    """Divergence of the jumps given x from the model's, in nats per sequence (arXiv:2412.03487).

    mu is the model's distribution of x given z_t. Its chain, that of the sampler `flow`, jumps from
    z to y at the rate m_y. With u_y the rate given the true x, the cost of a token is, integrated
    over t,

        sum_{y != z} ( m_y - u_y - u_y log(m_y / u_y) ),   m_y = sum_x mu_x u(y | z, x).

    Uniform noise: a token keeps its noise until it becomes x, at the rate w = -alpha' / (1 -
    alpha). The cost is w (1 - mu_z) if z = x, and w (-log mu_x - mu_z) otherwise.
    Metric-induced noise: u of `MetricPath`, to all symbols that are nearer to x. This takes V^2
    operations for each token.

    With the prior's KL and a network-free decoder of x from z_0 it is a bound of the chain's
    -log p(x), for every schedule. It is above the entropy of the data even for the optimal network,
    which does not see whether a token has jumped: do not compare its values with `uniform_elbo`.

    In the form `mixture` mu is the softmax of the outputs, and with uniform noise 1 - mu_z has the
    weight 1 / t near t = 0. In the form `joint`, mu is proportional to exp(outputs) q(z | x), which
    has no such pole.
    """

    needs: ClassVar[Needs] = Needs(
        (RedrawsUniformly, FollowsDistances),
        parametrisations=("joint", "mixture"),
        why="its outputs must be probabilities of x. For scores use objective.name='score_entropy'",
    )
    time_power: ClassVar[int] = 5
    is_loose: ClassVar[bool] = True

    def is_bound(self, process: Flowing) -> bool:
        return True

    def __call__(
        self, denoiser: Denoiser, process: Flowing, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t = noised(process, batch, u, keys)
        return with_ends(self.loss_at(denoiser, process, batch, z, t), process, batch)

    def loss_at(
        self, denoiser: Denoiser, process: Flowing, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns the integrand at (z, t) [B]; its mean over t ~ U(0, 1) and z is the integral."""
        is_joint = process.parametrisation == "joint"
        if isinstance(process, FollowsDistances):
            level, rate = process.sharpness(t), -process.sharpness_slope(t)
            reduce = functools.partial(path_nats, process.distances, is_joint)
        else:
            # log q(z | x) of x = z and of any other symbol differ by so much.
            level = jnp.log1p(process.odds(t)) if is_joint else jnp.zeros_like(t)
            rate, reduce = reveal_rate(process.schedule, t), mixture_nats
        rows = z, batch.tokens, jnp.broadcast_to(level[:, None], z.shape)
        nats_BxL = at_positions(
            denoiser, denoiser.features(z, t), batch.loss_mask,
            reduce=reduce, rows=rows, padded=reduce is mixture_nats,
        )  # fmt: skip
        return rate * jnp.sum(nats_BxL, axis=1)


def mixture_nats(outputs: Array, z: Array, x: Array, evidence: Array) -> Array:
    """Computes the cost of tokens per unit of w: outputs [..., V], the others [...] -> [...].

    evidence is added to the output of z.
    """
    here = jnp.arange(outputs.shape[-1]) == z[..., None]
    logits = widened(outputs) + jnp.where(here, evidence[..., None], 0.0)
    mu_z, _, mu_others = two_and_others(logits, z, x)
    # At z = x the others are all but z: 1 - mu_z without cancellation.
    return jnp.where(z == x, mu_others, token_nats(logits, x) - mu_z)


def path_nats(
    distances: Array, is_joint: bool, outputs: Array, z: Array, x: Array, beta: Array
) -> Array:
    """Computes the cost of tokens per unit of -beta': outputs [..., V], the others [...] -> [...].

    distances d[z, x], [V, V]. Targets y are processed one by one, which avoids arrays [..., V, V].
    """
    beta = beta[..., None]
    # log of sum_z exp(-beta d(z, x)) for each x; no sum is below 1.
    total = jax.lax.fori_loop(
        0, len(distances), lambda y, sums: sums + jnp.exp(-beta * distances[y]),
        jnp.zeros(outputs.shape, beta.dtype),
    )  # fmt: skip
    log_total, here = jnp.log(total), distances[z]
    logits = widened(outputs) - is_joint * (beta * here + log_total)
    log_mu = jax.nn.log_softmax(logits, axis=-1)

    def picked(values: Array) -> Array:
        return jnp.take_along_axis(values, x[..., None], axis=-1)[..., 0]

    @jax.checkpoint
    def of_target(nats: Array, y: Array) -> tuple[Array, None]:
        nearer = here - distances[y]
        log_law = -beta * distances[y] - log_total
        log_rate = jnp.where(
            nearer > 0, log_law + jnp.log(jnp.where(nearer > 0, nearer, 1.0)), -jnp.inf
        )
        jumps = z != y
        of_model = jax.nn.logsumexp(jnp.where(jumps[..., None], log_mu + log_rate, 0.0), axis=-1)
        cost = rate_divergence(
            jnp.ones(1), of_model[..., None], jnp.exp(picked(log_rate))[..., None]
        )
        return nats + jnp.where(jumps, cost, 0.0), None

    start = jnp.zeros(z.shape, log_mu.dtype)
    return jax.lax.scan(of_target, start, jnp.arange(len(distances)))[0]
