"""Policy gradient of a reward, learned by a diffusion model: docs/families/policy.md."""

import dataclasses

import jax
import jax.numpy as jnp

from md4_jax.objectives import answers
from md4_jax.objectives.distillation import teacher_of
from md4_jax.objectives.in_blocks import check_block, check_blocks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Process, UserError


@dataclasses.dataclass(frozen=True)
class Policy:
    """Loss whose gradient raises the reward of samples, with a bound for the likelihood.

    With L the bound on a text that the model has just drawn (`answers.bound_of`: `any_order`,
    `block` or `uniform_elbo`), L' that of the model at which training began, and A its advantage,
    the reward compared with those of the `group` texts that were drawn after the same prompt (GRPO,
    arXiv:2402.03300),

        loss = A L + kl (L - L')^2 / 2.

    -L takes the place of log p in the gradient of the expected reward and of the Kullback-Leibler
    divergence KL(p, p'). L and L' are means over `draws` draws of noise, the same for both
    models. This is not a bound and is for training only.

    group       texts that are drawn after a prompt; a step has train.batch_size / group prompts
    kl          weight of the divergence from the start; 0: the start is not kept
    draws       draws of noise for each text; each model makes so many forward passes for it
    normalised  whether A is divided by the standard deviation of the group's rewards
    block       tokens of a block, for block diffusion; 0: the whole text
    """

    group: int = 8
    kl: float = 0.0
    draws: int = 4
    normalised: bool = True
    block: int = 0

    def __post_init__(self):
        check_block(self.block)
        if self.group < 2:
            raise UserError(f"objective.group must be at least 2, not {self.group}")
        if self.kl < 0:
            raise UserError(f"objective.kl must not be negative, not {self.kl}")
        if self.draws < 1:
            raise UserError(f"objective.draws must be at least 1, not {self.draws}")

    @property
    def needs(self) -> Needs:
        return answers.needs(self.block, teacher=self.kl > 0, rewards=True)

    @property
    def calls(self) -> int:
        """Forward passes of the model in a training step, each with its backward pass."""
        return self.draws

    @property
    def teacher_calls(self) -> int:
        """Forward passes of the model at which training began, in a training step."""
        return self.draws if self.kl else 0

    def is_bound(self, process: Process) -> bool:
        return False

    def check_length(self, length: int, key: str = "data.length") -> None:
        """UserError, which names the key of the length, for sequences that are not whole blocks."""
        check_blocks(self.block, length, key)

    def __call__(
        self, denoiser: Denoiser, process: Process, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        if batch.advantage is None:
            raise ValueError("the loss of a policy needs a batch with rewards and advantages")
        several, levels, own = self._rows(batch, u, keys)
        bound, student = answers.bound_of(process, self.block), denoiser.repeated(self.draws)
        drawn = answers.drawn(bound, student, process, several, levels, own)
        nats = self._mean(bound.loss_at(student, process, several, *drawn))
        share = answers.noise_share(process, several, drawn[0])
        loss, extra = batch.advantage * nats, {
            **{key: self._mean(x) for key, x in share.items()},
            "reward": batch.reward,
            "tied": (batch.advantage == 0).astype(jnp.float32),
        }  # fmt: skip
        if self.kl:
            its = bound.loss_at(teacher_of(student).denoiser, process, several, *drawn)
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
