"""Other models in the training step: a teacher, and the behaviour model of a policy."""

from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.objectives.distillation import Teacher
from md4_jax.objectives.policy import Behaviour
from md4_jax.protocols import Array, Denoiser, Network, Objective, Params, updates_of
from md4_jax.training.trainable import joined


def of_step(objective: Objective, state: Any) -> dict[str, tuple[Params, Array]]:
    """Returns (parameters, round or update) of teacher and behaviour for the step at a state."""
    return {"teacher": _teacher(objective, state), "behaviour": _behaviour(objective, state)}


def _teacher(objective: Objective, state: Any) -> tuple[Params, Array]:
    """Returns (teacher, round) for the step that begins at a `TrainState`; () stays ().

    In the first step of each later round the student, or its moving average if the objective
    requires it, becomes the teacher.
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
    """Returns (behaviour, index of the update, from 0) for the step that begins at a state.

    In the first update with a batch the current model becomes the behaviour; () stays ().
    """
    if not state.behaviour:
        return (), jnp.zeros((), jnp.int32)
    update = state.step % updates_of(objective)
    first = update == 0
    now, then = state.params, state.behaviour
    return jax.tree.map(lambda new, old: jnp.where(first, new, old), now, then), update


def with_others(network: Network, others: dict, fixed: Params) -> Network:
    """Adds the models of `of_step` to the network; they share its frozen parameters `fixed`."""
    (teacher, round), (behaviour, update) = others["teacher"], others["behaviour"]
    taught = with_teacher(network, teacher and joined(teacher, fixed), round)
    return with_behaviour(taught, behaviour and joined(behaviour, fixed), update)


def with_teacher(network: Network, teacher: Params, round: Array) -> Network:
    """Adds a teacher with these parameters to the network's denoisers; () adds none.

    It reads the same classes as the student, from which training hides some: what the student
    predicts without a class is compared with what the teacher predicts without it.
    """
    if not teacher:
        return network

    def bind(params: Params, context: dict, keys: Array | None, *known) -> Denoiser:
        student = network.bind(params, context, keys, *known)
        shown = context if student.label is None else {**context, "label": student.label}
        return _beside(student, "teacher", Teacher(network.denoiser(teacher, shown), round))

    return network._replace(bind=bind)


def with_behaviour(network: Network, behaviour: Params, update: Array) -> Network:
    """Adds the model that drew the batch to the network's denoisers; () adds none.

    Both use the same dropout, so that they differ only in their parameters.
    """
    if not behaviour:
        return network

    def bind(params: Params, context: dict, keys: Array | None, *known) -> Denoiser:
        now = network.bind(params, context, keys, *known)
        then = Behaviour(network.denoiser(behaviour, context, keys), update)
        return _beside(now, "behaviour", then)

    return network._replace(bind=bind)


def _beside(denoiser: Denoiser, name: str, other: Teacher | Behaviour) -> Denoiser:
    """Adds another model to a denoiser and to its versions with repeated rows."""

    def rebind(count: int) -> Denoiser:
        several = other._replace(denoiser=other.denoiser.repeated(count))
        return _beside(denoiser.repeated(count), name, several)

    return denoiser._replace(**{name: other}, rebind=denoiser.rebind and rebind)
