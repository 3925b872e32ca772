"""Windows of steps: means, restarts, skipped steps and names."""

import math
import types

import numpy as np
import pytest

from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place
from md4_jax.training import loop, report
from md4_jax.training.log import LogSettings, TrainLog


class Paper:
    """A writer and a progress line that keep what they are given."""

    def __init__(self):
        self.rows, self.lines = [], []

    def write(self, step, numbers):
        self.rows.append({"step": step} | dict(numbers))

    def show(self, step, text, steps_per_second):
        self.lines.append(text)

    def say(self, text):
        self.lines.append(text)


@pytest.mark.parametrize("trackers", ["tensorboard", "", "wandb,tensorboard"])
def test_the_summary_names_tensorboard_only_where_it_has_events(trackers, tmp_path):
    log, domain = types.SimpleNamespace(trackers=trackers), types.SimpleNamespace(unit="token")
    experiment = types.SimpleNamespace(log=log, domain=domain)
    (tmp_path / report.METRICS).write_text('{"step": 3, "train_bits_per_token": 2.5}\n')
    (tmp_path / "checkpoints").mkdir()
    said = report.summary(experiment, place(str(tmp_path)), 3, {}).splitlines()
    assert said[3:] == [
        f"  metrics       {tmp_path / 'metrics.jsonl'}"
        + f" (and TensorBoard: {tmp_path})" * ("tensorboard" in trackers),
        f"  checkpoints   {tmp_path / 'checkpoints'}",
    ], "and no samples, of which there are none"


def test_results_are_summed_up_where_the_plot_cannot_be_written(tmp_path):
    (tmp_path / report.METRICS).write_text('{"step": 3, "train_bits_per_token": 2.5}\n')
    (tmp_path / "figures").write_text("in the way")
    said = report.picture(place(str(tmp_path)), [], "token")
    assert said == f"none: {tmp_path}/figures/loss.png could not be written: File exists"


def new_log(paper, *, is_bound=True, every=4, held_out="validation"):
    settings = LogSettings(
        every=every,
        batch_shape=(8, 16),
        is_bound=is_bound,
        learning_rate=lambda step: 0.1 * (step + 1),
        max_skipped_in_a_row=3,
        held_out=held_out,
    )
    return TrainLog(paper, paper, settings)


def metrics(step, streak=0, skipped=0):
    nats = np.float32(np.nan if streak else 16.0 * math.log(2.0) * step)
    return {
        "nats": nats,
        "grad_norm": np.float32(step),
        "masked": np.float32(0.5),
        "skipped": np.int32(skipped),
        "skipped_in_a_row": np.int32(streak),
    }


def run(log, steps):
    for step in steps:
        log.add(step, metrics(step))
    log.flush()


def timeless(rows):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def test_a_row_is_the_mean_of_its_window():
    paper = Paper()
    run(new_log(paper), range(1, 9))
    first, second = paper.rows
    assert [first["step"], second["step"]] == [4, 8]
    assert first["train_bits_per_token"] == pytest.approx(2.5, rel=1e-6)
    assert second["train_bits_per_token"] == pytest.approx(6.5, rel=1e-6)
    assert second["grad_norm"] == 6.5 and second["masked"] == 0.5
    # The rate that step 8 was made with, which is that of seven updates done.
    assert second["learning_rate"] == pytest.approx(0.8) and second["skipped"] == 0
    assert second["tokens_per_second"] > 0
    # Of 5, 6, 7 and 8 bits: the root of 5 / 3 / 4.
    assert second["train_bits_per_token_se"] == pytest.approx(math.sqrt(5 / 12), rel=1e-5)
    assert "bound 6.500 +- 0.645 bits/token" in paper.lines[-1]


def test_the_line_and_the_row_say_how_evenly_tokens_are_given_to_experts():
    paper = Paper()
    log = new_log(paper, every=2)
    for step, (load, idle) in enumerate([(1.5, 0.0), (2.5, 0.25)], start=1):
        loads = {"expert_load": np.float32(load), "experts_idle": np.float32(idle)}
        log.add(step, metrics(step) | loads)
    log.flush()
    assert ", fullest expert 2.00x, 12% idle" in paper.lines[-1]
    assert paper.rows[-1]["expert_load"] == 2.0 and paper.rows[-1]["experts_idle"] == 0.125
    run(new_log(paper), range(1, 5))
    assert "expert" not in paper.lines[-1] and "expert_load" not in paper.rows[-1]


def test_a_window_of_one_step_has_no_error():
    paper = Paper()
    run(new_log(paper, every=1), [1, 2])
    assert paper.rows[1]["train_bits_per_token"] == pytest.approx(2.0, rel=1e-6)
    assert math.isnan(paper.rows[1]["train_bits_per_token_se"])
    assert "bound 2.000 bits/token" in paper.lines[-1]


