"""Evaluations during training, and what happens when one of them fails."""

from collections.abc import Iterator
from typing import TypeVar

import jax

from md4_jax.evals.suite import Suite, failure_text
from md4_jax.runtime.errors import cause
from md4_jax.training.notices import Interrupted, Signals
from md4_jax.training.saver import Saver
from md4_jax.training.step import TrainState

T = TypeVar("T")


def interrupted(
    saver: Saver, signals: Signals, suite: Suite, state: TrainState, step: int, best: str = ""
) -> bool:
    """Runs the evaluators that are due; returns whether a signal ended them, then with a save.

    best: name of the evaluator that determines the best checkpoint; "": none is saved
    """
    try:
        evaluated = evaluate_if_due(saver, signals, suite, state, step)
    except Interrupted:
        _saved(saver, step, state)
        return True
    if best in evaluated:
        saver.save_if_best(step, state)
    return False


def evaluate_if_due(
    saver: Saver, signals: Signals, suite: Suite, state: TrainState, step: int
) -> list[str]:
    """Runs the evaluators that are due at this step and not logged yet; returns those with results.

    If one fails for a reason outside the program (`runtime.errors.cause`), that is printed, and
    training continues. Any other error is raised, after the state is saved. With several processes
    an error is raised at once, see `Suite.run`. Interrupted if a signal ends an evaluator.
    """
    log, done = saver.log, []
    names = log.missing(step, suite.due(step))
    if names:
        log.flush()

    def say(text: str) -> None:
        log.say(f"step {step}  {text}")

    def forgive(name: str, error: Exception) -> None:
        why = failure_text(name, error)
        suite.failures.add(name, step, why)
        say(f"warning: {why}\nTraining continues; evals.{name} has no result at this step")

    try:
        results = suite.run(names, state.averaged, step, say, forgive)
        for name, result in _each(results, signals):
            log.evaluation(step, name, result)
            done.append(name)
    except Exception as error:
        if cause(error) is None and jax.process_count() == 1:
            _saved(saver, step, state)
            saver.finish(step, state)
            error.add_note(
                f"step {step} is saved. --config.evals.NAME.every=0 resumes without an evaluator"
            )
        raise
    return done


def _each(results: Iterator[T], signals: Signals) -> Iterator[T]:
    """Yields the results; a signal interrupts what makes them, and not what is done with them."""
    while True:
        with signals.interrupting():
            found = next(results, None)
        if found is None:
            return
        yield found


def _saved(saver: Saver, step: int, state: TrainState) -> None:
    """Saves the step, unless there is a checkpoint of it."""
    if step not in saver.checkpoints.steps():
        saver.save(step, state)
