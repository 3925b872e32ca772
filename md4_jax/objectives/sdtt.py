"""Self-distillation through time of masked diffusion: docs/families/distillation.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.distillation import Distillation, divergence_at, teacher_of
from md4_jax.objectives.head import CAPACITIES, at_positions, noise_of
from md4_jax.objectives.noising import masked, noised
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import draw_symbol, fold_keys, split_keys, uniforms
from md4_jax.processes.outputs import widened
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

# Fraction of the positions at which the head is computed when the teacher draws tokens: a step
# reveals few masks. If it reveals more, the head is computed at all positions.
REVEALED = (1 / 8,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SDTT(Distillation):
    """Loss of self-distillation through time (SDTT, arXiv:2410.21035), for masks.

    From z_t the teacher takes `per_step` ancestral steps of length dt. The target of a mask is the
    teacher's distribution in the step that reveals it, or in the last one if none does. The
    student predicts all targets from z_t, in one step:

        L = E_t E_q E_teacher [ sum_{z_n = m} D(student_n(z_t, t), target_n) ].

    dt is multiplied by `per_step` in each round. This is a training-only loss, not a bound.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), teacher=True)

    per_step: int = 2

    def __post_init__(self):
        super().__post_init__()
        if self.per_step < 1:
            raise UserError(f"objective.per_step must be at least 1, not {self.per_step}")
        if self.per_step > self.steps:
            raise UserError(
                f"objective.per_step={self.per_step} must be at most objective.steps={self.steps}"
            )

    @property
    def growth(self) -> int:
        """Factor by which the teacher's step grows from round to round."""
        return self.per_step

    @property
    def span(self) -> int:
        """Number of the teacher's steps that one step of the student replaces."""
        return self.per_step

    @property
    def teacher_calls(self) -> int:
        """Forward passes of the teacher in a training step."""
        return self.per_step

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        noise_keys, own = split_keys(keys)
        z, t = noised(process, batch, u, noise_keys)
        nats = self.loss_at(denoiser, process, batch, z, t, own)
        rounds = jnp.full(t.shape, teacher_of(denoiser).round, jnp.float32)
        return nats, {"masked": masked(process, z), "round": rounds}

    def loss_at(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        batch: Batch,
        z: Array,
        t: Array,
        keys: Array,
    ) -> Array:
        """Returns the divergence of each sequence at (z, t) [B]; keys [B] are the teacher's."""
        taught = self.targets(denoiser, process, batch, z, t, keys)
        chosen = noise_of(process, batch, z)
        h = denoiser.features(z, t)
        nats = divergence_at(self.divergence, denoiser, h, taught, chosen, capacities=CAPACITIES)
        return jnp.sum(nats, axis=1)

    def targets(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        batch: Batch,
        z: Array,
        t: Array,
        keys: Array,
    ) -> Array:
        """Returns the teacher's features [B, L, D], which define the targets of the masks of z.

        A position has the features of the last of the teacher's steps at which it is a mask.
        """
        teacher, round = teacher_of(denoiser)
        step = self.step_size(round)

        def time(number: Array | int) -> Array:
            return jnp.maximum(t - number * step, 0.0)

        def taken(number: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
            z, before = state
            open_, own = noise_of(process, batch, z), fold_keys(keys, number)
            h = teacher.features(z, time(number))
            revealed = process.reveal_probability(time(number + 1), time(number))
            reveal_keys, token_keys = split_keys(own)
            chosen = open_ & (uniforms(reveal_keys, z.shape[1]) < revealed[:, None])
            z = jnp.where(chosen, drawn(teacher, h, chosen, token_keys), z)
            return z, jnp.where(open_[..., None], h, before)

        features = jax.eval_shape(teacher.features, z, t)
        state = z, jnp.zeros(features.shape, features.dtype)
        z, before = jax.lax.fori_loop(0, self.per_step - 1, taken, state)
        # Tokens revealed in the last step do not affect the targets.
        h = teacher.features(z, time(self.per_step - 1))
        return jnp.where(noise_of(process, batch, z)[..., None], h, before)


def drawn(teacher: Denoiser, h: Array, chosen: Array, keys: Array) -> Array:
    """Draws tokens at the chosen positions from the logits of features h: int32 [B, L]."""
    bits = jax.vmap(lambda key: jax.random.bits(key, h.shape[1:2], jnp.uint32))(keys)

    def reduce(logits: Array, bits: Array) -> Array:
        logits = widened(logits)
        # Integers below 2^24 are exact in float32.
        return draw_symbol(jax.nn.softmax(logits, axis=-1), bits).astype(jnp.float32)

    found = at_positions(teacher, h, chosen, reduce=reduce, rows=(bits,), capacities=REVEALED)
    return found.astype(jnp.int32)
