"""Direct preference optimisation of diffusion models, with bounds: docs/families/preference.md."""

import dataclasses

import jax
import jax.numpy as jnp

from md4_jax.objectives import answers
from md4_jax.objectives.distillation import teacher_of
from md4_jax.objectives.in_blocks import check_block, check_blocks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Process, UserError


@dataclasses.dataclass(frozen=True)
class Preference:
    """Loss of direct preference optimisation, with bounds for likelihoods (VRPO, arXiv:2505.19223).

    Let L be the bound for an answer (`answers.bound_of`: `any_order`, `block` or `uniform_elbo`),
    and L' that of the reference model, with which training began. Then

        loss = -log sigmoid(margin),
        margin = beta ((L'(chosen) - L(chosen)) - (L'(rejected) - L(rejected))),

    which is DPO (arXiv:2305.18290) with -L in place of log p. L and L' of an answer are means over
    `draws` draws of noise, the same for both models, so that much of the variance cancels. The mean
    of the loss is above the loss of the mean margin; the difference falls with the number of draws.
    This is a training-only loss, not a bound.

    beta        smaller values let the model move further from the reference model
    draws       number of noise draws for each answer; each model takes 2 draws forward passes for a
                pair
    supervised  weight of L(chosen), which is added to the loss
    block       number of tokens of a block, for block diffusion; 0: the whole text
    """

    beta: float = 0.1
    draws: int = 4
    supervised: float = 0.0
    block: int = 0

    def __post_init__(self):
        check_block(self.block)
        if not self.beta > 0:
            raise UserError(f"objective.beta must be above 0, not {self.beta}")
        if self.draws < 1:
            raise UserError(f"objective.draws must be at least 1, not {self.draws}")
        if self.supervised < 0:
            raise UserError(f"objective.supervised must not be negative, not {self.supervised}")

    @property
    def needs(self) -> Needs:
        return answers.needs(self.block, teacher=True, preferences=True)

    @property
    def calls(self) -> int:
        """Forward passes of the model in a training step, each with its backward pass."""
        return 2 * self.draws

    @property
    def teacher_calls(self) -> int:
        """Forward passes of the model at which training began, in a training step."""
        return self.calls

    def is_bound(self, process: Process) -> bool:
        return False

    def check_length(self, length: int, key: str = "data.length") -> None:
        """Raises UserError, with the length's key, unless blocks divide the length."""
        check_blocks(self.block, length, key)

    def __call__(
        self, denoiser: Denoiser, process: Process, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        both, levels, own = self._rows(batch, u, keys)
        bound, several = answers.bound_of(process, self.block), denoiser.repeated(self.calls)
        drawn = answers.drawn(bound, several, process, both, levels, own)
        nats = bound.loss_at(several, process, both, *drawn)
        reference_nats = bound.loss_at(teacher_of(several).denoiser, process, both, *drawn)
        reference_nats = jax.lax.stop_gradient(reference_nats)

        def mean(x: Array) -> Array:  # of the draws, of the chosen and the rejected answer [B, 2]
            return jnp.mean(x.reshape(len(u), 2, self.draws), axis=2)

        chosen, rejected = (mean(reference_nats) - mean(nats)).T
        margin = self.beta * (chosen - rejected)
        loss = self.supervised * mean(nats)[:, 0] - jax.nn.log_sigmoid(margin)
        share = answers.noise_share(process, both, drawn[0])
        return jnp.where(jnp.any(batch.loss_mask, axis=1), loss, 0.0), {
            **{key: jnp.mean(x.reshape(len(u), -1), axis=1) for key, x in share.items()},
            "margin": margin,
            "preferred": (margin > 0).astype(jnp.float32),
        }

    def _rows(self, batch: Batch, u: Array, keys: Array) -> tuple[Batch, Array, Array]:
        """Returns the rows of both answers, each `draws` times, with their levels and keys."""
        if batch.rejected is None:
            raise ValueError("the loss of preferences needs a batch with rejected answers")
        rows = self.calls
        rejected = jnp.where(batch.loss_mask, batch.rejected, batch.tokens)
        tokens = jnp.stack([batch.tokens, rejected], axis=1)
        tokens = jnp.repeat(tokens, self.draws, axis=1).reshape(rows * len(u), -1)
        both = Batch(tokens, jnp.repeat(batch.loss_mask, rows, axis=0), {})
        spread = (u[:, None, None] + jnp.arange(self.draws) / self.draws) % 1.0
        levels = jnp.broadcast_to(spread, (len(u), 2, self.draws)).reshape(-1)
        own = jax.vmap(lambda key: jax.random.split(key, rows))(keys).reshape(-1)
        return both, levels, own
