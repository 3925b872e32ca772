"""Training loop: restore, step, log, save, evaluate."""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.data.corpus import Corpus, check_same_text
from md4_jax.evals import rollouts
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.suite import Suite
from md4_jax.experiment import Experiment
from md4_jax.options.parts import words
from md4_jax.protocols import Params, UserError, updates_of
from md4_jax.runtime.compiling import compile_ahead, draws_as_kernels, jit
from md4_jax.runtime.paths import Place
from md4_jax.runtime.sharding import max_over_processes, shardings_of, to_global
from md4_jax.training import back, base, counting, report
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.evaluating import interrupted
from md4_jax.training.keeping import figure_of
from md4_jax.training.log import LogSettings, TrainLog
from md4_jax.training.microbatches import resolved
from md4_jax.training.notices import BUDGET, Notices, Signals
from md4_jax.training.profile import Profile
from md4_jax.training.saver import Saver
from md4_jax.training.step import BESIDE, TrainState, init_state, make_train_step
from md4_jax.training.trackers import Tracked, Trackers
from md4_jax.training.trainable import divided, matching, new_parts, stored
from md4_jax.training.writers import NullWriter, Progress, Writer


class Run(NamedTuple):
    """Open run: the objects that its loop uses and that must be closed at its end."""

    saver: Saver
    log: TrainLog
    data: Any
    progress: Progress
    writer: Writer | NullWriter
    profile: Profile
    signals: Signals
    notices: Notices

    def close(self) -> None:
        """Releases files, threads and signals."""
        self.progress.close()
        self.signals.release()
        self.profile.close()
        self.writer.close()
        self.data.close()
        # Closing would wait for the other processes, which may have ended after an error.
        if jax.process_count() == 1 or sys.exc_info()[0] is None:
            self.saver.checkpoints.close()


def train(
    experiment: Experiment,
    corpus: Corpus,
    workdir: Place,
    suite: Suite,
    begin: Callable[[Params], Params] | None = None,
    one_budget: bool = False,
) -> tuple[int, int | None]:
    """Trains until num_steps, the time budget or a signal; returns (saved step, signal or None).

    suite: evaluators, which run after the steps at which they are due. begin: maps fresh parameters
    to those of the first step, see `started`; not called if there is a checkpoint. one_budget:
    whether train.seconds limits this and all earlier calls together, as is always so if the
    learning rate follows seconds; otherwise it limits each call. UserError after too many
    successive non-finite steps, or if a checkpoint cannot be saved; earlier checkpoints remain.
    If an evaluator fails, training continues, see `evaluating`.
    """
    one_budget = one_budget or experiment.learning_rate.follows_seconds
    run, state = _opened(experiment, corpus, workdir, begin, one_budget)
    try:
        return _steps(experiment, run, suite, state, one_budget)
    finally:
        run.close()


def _opened(
    experiment: Experiment,
    corpus: Corpus,
    workdir: Place,
    begin: Callable[[Params], Params] | None,
    one_budget: bool,
) -> tuple[Run, TrainState]:
    """Returns the run and its state, restored from its newest checkpoint."""
    primary = jax.process_index() == 0
    checkpoints = Checkpoints(workdir / "checkpoints", experiment.checkpoint)
    state, host = first_state(experiment, checkpoints, begin, workdir)
    step = int(state.step)
    text = corpus.fingerprint()
    check_same_text((host or {}).get("text"), text, workdir)
    data = rollouts.data_of(experiment, corpus, step)
    if primary:
        print(report.start(experiment, state, workdir, step), flush=True)
    spent = 0.0
    if host is None:
        state, spent = counting.filled(experiment, corpus, state)
    signals, budget = Signals(), experiment.train.seconds
    before = spent if host is None else max(0.0, host.get("elapsed", 0.0))
    if budget and host is not None and not one_budget:
        budget += before
    with contextlib.ExitStack() as failed:
        failed.callback(signals.release)
        notices = Notices(signals, budget, experiment.checkpoint.seconds, before)
        progress = Progress(experiment.train.num_steps, step, enabled=primary, budget=notices.left)
        writer = _writer(experiment, workdir, step, progress.say) if primary else NullWriter()
        traced = experiment.log.profile if primary else ()
        profile = Profile(traced, workdir / "profile", progress.say)
        log = TrainLog(writer, progress, _log_settings(experiment, notices))
        if host is not None:
            data.set_state(back.position(workdir, step, host["data"]))
            log.set_state(host["log"])
        saver = Saver(checkpoints, log, data, text, notices, figure_of(experiment))
        checkpoints.best = saver.best
        failed.pop_all()
    return Run(saver, log, data, progress, writer, profile, signals, notices), state


