"""Teacher of a distillation in the training step: docs/families/distillation.md."""

from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.objectives.distillation import Teacher
from md4_jax.protocols import Array, Denoiser, Network, Objective, Params


def of_step(objective: Objective, state: Any) -> tuple[Params, Array]:
    """Returns (teacher, round) of the step that begins at a `TrainState`; () remains ().

    In the first step of each later round the student, or its moving average if the objective says
    so, becomes the teacher.
    """
    length = getattr(objective, "round_steps", 0)
    if not (state.teacher and length):
        return state.teacher, jnp.zeros((), jnp.int32)
    averaged, step = getattr(objective, "averaged", False), state.step
    best = {part: state.ema[part] for part in state.params} if averaged else state.params
    begins = (step > 0) & (step % length == 0)
    chosen = jax.tree.map(lambda new, old: jnp.where(begins, new, old), best, state.teacher)
    return chosen, step // length


def with_teacher(network: Network, teacher: Params, round: Array) -> Network:
    """Returns the network whose denoisers come with a teacher of those parameters; () adds none."""
    if not teacher:
        return network

    def bind(params: Params, context: dict, keys: Array | None, *known) -> Denoiser:
        student = network.bind(params, context, keys, *known)
        return _taught(student, Teacher(network.denoiser(teacher, context), round))

    return network._replace(bind=bind)


def _taught(student: Denoiser, teacher: Teacher) -> Denoiser:
    """Returns the student with its teacher, also where rows are repeated."""

    def rebind(count: int) -> Denoiser:
        several = teacher._replace(denoiser=teacher.denoiser.repeated(count))
        return _taught(student.repeated(count), several)

    return student._replace(teacher=teacher, rebind=student.rebind and rebind)
