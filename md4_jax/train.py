"""THE training loop: restore, step, log, save, evaluate. There is one."""

import signal
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from md4_jax import corpus, report
from md4_jax.checkpoint import Checkpoints
from md4_jax.compiling import jit
from md4_jax.evaluate import Evaluator
from md4_jax.experiment import Experiment
from md4_jax.metrics import NullWriter, Progress, Writer
from md4_jax.paths import Place
from md4_jax.protocols import Params, UserError
from md4_jax.sharding import largest, shardings_of, to_global
from md4_jax.step import TrainState, init_state, make_train_step
from md4_jax.trainlog import TrainLog

# Why a run stops besides signals, whose numbers are larger than it.
BUDGET = 1


class Stop:
    """Turns SIGTERM and Ctrl-C into a wish that the loop grants after the step it is in."""

    def __init__(self):
        self.signal: int | None = None
        self._before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}

    def _note(self, number: int, frame: object) -> None:
        del frame
        if self.signal is not None:  # asked twice: go at once
            self.release()
            signal.raise_signal(number)
        self.signal = number

    def release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(
    exp: Experiment,
    source,
    workdir: Place,
    evaluator: Evaluator,
    begin: Callable[[Params], Params] | None = None,
) -> tuple[int, int | None]:
    """Runs until num_steps, the budget or a signal; returns (step saved, signal or None).

    evaluator: what estimates the bound on the validation split, every eval.every steps.
    begin: fresh parameters -> those of the first step; not called where there is a checkpoint.
    UserError when too many non-finite steps follow one another or a checkpoint
    cannot be saved; the earlier checkpoints stay as they are.
    """
    primary = jax.process_index() == 0
    checkpoints = Checkpoints(workdir / "checkpoints", exp.checkpoint)
    state, host = first_state(exp, checkpoints, begin)
    step = int(state.step)
    text = corpus.fingerprint(exp, source)
    corpus.check_same_text((host or {}).get("text"), text, workdir)
    data = corpus.train_batches(exp, source)
    if primary:
        print(report.start(exp, state, workdir, step), flush=True)
    writer = Writer(workdir, resume_step=step) if primary else NullWriter()
    progress = Progress(exp.train.num_steps, step, enabled=primary)
    log = _train_log(exp, writer, progress)
    if host is not None:
        data.set_state(host["data"])
        log.set_state(host["log"])
    step_fn = make_train_step(exp.network, exp.objective, exp.optimizer, exp.train)
    step_fn = jit(step_fn, exp.mesh, donate_argnums=0)
    stop, began = Stop(), time.monotonic()

    def evaluate_if_due() -> None:
        every = exp.eval.every
        if not (every and step and step % every == 0):
            return
        # Only the process that writes knows what is written.
        if not largest(int(writer.has(step, "eval_nats_per_token"))):
            log.flush()
            batches = corpus.eval_batches(exp, source, "validation")
            result = evaluator(state.ema, batches, exp.eval.limit)
            log.evaluation(step, result, report.line(result))

    def why_stop() -> int:
        """0, BUDGET or the number of a signal that any process was sent."""
        over = 0 < exp.train.seconds <= time.monotonic() - began
        return largest(stop.signal or BUDGET * over, now=step % exp.log.every == 0)

    try:
        last = step >= exp.train.num_steps
        evaluate_if_due()  # a kill after the save may have come before it
        while not last:
            batch = to_global(next(data), exp.mesh)
            with jax.set_mesh(exp.mesh):
                state, metrics = step_fn(state, batch)
            step += 1
            log.add(step, metrics)
            progress.advance()
            if step % exp.log.every == 0:
                checkpoints.check()
            why = why_stop()
            last = step >= exp.train.num_steps or why > 0
            if last or step % exp.checkpoint.every == 0:
                log.flush()
                writer.flush()
                position = {"data": data.get_state(), "log": log.state(), "text": text}
                checkpoints.save(step, state, position)
            if max(why, largest(stop.signal or 0, now=False)) <= BUDGET:
                evaluate_if_due()
        checkpoints.wait()
        why = largest(stop.signal or 0)
        if step < exp.train.num_steps and not why:
            progress.say(
                f"stopped at step {step} of {exp.train.num_steps}: the budget of "
                f"train.seconds={exp.train.seconds:g} is spent; the same command goes on"
            )
    except UserError as error:
        raise UserError(f"stopped after step {step}: {error}") from error
    finally:
        progress.close()
        stop.release()
        writer.close()
        data.close()
        # To close is to wait for the other processes, which may be gone.
        if jax.process_count() == 1 or sys.exc_info()[0] is None:
            checkpoints.close()
    return step, why or None


def _train_log(exp: Experiment, writer: Writer, progress: Progress) -> TrainLog:
    return TrainLog(
        writer,
        progress,
        every=exp.log.every,
        batch_shape=(exp.train.batch_size, exp.data.length),
        is_bound=exp.objective.is_bound(exp.process),
        learning_rate=exp.learning_rate,
        max_skipped_in_a_row=exp.train.max_skipped_in_a_row,
    )


def abstract_state(exp: Experiment) -> TrainState:
    """The shapes of a state with their shardings, and nothing allocated."""
    shapes = jax.eval_shape(lambda: _init(exp))
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        shardings_of(shapes, exp.mesh),
    )


def first_state(
    exp: Experiment, checkpoints: Checkpoints, begin: Callable[[Params], Params] | None
) -> tuple[TrainState, dict | None]:
    """The newest checkpoint's (state, host state), or a fresh state made in place on the mesh."""
    template = abstract_state(exp)
    found = checkpoints.restore(template)
    if found is not None:
        return found
    state = fresh_state(exp)
    if begin is not None:
        params = begin(state.params)
        # Buffers of its own for each, since both are given away to be written over.
        state = state._replace(params=params, ema=jax.tree.map(jnp.copy, params))
    return state, None


def fresh_state(exp: Experiment) -> TrainState:
    """The state before the first step, made in place on the mesh."""
    shardings = jax.tree.map(lambda s: s.sharding, abstract_state(exp))
    with jax.set_mesh(exp.mesh):
        return jax.jit(lambda: _init(exp), out_shardings=shardings)()


def _init(exp: Experiment) -> TrainState:
    key = jax.random.key(exp.train.seed)
    return init_state(key, exp.network, exp.process, exp.optimizer)
