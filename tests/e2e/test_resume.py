"""A run that is killed, and started again with the same command, ends as if nothing had been.

Kills in the evaluation of step 20 are tried with object storage (test_object_storage.py), kills
in the save of a step that is not the first, and anywhere, by chaos.py.
"""

import re
import shlex
import signal

import pytest

from md4_jax.training.log import LogSettings, TrainLog
from md4_jax.training.writers import NullWriter, Progress

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(program, tiny, once):
    """The workdir of a run that nobody interrupted."""

    def make(directory):
        ended = program("--config", tiny, "--workdir", directory)
        assert ended.code == 0, ended

    return once("uninterrupted", make)


def stop_at(process, step: int, number: signal.Signals):
    """Sends the signal once a line of that step or a later one is out; (code, out, err)."""
    before = []
    for line in process.stderr:
        before.append(line)
        match = re.match(r"step (\d+)/", line)
        if match and int(match[1]) >= step:
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, "".join(before) + err


def saved(workdir) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


@pytest.mark.campaign
def test_a_run_here_equals_one_in_its_own_process(trained, reference, same_run):
    same_run(trained, reference)


def test_the_rows_of_an_uninterrupted_run(reference, rows):
    found = rows(reference)
    assert [r["step"] for r in found if "grad_norm" in r] == list(range(3, 31, 3))
    assert [r["step"] for r in found if "validation/nats_per_token" in r] == [10, 20, 30]
    assert saved(reference) == [21, 28, 30]


@pytest.mark.campaign
def test_killed_again_and_again(tiny, tmp_path, start, program, reference, same_run):
    arguments = ("--config", tiny, "--workdir", tmp_path / "run")
    for step in (4, 15, 27):
        code, _, err = stop_at(start("-m", "md4_jax.main", *arguments), step, signal.SIGKILL)
        assert code == -signal.SIGKILL, err
    assert program(*arguments).code == 0
    same_run(tmp_path / "run", reference)


@pytest.mark.campaign
def test_the_command_that_resumes_a_run_of_its_own_config(
    tiny, tmp_path, start, program, reference, same_run
):
    """It has no --config either, and the values that were changed."""
    workdir = tmp_path / "run"
    flags = ("-m", "md4_jax.main", "--workdir", workdir)
    code, _, err = stop_at(start(*flags, "--config", tiny), 4, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, err
    process = start(*flags, "--config.sample.num=1")
    code, out, err = stop_at(process, 12, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, err
    _, _, _, *arguments = shlex.split(out.strip().splitlines()[-1])
    assert arguments == ["--mode=train", f"--workdir={workdir}", "--config.sample.num=1"]
    ended = program(*arguments)
    assert ended.code == 0, ended
    assert "1 sample of 16 characters" in ended.out
    same_run(workdir, reference)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.campaign)]
)
def test_a_signal_saves_and_names_the_command_that_resumes(
    number, tiny, tmp_path, start, program, reference, same_run
):
    workdir = tmp_path / "a run"  # a space, for the shell's sake
    changed = "--config.sample.num=1"
    process = start("-m", "md4_jax.main", "--config", tiny, "--workdir", workdir, changed)
    code, out, err = stop_at(process, 8, number)
    assert code == 128 + number, err
    assert "Traceback" not in err
    message, command = out.strip().splitlines()[-2:]
    step = int(re.match(rf"{number.name}: step (\d+) is saved in ", message)[1])
    assert saved(workdir)[-1] == step < 30
    python, dash, module, *arguments = shlex.split(command)
    assert (python, dash, module) == ("python", "-m", "md4_jax")
    ended = program(*arguments)
    assert ended.code == 0, ended
    assert f"resuming from step {step}\n" in ended.out
    assert "1 sample of 16 characters" in ended.out  # what was changed stays so
    same_run(workdir, reference)


def test_two_runs_in_one_directory(tiny, tmp_path, start, program, reference, same_run):
    """The second is refused while the first is at work, which ends as if nothing had been."""
    arguments = ("--config", tiny, "--workdir", tmp_path / "run")
    first = start("-m", "md4_jax.main", *arguments)
    assert first.stderr.readline().startswith("step 3/")
    ended = program(*arguments)
    assert ended.code == 2
    assert f"is in use by process {first.pid} on " in ended.err
    assert first.communicate(timeout=300) and first.returncode == 0
    same_run(tmp_path / "run", reference)


@pytest.mark.campaign
def test_a_run_goes_on_when_nobody_can_read_what_it_prints(
    tiny, tmp_path, start, reference, same_run
):
    """As after `| head` or a lost terminal; its samples and results are in its files."""
    process = start("-m", "md4_jax.main", "--config", tiny, "--workdir", tmp_path / "run")
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=300) == 0
    same_run(tmp_path / "run", reference)
    assert list((tmp_path / "run" / "samples").glob("*.txt"))


