"""Policy-gradient loss for diffusion models, with bounds: docs/families/policy.md."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.objectives import answers
from md4_jax.objectives.distillation import teacher_of
from md4_jax.objectives.in_blocks import check_block, check_blocks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Process, UserError


class Behaviour(NamedTuple):
    """Model that drew the texts of a batch, and the index of the update with these texts.

    denoiser  bound to the context and the dropout of the batch
    update    int32 [], from 0; at 0 it is the same model as the one in training
    """

    denoiser: Denoiser
    update: Array


@dataclasses.dataclass(frozen=True)
class Policy:
    """Loss with a gradient that raises the reward of samples; a bound replaces the likelihood.

    Let L be the bound for a text that the model has drawn (`answers.bound_of`: `any_order`, `block`
    or `uniform_elbo`), L' that of the reference model, with which training began, and A the
    advantage: the reward compared with those of the `group` texts for the same prompt (GRPO,
    arXiv:2402.03300). Then

        loss = A L + kl (L - L')^2 / 2.

    -L takes the place of log p in the gradient of the expected reward and of the Kullback-Leibler
    divergence KL(p, p'). L and L' are means over `draws` draws of noise, the same for both
    models. This is not a bound and is for training only.

    With several `updates` for each set of drawn texts, A L is replaced by the clipped surrogate of
    PPO (arXiv:1707.06347) with one ratio for a text of n counted tokens (GSPO, arXiv:2507.18071;
    with bounds ESPO, arXiv:2512.03759). L'' is the bound of the model that drew the text, at the
    same noise, so that the ratio is 1 at the first update:

        -n min(A r, A clip(r, 1 - clip_below, 1 + clip_above)),  r = exp((L'' - L) / n).

    group       number of texts per prompt; a step has train.batch_size / group prompts
    kl          weight of the divergence from the reference model; 0: there is none
    draws       number of noise draws, and forward passes of each model, for each text
    normalised  whether A is divided by the standard deviation of the group's rewards
    block       number of tokens of a block, for block diffusion; 0: the whole text
    updates     number of training steps with each set of drawn texts
    clip_below  a text with A < 0 has no gradient if its ratio is below 1 - clip_below
    clip_above  a text with A > 0 has no gradient if its ratio is above 1 + clip_above
    """

    group: int = 8
    kl: float = 0.0
    draws: int = 4
    normalised: bool = True
    block: int = 0
    updates: int = 1
    clip_below: float = 0.2
    clip_above: float = 0.2

    def __post_init__(self):
        check_block(self.block)
        if self.group < 2:
            raise UserError(f"objective.group must be at least 2, not {self.group}")
        if self.kl < 0:
            raise UserError(f"objective.kl must not be negative, not {self.kl}")
        if self.draws < 1:
            raise UserError(f"objective.draws must be at least 1, not {self.draws}")
        if self.updates < 1:
            raise UserError(f"objective.updates must be at least 1, not {self.updates}")
        if not 0 <= self.clip_below <= 1:
            raise UserError(
                f"objective.clip_below must be between 0 and 1, not {self.clip_below}: a ratio of "
                "probabilities is above 0"
            )
        if not self.clip_above >= 0:
            raise UserError(f"objective.clip_above must not be negative, not {self.clip_above}")

    @property
    def needs(self) -> Needs:
        return answers.needs(self.block, teacher=self.kl > 0, rewards=True)

    @property
    def calls(self) -> int:
        """Forward passes of the model in a training step, each with its backward pass."""
        return self.draws

    @property
    def teacher_calls(self) -> int:
        """Forward passes of other models in a training step: the reference, and the old model."""
        return self.draws * ((self.kl > 0) + (self.updates > 1))

    def is_bound(self, process: Process) -> bool:
        return False

    def check_length(self, length: int, key: str = "data.length") -> None:
        """Raises UserError, with the length's key, unless blocks divide the length."""
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
        if self.updates > 1:
            old_nats = bound.loss_at(student.behaviour.denoiser, process, several, *drawn)
            loss, more = self._clipped(batch, nats, self._mean(old_nats), student.behaviour.update)
            extra |= more
        if self.kl:
            reference_nats = bound.loss_at(teacher_of(student).denoiser, process, several, *drawn)
            moved = self._mean(jax.lax.stop_gradient(reference_nats)) - nats
            loss += 0.5 * self.kl * moved**2
            extra["moved"] = moved
        return loss, extra

    def _clipped(
        self, batch: Batch, nats: Array, old_nats: Array, update: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns the surrogate [B] and the logged statistics of its ratios.

        old_nats  bounds [B] of the model that drew the texts, before the first update
        """
        # Two programs may round the same computation differently, which must not cause clipping.
        old = jax.lax.stop_gradient(jnp.where(update == 0, nats, old_nats))
        length = jnp.maximum(1, jnp.sum(batch.loss_mask, axis=1))
        ratio = jnp.exp((old - nats) / length)
        nearest = jnp.clip(ratio, 1 - self.clip_below, 1 + self.clip_above)
        clipped = batch.advantage * (ratio - nearest) > 0
        used = jnp.where(clipped, jax.lax.stop_gradient(nearest), ratio)
        return -length * batch.advantage * used, {
            "ratio": ratio,
            "ratio_spread": jnp.abs(ratio - 1),
            "clipped": clipped.astype(jnp.float32),
        }

    def _mean(self, each: Array) -> Array:
        """Returns the mean over the draws of each text [B]."""
        return jnp.mean(each.reshape(-1, self.draws), axis=1)

    def _rows(self, batch: Batch, u: Array, keys: Array) -> tuple[Batch, Array, Array]:
        """Repeats each text `draws` times, with evenly spread levels, and keys."""
        tokens, counts = (jnp.repeat(x, self.draws, axis=0) for x in batch[:2])
        levels = (u[:, None] + jnp.arange(self.draws) / self.draws) % 1.0
        own = jax.vmap(lambda key: jax.random.split(key, self.draws))(keys)
        return Batch(tokens, counts, {}), levels.reshape(-1), own.reshape(-1)
