"""Keeping checkpoints: the newest, every so many steps, and the best of those evaluated."""

import math
import types

import pytest

from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.ngrams import NGramModels
from md4_jax.options import CheckpointOptions, EvalOptions
from md4_jax.protocols import UserError
from md4_jax.training import keeping
from md4_jax.training.keeping import Best, best_of
from md4_jax.training.log import LogSettings, TrainLog
from md4_jax.training.writers import NullWriter, Progress, Writer

FIGURE = "validation/nats_per_token"


@pytest.mark.parametrize(
    "options, best, gone",
    [
        (dict(keep=2), None, [5, 7, 10, 14, 20]),
        (dict(keep=2, keep_every=10), None, [5, 7, 14]),
        (dict(keep=2, keep_every=10), 7, [5, 14]),
        (dict(keep=1), 28, [5, 7, 10, 14, 20, 21]),
        (dict(keep=1), 5, [7, 10, 14, 20, 21]),
        (dict(keep=9, keep_every=100), 1, []),
        (dict(keep=1, keep_every=7), 3, [5, 10, 20]),
    ],
)
def test_a_checkpoint_goes_if_no_rule_keeps_it(options, best, gone):
    steps = [5, 7, 10, 14, 20, 21, 28]
    assert keeping.surplus(steps, CheckpointOptions(**options), best) == gone


def test_there_may_be_no_checkpoint():
    assert keeping.surplus([], CheckpointOptions(keep_every=3), 4) == []


def test_saves_by_steps():
    options = CheckpointOptions(every=6, keep_every=10)
    assert [step for step in range(1, 31) if options.is_due(step)] == [6, 10, 12, 18, 20, 24, 30]
    assert not CheckpointOptions(every=6).is_due(10)
    only_kept = CheckpointOptions(every=0, keep_every=10)
    assert [step for step in range(1, 31) if only_kept.is_due(step)] == [10, 20, 30]
    assert not any(map(CheckpointOptions(every=0).is_due, range(1, 31)))


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(keep=0), "checkpoint.keep must be at least 1, not 0"),
        (dict(keep_every=-1), "checkpoint.keep_every must be at least 0, not -1"),
        (dict(seconds=-2.0), "checkpoint.seconds must be at least 0, not -2.0"),
    ],
)
def test_amounts_that_make_no_sense(options, words):
    with pytest.raises(UserError, match=words):
        CheckpointOptions(**options)


def row(step, value, name=FIGURE):
    return {"step": step, name: value, f"{name}_se": 0.25}


def test_the_best_has_the_lowest_figure_of_the_checkpoints_that_exist():
    rows = [row(10, 3.0), row(20, 1.0), row(30, 2.0), row(40, 0.5, "test/nats_per_token")]
    assert best_of(rows, FIGURE, {10, 20, 30, 40}) == Best(20, 1.0, 0.25)
    assert best_of(rows, FIGURE, {10, 30, 40}) == Best(30, 2.0, 0.25)
    assert best_of(rows, FIGURE, {40}) is None


def test_of_equal_ones_the_first_is_the_best():
    assert best_of([row(30, 1.0), row(20, 1.0)], FIGURE, {20, 30}).step == 20


@pytest.mark.parametrize("value", ["nan", "-inf", math.nan, -math.inf, None])
def test_a_figure_that_is_not_finite_is_never_the_best(value):
    """Text, as in a file, or a number, as it was just measured."""
    assert best_of([row(10, 3.0), row(20, value)], FIGURE, {10, 20}).step == 10


def test_the_best_of_single_draws_has_no_error():
    """Metrics of a file have text in place of nan, which the error of a single draw is."""
    found = best_of([{**row(10, 3.0), f"{FIGURE}_se": "nan"}], FIGURE, {10})
    assert found.value == 3.0 and math.isnan(found.error)


def log_of(writer):
    settings = LogSettings(
        every=1, batch_shape=(1, 1), is_bound=True, learning_rate=float, max_skipped_in_a_row=1
    )
    return TrainLog(writer, Progress(1, 0, enabled=False), settings)


def evaluate(log, step, value):
    log.evaluation(step, "validation", {"nats_per_token": value, "nats_per_token_se": 0.25})


def test_the_record_of_the_best_goes_back_with_the_run(tmp_path):
    """Resumed from step 14, the evaluations of steps 20 and 30 have not happened."""
    writer = Writer(tmp_path, resume_step=0)
    log = log_of(writer)
    for step, value in ((10, 2.0), (20, 1.0), (30, 3.0)):
        evaluate(log, step, value)
    assert log.best(FIGURE, [10, 14, 20, 30]) == 20
    writer.close()
    for resumed, best in ((30, 20), (14, 10), (7, None)):
        writer = Writer(tmp_path, resume_step=resumed)
        log = log_of(writer)
        assert log.best(FIGURE, [7, 10, 14, 20, 30]) == best
        writer.close()
    evaluate(log, 10, 2.5)
    assert log.best(FIGURE, [10]) == 10


def test_all_processes_ask_the_one_that_writes(monkeypatch):
    others = {"writer": 0, "silent": 20}
    log = log_of(NullWriter())
    evaluate(log, 10, 2.0)
    assert log.best(FIGURE, [10]) is None
    monkeypatch.setattr(
        "md4_jax.training.log.max_over_processes", lambda number: max(number, others["silent"])
    )
    assert log.best(FIGURE, [10, 20]) == 20


def experiment(best, checkpoint="newest", **evals):
    config = {"evals": {"ngrams": {"name": "ngrams"}}}
    return types.SimpleNamespace(
        config=config,
        evals={"ngrams": NGramModels(every=5), **evals},
        checkpoint=CheckpointOptions(best=best),
        eval=EvalOptions(checkpoint),
    )


@pytest.mark.parametrize(
    "best, checkpoint, words",
    [
        ("", "best", "eval.checkpoint='best' needs checkpoint.best"),
        (
            "valid",
            "newest",
            "'valid' is not an evaluator of the section evals, which has ngrams, test, val",
        ),
        ("ngrams", "newest", "evals.ngrams.name='ngrams' has none"),
        ("test", "newest", "evals.test.every=0"),
        ("validation", "best", None),
        ("", "newest", None),
        ("", 7, None),
    ],
)
def test_the_best_needs_evaluations_while_training(best, checkpoint, words):
    bounds = {"test": LikelihoodBound(None), "validation": LikelihoodBound(None, every=5)}
    made = experiment(best, checkpoint, **bounds)
    if words is None:
        keeping.check_best(made)
        assert keeping.figure_of(made) == (FIGURE if best else "")
        return
    with pytest.raises(UserError, match=words):
        keeping.check_best(made)


@pytest.mark.parametrize("checkpoint", ["bset", "-1", "1e3", ""])
def test_a_checkpoint_that_is_none(checkpoint):
    with pytest.raises(UserError, match="must be newest, best or a step, not "):
        EvalOptions(checkpoint)
