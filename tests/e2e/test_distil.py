"""Distillation from the command line: its teacher, resuming, refusals; samples of few steps."""

import shutil

import few_steps
import numpy as np
import pytest
import runs

pytestmark = pytest.mark.slow

KEYS = {
    "objective.name": "sdtt", "objective.steps": 8, "objective.round_steps": 4,
    "train.num_steps": 10, "optim.warmup_steps": 0, "log.every": 1, "checkpoint.every": 2,
    "checkpoint.keep": 9, "evals.validation.every": 5, "sample.num": 1, "sample.steps": 2,
}  # fmt: skip


def words(config, workdir, **changes) -> list[str]:
    keys = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    return [
        "--config", str(config), "--workdir", str(workdir),
        *(f"--config.{key}={value}" for key, value in keys.items()),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def student(run, tiny, trained, scratch):
    """A run of three rounds that was not interrupted, from a teacher that is gone since."""
    teacher, workdir = scratch / "teacher", scratch / "student"
    shutil.copytree(trained, teacher)
    ended = run(*words(tiny, workdir, train__initial=teacher))
    assert ended.code == 0, ended
    assert f"begins with the averaged parameters of step 30 of {teacher}" in ended.out
    assert "parameters, optimizer, teacher and moving average" in ended.out
    shutil.rmtree(teacher)
    return workdir


@pytest.mark.campaign
def test_its_loss_is_no_bound_and_its_evaluations_are(student, rows):
    found = rows(student)
    lines = [row for row in found if "grad_norm" in row]
    assert [row["round"] for row in lines] == [0] * 4 + [1] * 4 + [2] * 2
    assert all("train_bits_per_token" not in row for row in found)
    losses = [row["train_loss_bits"] for row in lines]
    assert np.isfinite(losses).all() and min(losses) >= 0
    assert runs.evaluated(student)["bits_per_token"] < 6.5  # of 65 symbols
    assert sum("validation/nats_per_token" in row for row in found) == 2


@pytest.mark.campaign
def test_the_teacher_of_the_first_round_is_the_other_run(student, trained, tmp_path):
    """In the checkpoint, to the bit; later it is the student at the end of a round."""
    found = {}
    for step in (2, 4, 8, 10):
        copy = shutil.copytree(student, tmp_path / str(step))
        for other in (copy / "checkpoints").iterdir():
            if other.name.isdigit() and int(other.name) > step:
                shutil.rmtree(other)
        found[step] = runs.arrays(copy)
    initial = runs.arrays(trained)
    names = [name for name in initial if name.startswith("ema/network")]
    assert len(names) > 15
    for name in names:
        teacher, own = (name.replace("ema/", part, 1) for part in ("teacher/", "params/"))
        np.testing.assert_array_equal(found[2][teacher], initial[name])
        np.testing.assert_array_equal(found[4][teacher], initial[name])
        np.testing.assert_array_equal(found[8][teacher], found[4][own])
        np.testing.assert_array_equal(found[10][teacher], found[8][own])
    assert any((found[8][n] != found[10][n]).any() for n in found[8] if n.startswith("teacher/"))


@pytest.mark.campaign
@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_resumed_run_ends_bit_for_bit_the_same(step, student, run, tmp_path, same_run):
    """From within a round, and from its end. The teacher's run is no longer needed."""
    again = shutil.copytree(student, tmp_path / "again")
    for later in (again / "checkpoints").iterdir():
        if later.name.isdigit() and int(later.name) > step:
            shutil.rmtree(later)
    ended = run("--workdir", again)
    assert ended.code == 0, ended
    same_run(again, student)


def test_a_distillation_needs_a_teacher_of_its_own_noise(tiny, trained, tmp_path, refused):
    workdir = tmp_path / "run"
    message = refused(*words(tiny, workdir))
    assert "objective.name='sdtt' needs a teacher" in message
    assert "--config.train.initial=RUN" in message
    other = words(tiny, workdir, train__initial=trained, process__schedule__name="cosine")
    message = refused(*other)
    assert "cannot be the teacher of objective.name='sdtt'" in message
    assert "process.schedule.name='linear' in that run and 'cosine' in this one" in message
    uniform = {"objective__name": "dcd", "process__name": "uniform"}
    message = refused(*words(tiny, workdir, train__initial=trained, **uniform))
    assert "process.name='masking' in that run and 'uniform' in this one" in message
    message = refused(*words(tiny, workdir, train__initial=trained, train__num_steps=13))
    assert "makes 4 rounds" in message and "train.num_steps to at most 12" in message
    assert not workdir.exists()


@pytest.mark.campaign
def test_few_steps_of_a_student_come_closer_to_the_data():
    """Total variation, with no noise but that of training (docs/families/distillation.md)."""
    found = few_steps.measured("sdtt", 0)
    assert found["student"][1] < found["teacher"][1], found
    assert found["student"][2] < found["teacher"][2] - 0.02, found
    assert found["teacher"][16] < 0.1, found