def _steps(
    experiment: Experiment, run: Run, suite: Suite, state: TrainState, one_budget: bool
) -> tuple[int, int | None]:
    """Trains, logs, saves and evaluates; returns (saved step, signal or None)."""
    saver, log, steps = run.saver, run.log, experiment.train.num_steps
    step_fn, step, metrics = step_program(experiment, state), int(state.step), None
    budget, notices = experiment.train.seconds, run.notices
    follows = experiment.learning_rate.follows_seconds
    drawn = rollouts.maker(experiment, suite.rewarded)
    try:
        last = step >= steps or (one_budget and 0 < budget <= notices.elapsed)
        # In case the run was killed between a save and its evaluation.
        last |= interrupted(saver, run.signals, suite, state, step)
        while not last:
            with run.profile.step(step + 1):
                batch = to_global(drawn(state, step, next(run.data)), experiment.mesh)
                spent = (notices.elapsed / budget,) if follows else ()
                with jax.set_mesh(experiment.mesh):
                    if metrics is None:
                        compile_ahead(step_fn, state, batch, *spent)
                    state, metrics = step_fn(state, batch, *spent)
            step += 1
            run.profile.after_step(step, state)
            log.add(step, metrics)
            run.progress.advance()
            failed = step % experiment.log.every == 0 and saver.checkpoints.has_failed()
            notice = notices.after_step()
            last = step >= steps or notice.stop > 0
            if last or notice.save or failed or experiment.checkpoint.is_due(step):
                saver.save(step, state)
            if notice.stop <= BUDGET:
                best = experiment.checkpoint.best
                last |= interrupted(saver, run.signals, suite, state, step, best)
        saver.finish(step, state)
    except UserError as error:
        raise UserError(f"stopped after step {step}: {error}") from error
    why = max_over_processes(run.signals.number or 0)
    if step < steps and not why:
        directory = saver.checkpoints.directory.parent
        run.progress.say(report.early(experiment, step, directory, one_budget))
    return step, why or None


def step_program(experiment: Experiment, state: TrainState) -> Callable:
    """Returns the compiled training step, which donates its state.

    The new state gets the sharding of `state` (arrays or their shapes), not one chosen by XLA.
    """
    rate = experiment.learning_rate
    step = make_train_step(
        experiment.network, experiment.objective, experiment.optimizer, resolved(experiment),
        rate.pace if rate.follows_seconds else None, bounded=rate.bounded,
    )  # fmt: skip
    split = jax.tree.map(lambda x: x.sharding, state), None
    return jit(step, experiment.mesh, experiment.network, donate_argnums=0, out_shardings=split)


def _writer(
    experiment: Experiment, workdir: Place, step: int, say: Callable[[str], None]
) -> Writer:
    """Returns the writer of a run that resumes from `step`, with its trackers."""
    run = Tracked(workdir, experiment.config, step)
    names, again = words(experiment.log.trackers), experiment.checkpoint.retries
    make = functools.partial(Trackers, names, run, say)
    return Writer(workdir, resume_step=step, trackers=make, retries=again)


def _log_settings(experiment: Experiment, notices: Notices) -> LogSettings:
    rate, budget = experiment.learning_rate, experiment.train.seconds

    def learning_rate(step: int) -> jax.Array:
        return rate(step, notices.elapsed / budget if rate.follows_seconds else 0.0)

    return LogSettings(
        every=experiment.log.every,
        batch_shape=(experiment.train.batch_size, experiment.data.length),
        is_bound=experiment.objective.is_bound(experiment.process),
        learning_rate=learning_rate,
        max_skipped_in_a_row=experiment.train.max_skipped_in_a_row,
        held_out=_held_out(experiment),
        unit=experiment.domain.unit,
    )


def _held_out(experiment: Experiment) -> str:
    """Returns the name of the evaluator to show beside the training bound, "" for none."""
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
    experiment: Experiment,
    checkpoints: Checkpoints,
    begin: Callable[[Params], Params] | None,
    workdir: Place,
) -> tuple[TrainState, dict | None]:
    """Returns (state, host state) of the newest checkpoint, or (fresh state, None).

    Frozen parameters are read from the base in workdir; those of a fresh state are written there.
    """
    template = abstract_state(experiment)
    found = checkpoints.restore(template._replace(frozen=()))
    if found is not None:
        state, host = found
        return state._replace(frozen=base.read(workdir, template.frozen, host)), host
    state = fresh_state(experiment) if begin is None else started(experiment, begin)
    base.keep(workdir, state.frozen, experiment.checkpoint.retries)
    return state, None


def started(experiment: Experiment, begin: Callable[[Params], Params]) -> TrainState:
    """Returns the state before the first step, with initial parameters from `begin`.

    begin: maps the fresh trained parameters to all parameters.
    """
    state = fresh_trained(experiment)
    params, frozen = divided(begin(state.params), experiment.network, experiment.train.trainable)
    params["network"] = stored(params["network"], "float32")
    # Separate buffers, because the training step donates both.
    ema = state.ema | jax.tree.map(jnp.copy, params)
    params.pop("companion", None)  # which the average alone has
    others = {k: getattr(state, k) and jax.tree.map(jnp.copy, params) for k in BESIDE}
    return state._replace(params=params, ema=ema, frozen=frozen, **others)


def fresh_parts(experiment: Experiment) -> Params:
    """Makes the initial values of only the `new_parts`, nested as in the network."""
    net, key = experiment.network, jax.random.key(experiment.train.seed)
    return _made(experiment, lambda: stored(matching(net.init(key), new_parts(net)), "float32"))


def fresh_trained(experiment: Experiment) -> TrainState:
    """Makes the state before the first step without allocating frozen parameters."""
    return _made(experiment, lambda: _init(experiment)._replace(frozen=()))


def fresh_state(experiment: Experiment) -> TrainState:
    """Makes the state before the first step, directly on the mesh."""
    return _made(experiment, lambda: _init(experiment))


def _made(experiment: Experiment, make: Callable[[], Any]) -> Any:
    shardings = shardings_of(jax.eval_shape(make), experiment.mesh)
    with jax.set_mesh(experiment.mesh), draws_as_kernels():
        return jax.jit(make, out_shardings=shardings)()


def _init(experiment: Experiment) -> TrainState:
    key = jax.random.key(experiment.train.seed)
    return init_state(
        key, experiment.network, experiment.process, experiment.optimizer,
        experiment.train.trainable, taught=experiment.objective.needs.teacher,
        behaving=updates_of(experiment.objective) > 1,
    )  # fmt: skip
