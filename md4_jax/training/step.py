"""Training step, a pure function of state and batch without I/O."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from md4_jax.objectives.draws import at_early_times, draws
from md4_jax.options import TrainOptions
from md4_jax.protocols import (
    Array,
    Batch,
    Network,
    Objective,
    Params,
)
from md4_jax.training import loads, teaching
from md4_jax.training.microbatches import accumulate
from md4_jax.training.optim import scaled
from md4_jax.training.trainable import divided, joined

# Scope of a conditional whose costliest branch is the one that is nearly always taken.
LIKELY = "likely"
SKIPPED = ("skipped", "skipped_in_a_row")
# Fields of a state that hold another model, which begins at the same parameters.
BESIDE = ("teacher", "behaviour")


class TrainState(NamedTuple):
    """State that a run carries from step to step.

    params and ema are {'network': ..., 'process': process}. Array leaves of the process are learned
    like other parameters; most processes have none. ema has the network's 'companion' too, if any.
    frozen is {'network': ...} of the parameters that are not trained, or () if all are. They have
    no gradient, no part in the optimizer, and the one copy alone.
    teacher is the same as params of a model that this one learns from, or (): the objective needs
    none. It has the frozen parameters in common with this one.
    behaviour is the same of the model that drew the texts of this step, or () where that is this
    one at every step (`updates_of`).
    """

    step: Array
    params: Params
    ema: Params
    opt_state: Any
    skipped: Array
    skipped_in_a_row: Array
    frozen: Params = ()
    teacher: Params = ()
    behaviour: Params = ()

    @property
    def whole(self) -> Params:
        """All parameters, trained or not."""
        return joined(self.params, self.frozen)

    @property
    def behaving(self) -> Params:
        """All parameters of the model that drew the texts of this step."""
        return joined(self.behaviour, self.frozen)

    @property
    def averaged(self) -> Params:
        """All parameters, with the moving average of those that are trained."""
        return joined(self.ema, self.frozen)


def init_state(
    key: Array,
    network: Network,
    process: Any,
    optimizer: optax.GradientTransformation,
    trainable: str = "",
    *,
    taught: bool = False,
    behaving: bool = False,
) -> TrainState:
    """Makes the state before the first step; the moving average starts at the parameters.

    trainable: expression of `TrainOptions`; UserError if it does not divide the parameters.
    taught: whether the objective needs a teacher, which starts at the parameters too. behaving:
    whether the model that draws is kept, which also starts there.
    """
    whole = _single({"network": network.init(key), "process": process.init()})
    params, frozen = divided(whole, network, trainable)
    zero = jnp.zeros((), jnp.int32)
    ema = jax.tree.map(jnp.copy, params)
    if network.companion is not None:
        ema["companion"] = network.companion.init()
    others = (jax.tree.map(jnp.copy, params) if kept else () for kept in (taught, behaving))
    moments = _single(optimizer.init(params))
    return TrainState(zero, params, ema, moments, zero, zero, frozen, *others)


def _single(arrays: Any) -> Any:
    """Returns float64 arrays as float32: with JAX_ENABLE_X64 a checkpoint has the same types."""

    def one(x: Array) -> Array:
        return x.astype(jnp.float32) if x.dtype == jnp.float64 else x

    return jax.tree.map(one, arrays)


def make_train_step(
    network: Network,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    options: TrainOptions,
    pace: Callable[[Array, Array | float], Array] | None = None,
    *,
    bounded: bool = False,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Makes the update (state, global batch) -> (state, metrics), for one jit over a mesh.

    pace: factor of the optimizer's update, of the step and the share of seconds that is spent. The
    update then takes that share as its third argument.
    bounded: whether finite gradients have finite updates; else these are computed twice, to see.

    The gradient is that of the mean nats per counted token. If the loss, the gradient or the update
    is not finite, parameters, optimizer and moving average stay as they are, and the step counts as
    skipped. Metrics: nats (mean nats per counted token, times L), grad_norm, skipped,
    skipped_in_a_row, the objective's own as means over sequences, and `loads.figures` of experts.
    """

    def loss(objective: Objective, net: Network, known, given, batch: Batch, u, keys):
        fixed, scale = known
        params = joined(joined(*given), fixed)
        denoiser = net.denoiser(params, batch.context, keys)
        call = at_early_times(objective, options.time_power)
        nats_B, extra = call(denoiser, params["process"], batch, u, keys)
        metrics = {"nats": scale * jnp.mean(nats_B)} | {k: jnp.mean(v) for k, v in extra.items()}
        return metrics["nats"] / batch.tokens.shape[1], metrics

    def train_step(state: TrainState, batch: Batch, spent: Array | float = 0.0):
        u, keys = draws(options.seed, state.step, options.batch_size)
        others, fixed = teaching.of_step(objective, state), dict(state.frozen)
        kept = {"frozen": state.frozen} | {name: own for name, (own, _) in others.items()}
        # Apart from here on, so that no branch below copies them.
        state = state._replace(frozen=(), teacher=(), behaviour=())
        if network.companion is not None:
            fixed["companion"] = state.ema["companion"]
            batch = network.companion.announced(fixed["companion"], batch)
        net = teaching.with_others(network, others, fixed)
        # Not of the gradient, which also has the terms of experts.
        scale = batch.loss_mask.size / jnp.maximum(1, jnp.sum(batch.loss_mask))
        given = state.params, loads.meters(joined(state.params, fixed))
        (grads, loaded), metrics = _of_phase(objective, state.step, lambda objective: accumulate(
            jax.grad(functools.partial(loss, objective, net, (fixed, scale)), has_aux=True),
            options.microbatches, given, (batch, u, keys),
        ))  # fmt: skip
        norm = optax.tree.norm(grads)
        factor = jnp.float32(1.0) if pace is None else pace(state.step, spent)
        update = functools.partial(
            _updated, optimizer=optimizer, decay=options.ema, norm=norm, factor=factor
        )
        good = jnp.isfinite(metrics["nats"]) & jnp.isfinite(norm) & jnp.isfinite(factor)
        if not bounded:
            good &= is_finite(update(state, grads))
        state = _counted(_if(good, update, state, grads), jnp.logical_not(good).astype(jnp.int32))
        counts = loads.figures(loaded) | {k: getattr(state, k) for k in SKIPPED}
        return state._replace(**kept), metrics | counts | {"grad_norm": norm}

    return train_step


