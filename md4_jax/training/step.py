"""Training step: a pure function of state and batch."""

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
from md4_jax.runtime.scopes import LIKELY
from md4_jax.training import loads, teaching
from md4_jax.training.microbatches import accumulate
from md4_jax.training.optim import scaled
from md4_jax.training.trainable import divided, joined

SKIPPED = ("skipped", "skipped_in_a_row")
# Fields of a state that hold another model, which begins at the same parameters.
BESIDE = ("teacher", "behaviour")


class TrainState(NamedTuple):
    """Training state.

    params and ema are {'network': ..., 'process': process}. Array leaves of the process are learned
    like other parameters; most processes have none. ema also has the network's 'companion', if any.
    frozen is {'network': ...} of the parameters that are not trained, or () if all are trained.
    They have no gradient and no optimizer state, and exist only once. teacher has the structure of
    params and holds the model to distil, or () if the objective needs none. It shares the frozen
    parameters. behaviour has the structure of params and holds the model that drew the texts of
    this step, or () if that is always the current model (`updates_of`).
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
        """All parameters, trained and frozen."""
        return joined(self.params, self.frozen)

    @property
    def behaving(self) -> Params:
        """All parameters of the model that drew the texts of this step."""
        return joined(self.behaviour, self.frozen)

    @property
    def averaged(self) -> Params:
        """All parameters, with the moving average of the trained ones."""
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
    """Makes the state before the first step, with the moving average equal to the parameters.

    trainable: expression of `TrainOptions`; UserError if it does not divide the parameters.
    taught: whether the objective needs a teacher. behaving: whether the state holds the model that
    draws the texts. Both also begin with these parameters.
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
    """Converts float64 to float32, so that checkpoints do not depend on JAX_ENABLE_X64."""

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
    """Makes the update (state, global batch) -> (state, metrics), to be jitted over a mesh.

    pace: (step, fraction of the seconds spent) -> factor of the optimizer's update. The update then
    takes this fraction as a third argument.
    bounded: whether finite gradients have finite updates; else the update is computed twice.

    The gradient is that of the mean nats per counted token. If the loss, the gradient or the update
    is not finite, parameters, optimizer and moving average are left unchanged, and the step counts
    as skipped. Metrics: nats (mean nats per counted token, times L), grad_norm, skipped,
    skipped_in_a_row, the objective's diagnostics as means over sequences, and `loads.figures`.
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
        # Separate from here on, so that no branch below copies them.
        state = state._replace(frozen=(), teacher=(), behaviour=())
        if network.companion is not None:
            fixed["companion"] = state.ema["companion"]
            batch = network.companion.announced(fixed["companion"], batch)
        net = teaching.with_others(network, others, fixed)
        # Scales the loss, not the gradient, which also contains the terms of experts.
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
    """Returns found(objective), or found(afterwards) from the step `until` of the objective on."""
    until = getattr(objective, "until", 0)
    if not until:
        return found(objective)
    # Around the gradient: a gradient of the branch would keep the activations of both.
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
    """Returns the state after an update with the gradients times `factor`.

    norm: norm of the gradient, computed before. Computing it again for clipping would keep the
    whole gradient in memory before any parameter is updated.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, norm=norm)
    params = optax.apply_updates(state.params, scaled(updates, factor))
    averaged = {part: state.ema[part] for part in params}
    ema = state.ema | ema_update(averaged, params, state.step, decay)
    return state._replace(params=params, ema=ema, opt_state=opt_state)


def _if(good: Array, fn: Callable, state: TrainState, grads: Params) -> TrainState:
    """Returns fn(state, grads) if good, otherwise the unchanged state."""

    def branch(good: Array, state: TrainState, grads: Params) -> TrainState:
        with jax.named_scope(LIKELY):
            return jax.lax.cond(good, fn, lambda state, _: state, state, grads)

    def chosen(good: Array, state: TrainState, grads: Params) -> TrainState:
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), fn(state, grads), state)

    # On CPUs XLA would copy both moments of Adam for a select. With a branch, a training step of
    # size (b) of tools/sizes.py takes 0.88 of the time with bfloat16 products, 0.94 with float32
    # ones, and 3.12 instead of 3.45 GiB (AMD EPYC with AVX512-BF16). On GPUs a branch would make
    # the host wait for `good`.
    return jax.lax.platform_dependent(good, state, grads, cpu=branch, default=chosen)


def _counted(state: TrainState, bad: Array) -> TrainState:
    """Increments the step counters of a state; bad: 1 if the step was skipped, else 0."""
    in_a_row = (state.skipped_in_a_row + 1) * bad
    return state._replace(
        step=state.step + 1, skipped=state.skipped + bad, skipped_in_a_row=in_a_row
    )


def is_finite(tree: Any) -> Array:
    """Returns whether all arrays are finite; integers and random keys always are."""
    arrays = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays]))


def ema_update(ema: Params, params: Params, step: Array, decay: float) -> Params:
    """Updates the moving average with decay min(decay, (1 + step) / (10 + step)).

    The smaller decay in early steps makes the average useful in short runs.
    """
    step = step.astype(jnp.float32)
    rate = 1.0 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + rate * (new - old), ema, params)