@pytest.mark.campaign
def test_interrupted_in_the_final_evaluation(tiny, tmp_path, start, program, reference, same_run):
    arguments = ("--config", tiny, "--workdir", tmp_path / "run")
    process = start(tiny.with_name("driver.py"), "wait-in-evaluation", 30, *arguments)
    next(line for line in process.stdout if line.startswith("evaluating step 30"))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "interrupted" in err
    assert program(*arguments).code == 0
    same_run(tmp_path / "run", reference)


def test_a_signal_ends_an_evaluation(tiny, tmp_path, start, program, reference, same_run, rows):
    """No further step is taken, and the run that is resumed begins with this evaluation."""
    workdir = tmp_path / "run"
    arguments = ("--config", tiny, "--workdir", workdir)
    process = start(tiny.with_name("driver.py"), "signal-in-evaluation", 20, *arguments)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143 and "without the results of this evaluation" in err, err
    assert "SIGTERM: step 20 is saved in " in out and "Traceback" not in err
    assert saved(workdir)[-1] == 20
    evaluated = [r["step"] for r in rows(workdir) if "validation/nats_per_token" in r]
    assert evaluated == [10]
    assert program(*arguments).code == 0
    same_run(workdir, reference)


@pytest.mark.parametrize("step", [20, 30])
@pytest.mark.campaign
def test_killed_in_an_evaluation(step, tiny, tmp_path, start, program, reference, same_run):
    driver = tiny.with_name("driver.py")
    arguments = ("--config", tiny, "--workdir", tmp_path / "run")
    process = start(driver, "kill-in-evaluation", step, *arguments)
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, err
    assert program(*arguments).code == 0
    same_run(tmp_path / "run", reference)


@pytest.mark.parametrize("step", [7, pytest.param(30, marks=pytest.mark.campaign)])
def test_killed_in_a_save(step, tiny, tmp_path, start, program, reference, same_run):
    driver = tiny.with_name("driver.py")
    arguments = ("--config", tiny, "--workdir", tmp_path / "run")
    process = start(driver, "kill-in-save", step, *arguments)
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, err
    assert step not in saved(tmp_path / "run")
    assert program(*arguments).code == 0
    same_run(tmp_path / "run", reference)
    assert saved(tmp_path / "run") == saved(reference)


def test_a_finished_run_started_again_changes_nothing(copy, run, tiny, rows):
    before, tokenizer = rows(copy), (copy / "tokenizer.json").stat()
    ended = run("--config", tiny, "--workdir", copy)
    assert ended.code == 0
    assert "trained to step 30" in ended.out
    assert rows(copy) == before
    after = (copy / "tokenizer.json").stat()  # a kill while it is written loses the run
    assert (after.st_ino, after.st_mtime_ns) == (tokenizer.st_ino, tokenizer.st_mtime_ns)


def test_a_run_that_cannot_begin_leaves_the_signals_as_they_were(copy, refused, tiny):
    """Otherwise Ctrl-C would not end the next runs of a sweep; and it opens no trackers."""
    log, events = copy / "metrics.jsonl", copy / "tensorboard"
    log.unlink()
    log.mkdir()
    kept = set(events.iterdir())
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert "metrics.jsonl: Is a directory" in refused("--config", tiny, "--workdir", copy)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert set(events.iterdir()) == kept


def test_what_decides_how_often_may_change(copy, run, tiny, rows):
    ended = run(
        *(
            "--config",
            tiny,
            "--workdir",
            copy,
            "--config.log.every=5",
            "--config.evals.validation.every=0",
        ),
        *("--config.checkpoint.every=4", "--config.sample.num=1"),
    )
    assert ended.code == 0, ended
    steps = [row["step"] for row in rows(copy)]
    assert steps == sorted(steps)


def test_what_a_checkpoint_keeps_of_the_log_is_of_its_step():
    """Saving goes on while the next steps run; they must not reach what is being saved."""
    settings = LogSettings(
        every=10,
        batch_shape=(1, 1),
        is_bound=True,
        learning_rate=lambda step: 0.0,
        max_skipped_in_a_row=3,
    )
    log = TrainLog(NullWriter(), Progress(10, 0, enabled=False), settings)
    metrics = {"nats": 1.0, "grad_norm": 1.0, "skipped": 0, "skipped_in_a_row": 0}
    log.add(1, metrics)
    log.flush()
    kept = log.state()
    log.add(2, metrics)
    log.flush()
    assert kept == {"sums": {"nats": 1.0, "grad_norm": 1.0}, "squares": 1.0, "count": 1}