def test_an_interrupted_window_of_an_earlier_version_has_no_error():
    """Its checkpoint has no squares; the next window has an error again."""
    paper, before = Paper(), new_log(Paper())
    run(before, [1, 2])
    log = new_log(paper)
    log.set_state({key: before.state()[key] for key in ("sums", "count")})
    run(log, range(3, 9))
    errors = [row["train_bits_per_token_se"] for row in paper.rows]
    assert math.isnan(errors[0]) and errors[1] == pytest.approx(math.sqrt(5 / 12), rel=1e-5)
    assert paper.rows[0]["train_bits_per_token"] == pytest.approx(2.5, rel=1e-6)


def test_a_step_is_read_one_step_late():
    paper = Paper()
    log = new_log(paper)
    for step in range(1, 5):
        log.add(step, metrics(step))
    assert paper.rows == []
    log.flush()
    assert len(paper.rows) == 1
    log.flush()
    assert len(paper.rows) == 1


@pytest.mark.parametrize("cut", [3, 4, 6])
def test_an_interrupted_window_comes_out_the_same(cut):
    whole, before, after = Paper(), Paper(), Paper()
    run(new_log(whole), range(1, 9))
    log = new_log(before)
    run(log, range(1, cut + 1))
    resumed = new_log(after)
    resumed.set_state(log.state())
    run(resumed, range(cut + 1, 9))
    assert timeless(before.rows + after.rows) == timeless(whole.rows)


def test_a_saved_state_is_not_the_log_itself():
    log = new_log(Paper())
    run(log, [1])
    saved = log.state()
    copy = saved | {"sums": dict(saved["sums"])}
    run(log, [2])
    assert saved == copy


def test_a_loss_that_is_no_bound_has_another_name():
    paper = Paper()
    run(new_log(paper, is_bound=False), range(1, 5))
    assert paper.rows[0]["train_loss_bits"] == pytest.approx(2.5, rel=1e-6)
    assert "train_bits_per_token" not in paper.rows[0]
    assert paper.lines[0].startswith("training loss")


def test_skipped_steps_are_told_and_left_out_of_the_mean():
    paper = Paper()
    log = new_log(paper)
    log.add(1, metrics(1))
    log.add(2, metrics(2, streak=1, skipped=1))
    log.add(3, metrics(3, skipped=1))
    log.add(4, metrics(4, skipped=1))
    log.flush()
    assert paper.lines[0] == "step 2 skipped: non-finite loss, gradient or update"
    assert paper.rows[0]["train_bits_per_token"] == pytest.approx(8 / 3, rel=1e-6)
    assert paper.rows[0]["skipped"] == 1 and "1 skipped" in paper.lines[1]


def test_a_window_without_a_good_step_is_written_as_not_a_number():
    paper = Paper()
    log = new_log(paper, every=2)
    log.add(1, metrics(1, streak=1, skipped=1))
    log.add(2, metrics(2, streak=2, skipped=2))
    log.flush()
    assert math.isnan(paper.rows[0]["train_bits_per_token"])


def test_too_many_skipped_steps_stop_the_run():
    log = new_log(Paper())
    for streak in (1, 2, 3):
        log.add(streak, metrics(streak, streak=streak, skipped=streak))
    with pytest.raises(UserError, match=r"3 steps in a row .*max_skipped_in_a_row=3"):
        log.flush()


HELD_OUT = {"bits_per_token": 2.25, "bits_per_token_se": 0.012, "sequences": 9, "split": "x"}


def test_what_an_evaluator_finds_is_written_under_its_name():
    """Its numbers, that is; what is text is not for a curve."""
    paper = Paper()
    log = new_log(paper)
    log.add(1, metrics(1))
    log.evaluation(4, "validation", HELD_OUT)
    numbers = [name for name in HELD_OUT if name != "split"]
    assert paper.rows == [{"step": 4} | {f"validation/{name}": HELD_OUT[name] for name in numbers}]
    run(log, range(2, 5))
    assert "(held out 2.250 +- 0.012)" in paper.lines[-1]


@pytest.mark.parametrize(
    "is_bound, held_out", [(False, "validation"), (True, "other"), (False, "")]
)
def test_two_numbers_of_different_kinds_do_not_stand_side_by_side(is_bound, held_out):
    """A training-only loss beside a bound, say, would be read as a gap between the two."""
    paper = Paper()
    log = new_log(paper, is_bound=is_bound, held_out=held_out)
    log.evaluation(0, "validation", HELD_OUT)
    run(log, range(1, 5))
    assert "held out" not in paper.lines[-1]


def test_a_held_out_bound_of_one_sequence_has_no_error():
    paper = Paper()
    log = new_log(paper)
    log.evaluation(0, "validation", HELD_OUT | {"bits_per_token_se": math.nan})
    run(log, range(1, 5))
    assert "(held out 2.250)" in paper.lines[-1]


def test_what_is_held_out_is_of_the_runs_own_data_and_measured_while_it_trains():
    bounds = {
        "last": LikelihoodBound(None),
        "other": LikelihoodBound(None, every=2, data={"path": "FILE"}),
        "mine": LikelihoodBound(None, every=2),
    }
    assert loop._held_out(types.SimpleNamespace(evals=bounds)) == "mine"
    del bounds["mine"]
    assert loop._held_out(types.SimpleNamespace(evals=bounds)) == ""