def _of_phase(objective: Objective, step: Array, found: Callable[[Objective], Any]) -> Any:
    """Returns found(objective) or, from the step on at which that ends, found(afterwards)."""
    until = getattr(objective, "until", 0)
    if not until:
        return found(objective)
    # Around the gradient: that of a branch would keep the activations of both.
    first, second = (functools.partial(found, o) for o in (objective, objective.afterwards))
    return jax.lax.cond(step < until, first, second)


def _updated(
    state: TrainState,
    grads: Params,
    *,
    optimizer: optax.GradientTransformation,
    decay: float,
    norm: Array,
    factor: Array,
) -> TrainState:
    """Returns the state after the update of the gradient, which factor multiplies.

    norm: of the gradient. A clip that computed it again would need all of it in memory before any
    parameter is updated.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, norm=norm)
    params = optax.apply_updates(state.params, scaled(updates, factor))
    averaged = {part: state.ema[part] for part in params}
    ema = state.ema | ema_update(averaged, params, state.step, decay)
    return state._replace(params=params, ema=ema, opt_state=opt_state)


def _if(good: Array, fn: Callable, state: TrainState, grads: Params) -> TrainState:
    """Returns fn(state, grads) if good, otherwise the state as it is."""

    def branch(good: Array, state: TrainState, grads: Params) -> TrainState:
        with jax.named_scope(LIKELY):
            return jax.lax.cond(good, fn, lambda state, _: state, state, grads)

    def chosen(good: Array, state: TrainState, grads: Params) -> TrainState:
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), fn(state, grads), state)

    # On CPUs XLA would copy both moments of Adam to choose: a training step of size (b) of
    # tools/sizes.py takes 0.88 of the time with a branch and bfloat16 products, 0.94 with float32
    # ones, and 3.12 instead of 3.45 GiB (AMD EPYC with AVX512-BF16). On GPUs the host would wait
    # for `good` to take a branch.
    return jax.lax.platform_dependent(good, state, grads, cpu=branch, default=chosen)


def _counted(state: TrainState, bad: Array) -> TrainState:
    """Returns the state one step further; bad: 1 if that was skipped, else 0."""
    in_a_row = (state.skipped_in_a_row + 1) * bad
    return state._replace(
        step=state.step + 1, skipped=state.skipped + bad, skipped_in_a_row=in_a_row
    )


def is_finite(tree: Any) -> Array:
    """Returns whether all numbers of all arrays are finite; counts and random keys are."""
    arrays = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays]))


def ema_update(ema: Params, params: Params, step: Array, decay: float) -> Params:
    """Updates the moving average with decay min(decay, (1 + step) / (10 + step)).

    The smaller decay of early steps makes the average useful in short runs.
    """
    step = step.astype(jnp.float32)
    rate = 1.0 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + rate * (new - old), ema, params)
