"""Bounds of MD4 in continuous and in discrete time: docs/families/md4.md."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.noising import masked, noised, prompted
from md4_jax.objectives.token_nats import masked_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError


@dataclasses.dataclass(frozen=True)
class MD4:
    """Bound of MD4 in continuous time, in nats per sequence (arXiv:2406.04329, eq. 5).

    L(x) = int_0^1 -alpha'_t / (1 - alpha_t) E_q[ sum_{z_n = m} -log mu_n(z_t, t)[x_n] ] dt,
    with one t for each sequence. It bounds -log p(x) if alpha runs from 1 to 0. For other schedules
    (geometric, clipped) it is only part of a bound, a training-only loss.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    time_power: ClassVar[int] = 2

    def is_bound(self, process: RevealsMasks) -> bool:
        return process.is_complete

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t = noised(process, batch, u, keys)
        return self.loss_at(denoiser, process, batch, z, t), {"masked": masked(process, z)}

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns the integrand at (z, t) [B]; its mean over t ~ U(0, 1) and z is the bound."""
        weight = reveal_rate(process.schedule, t)
        return weight * masked_nats(denoiser, process, batch, z, t)


@dataclasses.dataclass(frozen=True)
class DiscreteMD4:
    """Bound of MD4 with T steps, in nats per sequence (arXiv:2406.04329, section 2).

    With s(i) = (i-1)/T, t(i) = i/T, and alpha pinned to 1 at t(0) and to 0 at t(T), so that it is a
    bound for every schedule:

    reconstruction = 'model':    sum_{i=1}^T w_i E[masked CE]
    reconstruction = 'uniform':  sum_{i=2}^T w_i E[masked CE] + (1 - alpha_{t(1)}) L log V

    where w_i = (alpha_s - alpha_t) / (1 - alpha_t). The first decodes step 1 with the network, as
    the reference code does, the second with the parameter-free decoder of the paper.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    time_power: ClassVar[int] = 2

    timesteps: int = 1000
    reconstruction: str = "model"

    def __post_init__(self):
        if self.timesteps < 1:
            raise UserError(f"objective.timesteps must be at least 1, not {self.timesteps}")
        if self.reconstruction not in ("model", "uniform"):
            raise UserError(
                "objective.reconstruction must be 'model' or 'uniform', "
                f"not {self.reconstruction!r}"
            )

    @property
    def first_step(self) -> int:
        return 1 if self.reconstruction == "model" else 2

    def is_bound(self, process: RevealsMasks) -> bool:
        return True

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        terms = self.timesteps - self.first_step + 1
        step = self.first_step + jnp.floor(u * terms).astype(jnp.int32)
        step = jnp.clip(step, self.first_step, self.timesteps)
        z = process.mask_each(keys, batch.tokens, self.masked_probability(process, step))
        z = prompted(batch, z)
        extra = {"masked": masked(process, z)}
        if self.reconstruction == "uniform":
            extra["reconstruction"] = self._uniform_reconstruction(process, batch)
        return self.loss_at(denoiser, process, batch, z, step), extra

    def masked_probability(self, process: RevealsMasks, step: Array) -> Array:
        """Returns 1 - alpha at t = step / T, pinned to 0 and 1 at the ends."""
        inner = process.schedule.one_minus_alpha(step / self.timesteps)
        return jnp.where(step <= 0, 0.0, jnp.where(step >= self.timesteps, 1.0, inner))

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, step: Array
    ) -> Array:
        """Returns the term of this step times the number of steps, plus reconstruction [B]."""
        nats = masked_nats(denoiser, process, batch, z, step / self.timesteps)
        return self.weighed(process, nats, step) + self._uniform_reconstruction(process, batch)

    def weighed(self, process: RevealsMasks, nats: Array, step: Array) -> Array:
        """Returns the term of this step times the number of steps, from its masked nats [B]."""
        terms = self.timesteps - self.first_step + 1
        at_t = self.masked_probability(process, step)
        at_s = self.masked_probability(process, step - 1)
        # Where 1 - alpha underflows, no token is masked.
        return terms * (at_t - at_s) / jnp.where(at_t > 0, at_t, 1.0) * nats

    def _uniform_reconstruction(self, process: RevealsMasks, batch: Batch) -> Array:
        size = len(batch.tokens)
        if self.reconstruction == "model":
            return jnp.zeros(size)
        at_first = self.masked_probability(process, jnp.ones(size, int))
        return at_first * jnp.sum(batch.loss_mask, axis=1) * math.log(process.vocab_size)
