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
        taught = Teacher(network.denoiser(teacher, context), round)
        return network.bind(params, context, keys, *known)._replace(teacher=taught)

    return network._replace(bind=bind)
