"""Bound of discrete flow matching: docs/families/flow_matching.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.head import at_positions
from md4_jax.objectives.md4 import masked_weight, noised
from md4_jax.objectives.score_entropy import with_ends
from md4_jax.objectives.token_nats import token_nats, two_and_others, widened
from md4_jax.processes.capabilities import RedrawsUniformly
from md4_jax.protocols import Array, Batch, Denoiser, Needs


@dataclasses.dataclass(frozen=True)
class GeneralizedKL:
    """Generalised KL of discrete flow matching on uniform noise, in nats (arXiv:2412.03487).

    The model is the chain of the sampler `flow`: a symbol z becomes y at the rate w mu_y, with
    w = -alpha' / (1 - alpha) and mu the model's distribution of x given z_t. Given x, a token keeps
    its noise until it becomes x, at the rate w. The divergence of these jumps is, for a token,

        w (1 - mu_z) if z = x,   w (-log mu_x - mu_z) otherwise,

    integrated over t. With the prior's KL and a network-free decoder of x from z_0 it is a bound of
    the chain's -log p(x), for every schedule. It is above the entropy of the data even for the
    right network, which cannot see whether a token has jumped: its numbers do not compare with
    those of `uniform_elbo`.

    In the form `mixture` mu is the softmax of the outputs, and 1 - mu_z has the weight 1 / t near
    t = 0. In `joint` the outputs are multiplied by q(z | x), and there is no such pole.
    """

    needs: ClassVar[Needs] = Needs(
        (RedrawsUniformly,),
        parametrisations=("joint", "mixture"),
        why="its outputs must be a distribution over x; score_entropy takes a score",
    )
    time_power: ClassVar[int] = 5
    is_loose: ClassVar[bool] = True

    def is_bound(self, process: RedrawsUniformly) -> bool:
        return True

    def __call__(
        self, denoiser: Denoiser, process: RedrawsUniformly, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t = noised(process, batch, u, keys)
        return with_ends(self.loss_at(denoiser, process, batch, z, t), process, batch)

    def loss_at(
        self, denoiser: Denoiser, process: RedrawsUniformly, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns the integrand at (z, t) [B]; its mean over t ~ U(0, 1) and z is the integral."""
        # log q(z | x) of x = z and of any other symbol differ by so much.
        evidence = jnp.log1p(process.odds(t)) if process.parametrisation == "joint" else 0.0 * t
        rows = z, batch.tokens, jnp.broadcast_to(evidence[:, None], z.shape)
        nats_BxL = at_positions(
            denoiser, denoiser.features(z, t), batch.loss_mask,
            reduce=mixture_nats, padded=True, rows=rows,
        )  # fmt: skip
        return masked_weight(process.schedule, t) * jnp.sum(nats_BxL, axis=1)


def mixture_nats(outputs: Array, z: Array, x: Array, evidence: Array) -> Array:
    """Computes the cost of tokens per unit of w: outputs [..., V], the others [...] -> [...].

    evidence is added to the output of z.
    """
    here = jnp.arange(outputs.shape[-1]) == z[..., None]
    logits = widened(outputs) + jnp.where(here, evidence[..., None], 0.0)
    mu_z, _, mu_others = two_and_others(logits, z, x)
    # At z = x the others are all but z: 1 - mu_z without cancellation.
    return jnp.where(z == x, mu_others, token_nats(logits, x) - mu_z)
