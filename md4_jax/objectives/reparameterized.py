"""Training loss of reparameterized diffusion models (RDM), as in DPLM: docs/proteins.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.noising import masked, prompted
from md4_jax.objectives.token_nats import masked_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

WEIGHTS = ("linear", "constant")


@dataclasses.dataclass(frozen=True)
class Reparameterized:
    """Loss E_i[ lambda_i sum_{z_n = m} -log mu_n(z_t)[x_n] ] / E[1 - alpha_t], in nats [B].

    RDM (arXiv:2302.05737) as DPLM (arXiv:2402.18567) uses it for masks: i is uniform in 1..T, each
    token is masked with probability 1 - alpha at t = i / T, and lambda_i is

    linear    1 - (i - 1) / T
    constant  1

    A bound would have 1 / i instead, so this is a training-only loss. DPLM divides the sum over a
    batch by its number of masks, this loss by their expected fraction.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))

    timesteps: int = 500
    weights: str = "linear"

    def __post_init__(self):
        if self.timesteps < 1:
            raise UserError(f"objective.timesteps must be at least 1, not {self.timesteps}")
        if self.weights not in WEIGHTS:
            raise UserError(
                f"objective.weights must be {' or '.join(WEIGHTS)}, not {self.weights!r}"
            )

    def is_bound(self, process: RevealsMasks) -> bool:
        return False

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        step = jnp.clip(1 + jnp.floor(u * self.timesteps), 1, self.timesteps)
        z = process.mask_each(keys, batch.tokens, self._share(process, step))
        z = prompted(batch, z)
        return self.loss_at(denoiser, process, batch, z, step), {"masked": masked(process, z)}

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, step: Array
    ) -> Array:
        """Returns the term at (z, step) [B]; its mean over steps 1..T and z is the loss."""
        weight = jnp.ones_like(step, jnp.float32)
        if self.weights == "linear":
            weight = 1.0 - (step - 1) / self.timesteps
        mean = jnp.mean(self._share(process, 1 + jnp.arange(self.timesteps)))
        nats = masked_nats(denoiser, process, batch, z, step / self.timesteps)
        return weight / mean * nats

    def _share(self, process: RevealsMasks, step: Array) -> Array:
        """Returns the expected fraction of masks at t = step / T."""
        return process.schedule.one_minus_alpha(step / self.timesteps)
