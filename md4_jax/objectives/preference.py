"""Preferences between two answers, learned by a masked model: docs/families/preference.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.distillation import teacher_of
from md4_jax.objectives.noising import masked
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

BOUND = AnyOrder()


@dataclasses.dataclass(frozen=True)
class Preference:
    """Loss of direct preference optimisation, with bounds for likelihoods (VRPO, arXiv:2505.19223).

    With L the bound of `any_order` of an answer, and L' that of the model at which training began,

        loss = -log sigmoid(margin),
        margin = beta ((L'(chosen) - L(chosen)) - (L'(rejected) - L(rejected))),

    which is DPO (arXiv:2305.18290) with -L in place of log p. L and L' of an answer are means over
    `draws` numbers of masks, one mask pattern for each, the same for both models, so that what the
    noise adds to both cancels. The mean of the loss is above the loss of the mean margin, by less
    the more draws. This is not a bound and is for training only.

    beta        weight of the change from the start: a smaller one lets the model move further
    draws       mask patterns of each answer; each model makes 2 draws forward passes for a pair
    supervised  weight of L(chosen), which is added to the loss
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), teacher=True, preferences=True)

    beta: float = 0.1
    draws: int = 4
    supervised: float = 0.0

    def __post_init__(self):
        if not self.beta > 0:
            raise UserError(f"objective.beta must be above 0, not {self.beta}")
        if self.draws < 1:
            raise UserError(f"objective.draws must be at least 1, not {self.draws}")
        if self.supervised < 0:
            raise UserError(f"objective.supervised must not be negative, not {self.supervised}")

    @property
    def calls(self) -> int:
        """Forward passes of the model in a training step, each with its backward pass."""
        return 2 * self.draws

    @property
    def teacher_calls(self) -> int:
        """Forward passes of the model at which training began, in a training step."""
        return self.calls

    def is_bound(self, process: RevealsMasks) -> bool:
        return False

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        both, levels, own = self._rows(batch, u, keys)
        z, t = BOUND.noised(process, both, levels, own)
        several = denoiser.repeated(self.calls)
        nats = BOUND.loss_at(several, process, both, z, t)
        its = BOUND.loss_at(teacher_of(several).denoiser, process, both, z, t)
        its = jax.lax.stop_gradient(its)

        def mean(x: Array) -> Array:  # of the draws, of the chosen and the rejected answer [B, 2]
            return jnp.mean(x.reshape(len(u), 2, self.draws), axis=2)

        chosen, rejected = (mean(its) - mean(nats)).T
        margin = self.beta * (chosen - rejected)
        loss = self.supervised * mean(nats)[:, 0] - jax.nn.log_sigmoid(margin)
        return jnp.where(jnp.any(batch.loss_mask, axis=1), loss, 0.0), {
            "masked": jnp.mean(masked(process, z).reshape(len(u), -1), axis=1),
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
