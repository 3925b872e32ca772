"""Bound and training losses of GIDD, on noise that is partly uniform: docs/families/gidd.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.head import at_noise, at_positions, noise_of
from md4_jax.objectives.noising import SMALLEST_TIME, masked, prompted
from md4_jax.objectives.token_nats import others_log1p, token_nats, two_and_others
from md4_jax.processes.capabilities import Interpolates
from md4_jax.processes.schedules import LATEST
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

WEIGHTS = ("bound", "clip", "dynamic")


@dataclasses.dataclass(frozen=True)
class GIDD:
    """Continuous-time bound of an interpolating process, in nats (GIDD, arXiv:2503.04482).

    With q(y | mu) = sum_x q(y | x) mu(x) at time t and r = q(z | x) / q(z | mu), a token costs

        w(z, x, t) ( KL(q(. | x) || q(. | mu)) + r - 1 - log r ),    w = rate(z) / q(z | x),

    where rate(z) is the rate at which the forward process jumps to z. It is the divergence of the
    reverse jumps given x from those of the model. There are no other terms, since z_0 is clean and
    z_1 fully masked.

    weights  bound    w, the bound
             clip     min(w, largest), training only
             dynamic  2 t (1 - t) w, training only. With gamma = 1 this is 2 for a mask, 1 for a
                      changed token, and close to 0 for an unchanged one: c_t / (V (1 - t))
    largest  upper limit of the weights with clip
    """

    needs: ClassVar[Needs] = Needs(
        (Interpolates,),
        parametrisations=("joint",),
        why="the bound is derived for the joint form",
    )
    time_power: ClassVar[int] = 10

    weights: str = "bound"
    largest: float = 2.0

    def __post_init__(self):
        if self.weights not in WEIGHTS:
            raise UserError(
                f"objective.weights must be one of {', '.join(WEIGHTS)}, not {self.weights!r}"
            )
        if not self.largest > 0:
            raise UserError(f"objective.largest must be above 0, not {self.largest}")

    def is_bound(self, process: Interpolates) -> bool:
        return self.weights == "bound"

    def __call__(
        self, denoiser: Denoiser, process: Interpolates, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        # u = 0 represents a cell of a float32 uniform; times of importance sampling are smaller.
        t = jnp.where(u > 0, jnp.clip(u, process.earliest, LATEST), SMALLEST_TIME)
        z = prompted(batch, process.corrupt(keys, batch.tokens, t))
        changed = (z != batch.tokens) & ~process.is_noise(z)
        extra = {"masked": masked(process, z), "changed": jnp.mean(changed, 1, dtype=jnp.float32)}
        return self.loss_at(denoiser, process, batch, z, t), extra

    def loss_at(
        self, denoiser: Denoiser, process: Interpolates, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns the integrand at (z, t) [B]; its mean over t ~ U(0, 1) and z is the bound."""
        h_BxLxD, times = denoiser.features(z, t), jnp.broadcast_to(t[:, None], z.shape)
        if process.shows_clean:
            # Only masks cost: the KL is alpha_t times -log mu(x).
            nats = at_noise(
                denoiser, h_BxLxD, noise_of(process, batch, z),
                reduce=token_nats, padded=True, rows=(batch.tokens,),
            )  # fmt: skip
            alpha, _, _ = process.levels(times)
            return jnp.sum(self.weight(process, z, z, times) * alpha * nats, axis=1)

        def cost(outputs: Array, x: Array, z: Array, t: Array) -> Array:
            nats = divergence(outputs, x, z, process.levels(t))
            return self.weight(process, x, z, t) * nats

        rows = (batch.tokens, z, times)
        nats = at_positions(denoiser, h_BxLxD, batch.loss_mask, reduce=cost, rows=rows)
        return jnp.sum(nats, axis=1)

    def weight(self, process: Interpolates, x: Array, z: Array, t: Array) -> Array:
        """Returns the weight of each token, like t; x, z and t have one shape."""
        alpha, each, mask = process.levels(t)
        to_each, to_mask = process.jump_rates(t)
        of_symbol = jnp.where(z == x, alpha + each, each)
        is_mask = process.is_noise(z)
        weight = jnp.where(is_mask, to_mask, to_each) / jnp.where(is_mask, mask, of_symbol)
        if self.weights == "clip":
            return jnp.minimum(weight, self.largest)
        return weight if self.weights == "bound" else 2.0 * t * (1.0 - t) * weight


def divergence(outputs: Array, x: Array, z: Array, levels: tuple[Array, Array, Array]) -> Array:
    """Returns KL(q(. | x) || q(. | mu)) + r - 1 - log r of each token: [..., V], [...] -> [...].

    levels = (alpha, each, mask), as of `Interpolates.levels`, each above 0. With k = alpha / each,
    q(y | x) = each (1 + k [y = x]) and q(y | mu) = each (1 + k mu_y) on the clean symbols, and both
    have the same mask. So only mu at x and z, and one sum over the logits, are needed.
    """
    alpha, each, _ = levels
    is_mask = z == outputs.shape[-1]
    place = jnp.where(is_mask, x, z)
    mu_z, mu_x, mu_others = two_and_others(outputs, place, x)
    kept, k = place == x, alpha / each
    # log q(x | mu) - log q(x | x), from 1 - mu_x without cancellation.
    short = k / (1.0 + k) * (mu_others + jnp.where(kept, 0.0, mu_z))
    near = jnp.log1p(-jnp.minimum(short, 0.5))
    log_x = jnp.where(short < 0.5, near, jnp.log1p(k * mu_x) - jnp.log1p(k))
    log_z = jnp.log1p(k * mu_z)
    others = others_log1p(outputs, k, place, x) + jnp.where(kept, 0.0, log_z)
    kl = -(alpha + each) * log_x - each * others
    log_r = -jnp.where(kept, log_x, log_z)
    return kl + jnp.where(is_mask, 0.0, jnp.expm1(log_r) - log_r)
