"""Other models in the training step: a teacher, and the one that drew the texts of a policy."""

from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.objectives.distillation import Teacher
from md4_jax.objectives.policy import Behaviour
from md4_jax.protocols import Array, Denoiser, Network, Objective, Params, updates_of
from md4_jax.training.trainable import joined


def of_step(objective: Objective, state: Any) -> dict[str, tuple[Params, Array]]:
    """Returns (parameters, number) of the teacher and of the behaviour in the step at a state."""
    return {"teacher": _teacher(objective, state), "behaviour": _behaviour(objective, state)}


def _teacher(objective: Objective, state: Any) -> tuple[Params, Array]:
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


def _behaviour(objective: Objective, state: Any) -> tuple[Params, Array]:
    """Returns (behaviour, number of the update from 0 on) of the step that begins at a state.

    In the first of the updates with a batch the model becomes the behaviour; () remains ().
    """
    if not state.behaviour:
        return (), jnp.zeros((), jnp.int32)
    update = state.step % updates_of(objective)
    first = update == 0
    now, then = state.params, state.behaviour
    return jax.tree.map(lambda new, old: jnp.where(first, new, old), now, then), update


def with_others(network: Network, others: dict, fixed: Params) -> Network:
    """Returns the network with both of `of_step` beside it; they have `fixed` in common with it."""
    (teacher, round), (behaviour, update) = others["teacher"], others["behaviour"]
    taught = with_teacher(network, teacher and joined(teacher, fixed), round)
    return with_behaviour(taught, behaviour and joined(behaviour, fixed), update)


def with_teacher(network: Network, teacher: Params, round: Array) -> Network:
    """Returns the network whose denoisers come with a teacher of those parameters; () adds none."""
    if not teacher:
        return network

    def bind(params: Params, context: dict, keys: Array | None, *known) -> Denoiser:
        student = network.bind(params, context, keys, *known)
        return _beside(student, "teacher", Teacher(network.denoiser(teacher, context), round))

    return network._replace(bind=bind)


def with_behaviour(network: Network, behaviour: Params, update: Array) -> Network:
    """Returns the network whose denoisers come with the model that drew the batch; () adds none.

    Both have the same dropout, so that nothing but the parameters tells them apart.
    """
    if not behaviour:
        return network

    def bind(params: Params, context: dict, keys: Array | None, *known) -> Denoiser:
        now = network.bind(params, context, keys, *known)
        then = Behaviour(network.denoiser(behaviour, context, keys), update)
        return _beside(now, "behaviour", then)

    return network._replace(bind=bind)


def _beside(denoiser: Denoiser, name: str, other: Teacher | Behaviour) -> Denoiser:
    """Returns the denoiser with another model beside it, also where rows are repeated."""

    def rebind(count: int) -> Denoiser:
        several = other._replace(denoiser=other.denoiser.repeated(count))
        return _beside(denoiser.repeated(count), name, several)

    return denoiser._replace(**{name: other}, rebind=denoiser.rebind and rebind)
