"""Training loop: restore, step, log, save, evaluate."""

import signal
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from md4_jax.data.corpus import Corpus, check_same_text
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.suite import Suite
from md4_jax.experiment import Experiment, rows_of
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.paths import Place
from md4_jax.runtime.sharding import max_over_processes, shardings_of, to_global
from md4_jax.training import report
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.log import LogSettings, TrainLog
from md4_jax.training.step import TrainState, init_state, make_train_step
from md4_jax.training.writers import NullWriter, Progress, Writer

# Reason to stop when the time budget is spent; the other reasons are signal numbers above 1.
BUDGET = 1


class Stop:
    """Records SIGTERM and Ctrl-C, so that the loop stops after the current step."""

    def __init__(self):
        self.signal: int | None = None
        self._before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}

    def _note(self, number: int, frame: object) -> None:
        del frame
        if self.signal is not None:  # second signal: stop at once
            self.release()
            signal.raise_signal(number)
        self.signal = number

    def release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(
    experiment: Experiment,
    corpus: Corpus,
    workdir: Place,
    suite: Suite,
    begin: Callable[[Params], Params] | None = None,
) -> tuple[int, int | None]:
    """Trains until num_steps, the budget or a signal; returns (step saved, signal or None).

    suite: evaluators, which run after the steps at which they are due. begin: maps fresh parameters
    to those of the first step; not called if there is a checkpoint. UserError after too many
    non-finite steps in a row, or if a checkpoint cannot be saved; earlier checkpoints stay.
    """
    primary = jax.process_index() == 0
    checkpoints = Checkpoints(workdir / "checkpoints", experiment.checkpoint)
    state, host = first_state(experiment, checkpoints, begin)
    step = int(state.step)
    text = corpus.fingerprint()
    check_same_text((host or {}).get("text"), text, workdir)
    rows = rows_of(experiment, experiment.train.batch_size)
    data = corpus.train_batches(seed=experiment.train.seed, **rows)
    if primary:
        print(report.start(experiment, state, workdir, step), flush=True)
    writer = Writer(workdir, resume_step=step) if primary else NullWriter()
    progress = Progress(experiment.train.num_steps, step, enabled=primary)
    log = TrainLog(writer, progress, _log_settings(experiment))
    if host is not None:
        data.set_state(host["data"])
        log.set_state(host["log"])
    step_fn = make_train_step(
        experiment.network, experiment.objective, experiment.optimizer, experiment.train
    )
    step_fn = jit(step_fn, experiment.mesh, donate_argnums=0)
    stop, began = Stop(), time.monotonic()

    try:
        last = step >= experiment.train.num_steps
        # If the run was killed between a save and its evaluation.
        _evaluate_if_due(suite, log, state, step)
        while not last:
            batch = to_global(next(data), experiment.mesh)
            with jax.set_mesh(experiment.mesh):
                state, metrics = step_fn(state, batch)
            step += 1
            log.add(step, metrics)
            progress.advance()
            if step % experiment.log.every == 0:
                checkpoints.check()
            why = _why_stop(experiment, stop, began, step)
            last = step >= experiment.train.num_steps or why > 0
            if last or step % experiment.checkpoint.every == 0:
                log.flush()
                writer.flush()
                position = {"data": data.get_state(), "log": log.state(), "text": text}
                checkpoints.save(step, state, position)
            if max(why, max_over_processes(stop.signal or 0, now=False)) <= BUDGET:
                _evaluate_if_due(suite, log, state, step)
        checkpoints.wait()
        why = max_over_processes(stop.signal or 0)
        if step < experiment.train.num_steps and not why:
            progress.say(
                f"stopped at step {step} of {experiment.train.num_steps}: the budget of "
                f"train.seconds={experiment.train.seconds:g} is spent; the same command goes on"
            )
    except UserError as error:
        raise UserError(f"stopped after step {step}: {error}") from error
    finally:
        progress.close()
        stop.release()
        writer.close()
        data.close()
        # Closing waits for the other processes, which may have ended after an error.
        if jax.process_count() == 1 or sys.exc_info()[0] is None:
            checkpoints.close()
    return step, why or None


def _evaluate_if_due(suite: Suite, log: TrainLog, state: TrainState, step: int) -> None:
    """Runs the evaluators that are due at this step and not in the log yet."""
    names = log.missing(step, suite.due(step))
    if names:
        log.flush()
    for name, result in suite.run(names, state.ema, step, lambda t: log.say(f"step {step}  {t}")):
        log.evaluation(step, name, result)


def _why_stop(experiment: Experiment, stop: Stop, began: float, step: int) -> int:
    """Returns 0, BUDGET or the number of a signal that any process received."""
    over = 0 < experiment.train.seconds <= time.monotonic() - began
    return max_over_processes(stop.signal or BUDGET * over, now=step % experiment.log.every == 0)


def _log_settings(experiment: Experiment) -> LogSettings:
    return LogSettings(
        every=experiment.log.every,
        batch_shape=(experiment.train.batch_size, experiment.data.length),
        is_bound=experiment.objective.is_bound(experiment.process),
        learning_rate=experiment.learning_rate,
        max_skipped_in_a_row=experiment.train.max_skipped_in_a_row,
        held_out=_held_out(experiment),
    )


def _held_out(experiment: Experiment) -> str:
    """Returns the name of the evaluator shown beside the training bound, "" for none."""
    bounds = (
        name
        for name, e in experiment.evals.items()
        if isinstance(e, LikelihoodBound) and e.every and not e.data
    )
    return next(bounds, "")


def abstract_state(experiment: Experiment) -> TrainState:
    """Returns the shapes and shardings of a state, without allocating it."""
    shapes = jax.eval_shape(lambda: _init(experiment))
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        shardings_of(shapes, experiment.mesh),
    )


def first_state(
    experiment: Experiment, checkpoints: Checkpoints, begin: Callable[[Params], Params] | None
) -> tuple[TrainState, dict | None]:
    """Returns (state, host state) of the newest checkpoint, or (fresh state, None)."""
    template = abstract_state(experiment)
    found = checkpoints.restore(template)
    if found is not None:
        return found
    state = fresh_state(experiment)
    if begin is not None:
        params = begin(state.params)
        # Separate buffers, since the training step donates and overwrites both.
        state = state._replace(params=params, ema=jax.tree.map(jnp.copy, params))
    return state, None


def fresh_state(experiment: Experiment) -> TrainState:
    """Makes the state before the first step, in place on the mesh."""
    shardings = jax.tree.map(lambda s: s.sharding, abstract_state(experiment))
    with jax.set_mesh(experiment.mesh):
        return jax.jit(lambda: _init(experiment), out_shardings=shardings)()


def _init(experiment: Experiment) -> TrainState:
    key = jax.random.key(experiment.train.seed)
    return init_state(key, experiment.network, experiment.process, experiment.optimizer)
