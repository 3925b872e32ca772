"""Runs that keep the checkpoint with the best evaluation, and what reads it."""

import gc
import json
import math
import re
import shutil

import pytest

from md4_jax.evals.likelihood import LikelihoodBound

pytestmark = pytest.mark.slow

# Nats per token that the evaluations while training are said to find: the best is at step 4, which
# no rule but that of the best saves or keeps.
NATS = {2: 3.0, 4: 1.5, 6: 2.0, 8: math.nan}
WORDS = (
    *("train.num_steps=9", "network.depth=1", "optim.warmup_steps=1", "checkpoint.every=3"),
    *("checkpoint.keep=1", "checkpoint.best=validation", "evals.validation.every=2"),
    *("evals.test.limit=64", "sample.num=1"),
)


class Crash(BaseException):
    """Stands for a kill: no error of an evaluator, after which the step would be saved."""


@pytest.fixture(scope="module")
def found():
    """Makes evaluations while training find NATS; `crash` is a step whose evaluation fails."""
    run, asked = LikelihoodBound.run, {"crash": None}

    def said(self, experiment, params, context):
        if context.name != "validation":
            return run(self, experiment, params, context)
        if context.step == asked["crash"]:
            raise Crash
        nats = NATS[context.step]
        values = {"nats_per_token": nats, "bits_per_token": nats / math.log(2)}
        return values | {f"{name}_se": 0.125 for name in values}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LikelihoodBound, "run", said)
        yield asked


@pytest.fixture(scope="module")
def arguments(tiny):
    return ("--config", tiny, *(f"--config.{word}" for word in WORDS))


@pytest.fixture(scope="module")
def whole(run, arguments, found, scratch):
    """The workdir of a run that nobody disturbed, and what it printed."""
    workdir = scratch / "kept"
    ended = run(*arguments, "--workdir", workdir)
    assert ended.code == 0, ended
    return workdir, ended.out


def saved(workdir) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


def test_the_best_is_saved_where_it_was_evaluated_and_stays(whole):
    workdir, out = whole
    assert saved(workdir) == [4, 9]
    assert "best          step 4: validation/nats_per_token 1.5000 +- 0.1250" in out


@pytest.mark.parametrize("mode", ["eval", "sample"])
@pytest.mark.cases(1)
def test_the_best_is_read_by_its_name_and_by_its_step(mode, whole, run, refused):
    at = ("--workdir", whole[0], "--mode", mode)
    for asked, step in (("newest", 9), ("best", 4), (4, 4)):
        ended = run(*at, f"--config.eval.checkpoint={asked}")
        assert ended.code == 0, ended
        assert json.loads(ended.out.splitlines()[-1])["step"] == step
    message = refused(*at, "--config.eval.checkpoint=6")
    assert f"{whole[0]} has no checkpoint of step 6 (eval.checkpoint)" in message
    assert "checkpoints of the steps [4, 9]" in message


def test_there_may_be_no_best(whole, refused):
    at = ("--workdir", whole[0], "--mode", "eval", "--config.eval.checkpoint=best")
    assert "needs checkpoint.best" in refused(*at, "--config.checkpoint.best=")
    words = ("--config.checkpoint.best=test", "--config.evals.test.every=1")
    message = refused(*at, *words)
    assert "none of the checkpoints" in message and "evaluated by evals.test" in message
    assert "It has checkpoints of the steps [4, 9]" in message


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_best_that_is_damaged_is_not_replaced_by_another(whole, refused, tmp_path):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    for file in (workdir / "checkpoints" / "4").rglob("d/*"):
        file.write_bytes(b"")
    at = ("--workdir", workdir, "--mode", "sample", "--config.eval.checkpoint=best")
    message = refused(*at)
    gc.collect()  # what Orbax leaves of a failed read
    assert re.search("checkpoint 4 in .* cannot be read.* of the steps .4, 9.: choose", message)


@pytest.mark.campaign
@pytest.mark.parametrize("step, saved_before", [(4, 3), pytest.param(6, 6, marks=pytest.mark.slow)])
def test_a_run_that_is_cut_off_keeps_the_same(
    step, saved_before, whole, run, arguments, found, tmp_path, same_run
):
    """In the evaluation of step 4, which is the best, and of step 6, which is saved already."""
    found["crash"] = step
    try:
        with pytest.raises(Crash):
            run(*arguments, "--workdir", tmp_path / "run")
    finally:
        found["crash"] = None
    ended = run("--workdir", tmp_path / "run")
    assert ended.code == 0, ended
    assert f"resuming from step {saved_before}\n" in ended.out
    assert saved(tmp_path / "run") == saved(whole[0])
    same_run(tmp_path / "run", whole[0])


def test_another_run_begins_with_a_checkpoint_that_is_named(whole, run, refused, tiny, tmp_path):
    words = [f"--config.{word}" for word in (*WORDS, "checkpoint.best=", "train.num_steps=2")]
    words += ["--config.evals.test.final=False", "--config.evals.samples.final=False"]
    at = ("--config", tiny, *words, "--workdir", tmp_path / "run")
    initial = f"--config.train.initial={whole[0] / 'checkpoints'}"
    message = refused(*at, f"{initial}/5")
    assert f"{whole[0]} has no checkpoint of step 5" in message
    ended = run(*at, f"{initial}/4")
    assert ended.code == 0, ended
    assert "begins with the averaged parameters of step 4 of" in ended.out


def test_nothing_is_lost_when_a_run_that_has_ended_is_started_with_less(whole, run, tmp_path):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    ended = run("--workdir", workdir, "--config.checkpoint.best=")
    assert ended.code == 0 and saved(workdir) == [4, 9], ended
