"""Policy gradient of a reward, learned by a masked model: docs/families/policy.md."""

import dataclasses

import jax
import jax.numpy as jnp

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.distillation import teacher_of
from md4_jax.objectives.noising import masked
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

BOUND = AnyOrder()


@dataclasses.dataclass(frozen=True)
class Policy:
    """Loss whose gradient raises the reward of samples, with a bound for the likelihood.

    With L the bound of `any_order` of a text that the model has just drawn, L' that of the model at
    which training began, and A its advantage, the reward compared with those of the `group` texts
    that were drawn after the same prompt (GRPO, arXiv:2402.03300),

        loss = A L + kl (L - L')^2 / 2.

    -L takes the place of log p in the gradient of the expected reward and of the Kullback-Leibler
    divergence KL(p, p'). L and L' are means over `draws` numbers of masks, one mask pattern for
    each, the same for both models. This is not a bound and is for training only.

    group       texts that are drawn after a prompt; a step has train.batch_size / group prompts
    kl          weight of the divergence from the start; 0: the start is not kept
    draws       mask patterns of each text; each model makes so many forward passes for it
    normalised  whether A is divided by the standard deviation of the group's rewards
    """

    group: int = 8
    kl: float = 0.0
    draws: int = 4
    normalised: bool = True

    def __post_init__(self):
        if self.group < 2:
            raise UserError(f"objective.group must be at least 2, not {self.group}")
        if self.kl < 0:
            raise UserError(f"objective.kl must not be negative, not {self.kl}")
        if self.draws < 1:
            raise UserError(f"objective.draws must be at least 1, not {self.draws}")

    @property
    def needs(self) -> Needs:
        return Needs((RevealsMasks,), teacher=self.kl > 0, rewards=True)

    @property
    def calls(self) -> int:
        """Forward passes of the model in a training step, each with its backward pass."""
        return self.draws

    @property
    def teacher_calls(self) -> int:
        """Forward passes of the model at which training began, in a training step."""
        return self.draws if self.kl else 0

    def is_bound(self, process: RevealsMasks) -> bool:
        return False

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        if batch.advantage is None:
            raise ValueError("the loss of a policy needs a batch with rewards and advantages")
        several, levels, own = self._rows(batch, u, keys)
        z, t = BOUND.noised(process, several, levels, own)
        student = denoiser.repeated(self.draws)
        nats = self._mean(BOUND.loss_at(student, process, several, z, t))
        loss, extra = batch.advantage * nats, {
            "masked": self._mean(masked(process, z)),
            "reward": batch.reward,
            "tied": (batch.advantage == 0).astype(jnp.float32),
        }  # fmt: skip
        if self.kl:
            its = BOUND.loss_at(teacher_of(student).denoiser, process, several, z, t)
            moved = self._mean(jax.lax.stop_gradient(its)) - nats
            loss += 0.5 * self.kl * moved**2
            extra["moved"] = moved
        return loss, extra

    def _mean(self, each: Array) -> Array:
        """Returns the mean over the draws of each text [B]."""
        return jnp.mean(each.reshape(-1, self.draws), axis=1)

    def _rows(self, batch: Batch, u: Array, keys: Array) -> tuple[Batch, Array, Array]:
        """Returns each text `draws` times, with levels that are spread evenly, and keys."""
        tokens, counts = (jnp.repeat(x, self.draws, axis=0) for x in batch[:2])
        levels = (u[:, None] + jnp.arange(self.draws) / self.draws) % 1.0
        own = jax.vmap(lambda key: jax.random.split(key, self.draws))(keys)
        return Batch(tokens, counts, {}), levels.reshape(-1), own.reshape(-1)
