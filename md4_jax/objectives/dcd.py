"""Discrete consistency distillation of uniform noise: docs/families/distillation.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.distillation import Distillation, divergence_at, teacher_of
from md4_jax.objectives.noising import prompted
from md4_jax.processes import duality
from md4_jax.processes.capabilities import RedrawsUniformly
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DCD(Distillation):
    """Loss of discrete consistency distillation (Duo, arXiv:2506.10892, algorithm 1).

    z_t = argmax(a_t onehot(x) + s_t noise) is distributed as with uniform noise. The same noise at
    the lower level s = t - dt gives z_s, on the same deterministic trajectory. The student at z_t
    is trained to match the teacher at z_s:

        L = E_t E [ sum_n D(student_n(z_t, t), teacher_n(z_s, s)) ],

    gamma = log(s^2 / a^2) = low + t (high - low), and t = min(u + dt, 1). dt doubles in each
    round. This is a training-only loss, not a bound.
    """

    needs: ClassVar[Needs] = Needs(
        (RedrawsUniformly,),
        teacher=True,
        parametrisations=("joint", "mixture"),
        why="its outputs must be a distribution over x",
    )
    growth: ClassVar[int] = 2
    span: ClassVar[int] = 1
    teacher_calls: ClassVar[int] = 1

    steps: int = 512
    low: float = -4.0
    high: float = -1.0

    def __post_init__(self):
        super().__post_init__()
        if not self.low < self.high:
            raise UserError(f"objective.low={self.low} must be below objective.high={self.high}")

    def __call__(
        self, denoiser: Denoiser, process: RedrawsUniformly, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        round = teacher_of(denoiser).round
        step = self.step_size(round)
        t = jnp.minimum(u + step, 1.0)
        gammas = [self.low + time * (self.high - self.low) for time in (t, t - step)]
        z, earlier = (
            prompted(batch, found)
            for found in duality.trajectory(keys, batch.tokens, gammas, process.vocab_size)
        )
        nats = self.loss_at(denoiser, process, batch, (z, earlier), gammas)
        changed = jnp.mean(z != batch.tokens, axis=1, dtype=jnp.float32)
        return nats, {"changed": changed, "round": jnp.full(t.shape, round, jnp.float32)}

    def loss_at(
        self,
        denoiser: Denoiser,
        process: RedrawsUniformly,
        batch: Batch,
        both: tuple[Array, Array],
        gammas: list[Array],
    ) -> Array:
        """Returns the divergence between student at z_t and teacher at z_s, of each sequence [B].

        both [B, L] and gammas [B] are (z_t, z_s) and their levels.
        """
        teacher = teacher_of(denoiser).denoiser
        times = [
            process.schedule.inverse(duality.level(gamma, process.vocab_size).noise)
            for gamma in gammas
        ]
        h, taught = denoiser.features(both[0], times[0]), teacher.features(both[1], times[1])
        nats = divergence_at(self.divergence, denoiser, h, taught, batch.loss_mask)
        return jnp.sum(nats, axis=1)
