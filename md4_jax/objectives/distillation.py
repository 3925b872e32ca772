"""Rounds of a distillation, and divergences of a student from its teacher."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import at_positions
from md4_jax.objectives.token_nats import divergence_nats
from md4_jax.processes.outputs import widened
from md4_jax.protocols import Array, Denoiser, UserError

# (logits of the student, logits of the teacher), each [..., V] -> [...].
Divergence = Callable[[Array, Array], Array]


class Teacher(NamedTuple):
    """Network whose outputs are the targets of another one.

    denoiser  bound to the context of the batch, without dropout and without a gradient
    round     int32 [], the round of the distillation, from 0 on
    """

    denoiser: Denoiser
    round: Array


def forward_kl(student: Array, teacher: Array) -> Array:
    """Computes KL(teacher || student) in nats."""
    return divergence_nats(student, teacher)


def reverse_kl(student: Array, teacher: Array) -> Array:
    """Computes KL(student || teacher) in nats."""
    return divergence_nats(teacher, student)


def total_variation(student: Array, teacher: Array) -> Array:
    """Computes half the sum of the absolute differences of probabilities."""
    p, q = (jax.nn.softmax(widened(logits), axis=-1) for logits in (student, teacher))
    return 0.5 * jnp.sum(jnp.abs(p - q), axis=-1)


def squares_of_logs(student: Array, teacher: Array) -> Array:
    """Computes the mean over symbols of the squared difference of log-probabilities."""
    p, q = (jax.nn.log_softmax(widened(logits), axis=-1) for logits in (student, teacher))
    possible = q > -jnp.inf
    difference = jnp.where(possible, p, 0.0) - jnp.where(possible, q, 0.0)
    return jnp.mean(difference**2, axis=-1)


DIVERGENCES: dict[str, Divergence] = {
    "reverse_kl": reverse_kl,
    "kl": forward_kl,
    "tvd": total_variation,
    "mse": squares_of_logs,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """Base class of the losses of distillation: their options and rounds.

    The teacher's time step is 1 / steps in the first round, and `growth` times as long in each
    following round. The teacher of a round is the student of the previous round. These losses are
    not bounds.

    steps        number of steps of the teacher's sampler in the first round
    round_steps  number of training steps of a round; 0: one round, with a constant teacher
    divergence   between student and teacher at a position: reverse_kl, kl, tvd or mse
    averaged     whether the next teacher is the moving average of the student
    """

    growth: ClassVar[int]
    span: ClassVar[int]

    steps: int = 1024
    round_steps: int = 10_000
    divergence: str = "reverse_kl"
    averaged: bool = False

    def __post_init__(self):
        for key, least in (("steps", 1), ("round_steps", 0)):
            if getattr(self, key) < least:
                raise UserError(
                    f"objective.{key} must be at least {least}, not {getattr(self, key)}"
                )
        if self.divergence not in DIVERGENCES:
            raise UserError(
                f"objective.divergence must be one of {', '.join(DIVERGENCES)}, "
                f"not {self.divergence!r}"
            )

    def is_bound(self, process: Any) -> bool:
        return False

    def step_size(self, round: Array) -> Array:
        """Returns the teacher's step in time in a round, float32 []."""
        return jnp.float32(self.growth) ** round / self.steps

    def check_rounds(self, num_steps: int) -> None:
        """Raises UserError if a time step of the last student would be longer than 1."""
        asked = -(-num_steps // self.round_steps) if self.round_steps else 1
        left, rounds = self.steps // self.span, 1
        while left >= self.growth > 1:
            left, rounds = left // self.growth, rounds + 1
        if asked > rounds and self.growth > 1:
            raise UserError(
                f"train.num_steps={num_steps} with objective.round_steps={self.round_steps} makes "
                f"{asked} rounds. Starting from objective.steps={self.steps}, {rounds} are enough "
                "to reach a single step: set train.num_steps to at most "
                f"{rounds * self.round_steps}, or raise objective.round_steps"
            )


def teacher_of(denoiser: Denoiser) -> Teacher:
    """Returns the teacher of a denoiser; ValueError if there is none."""
    if denoiser.teacher is None:
        raise ValueError("a distillation needs a teacher: the training step hands it over")
    return denoiser.teacher


def divergence_at(
    divergence: str, student: Denoiser, h: Array, taught: Array, chosen: Array, **head: Any
) -> Array:
    """Computes a divergence at the chosen positions [B, L], 0 elsewhere.

    h and taught [B, L, D] are features of the student and of its teacher; the latter have no
    gradient. Logits of both are computed in chunks. head: `capacities` of `head.at_positions`.
    """
    teacher, width = teacher_of(student).denoiser, h.shape[-1]

    def unembed(both: Array) -> Array:
        taught_logits = jax.lax.stop_gradient(teacher.unembed(both[..., width:]))
        return jnp.concatenate([student.unembed(both[..., :width]), taught_logits], axis=-1)

    def reduce(logits: Array) -> Array:
        return DIVERGENCES[divergence](*jnp.split(logits, 2, axis=-1))

    pair = Denoiser(None, unembed, student.accelerator)
    both = jnp.concatenate([h, taught], axis=-1)
    return at_positions(pair, both, chosen, reduce=reduce, rows=(), **head)
