"""Evaluators asked for by name: on other data, beside one another, and while training."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import runs

from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.ngrams import NGramModels
from md4_jax.protocols import UserError


@pytest.fixture(scope="module")
def evaluate(run, trained):
    """The objects of the lines of JSON that --mode eval ends with, and all that it prints."""

    def evaluate(*arguments, workdir=trained):
        ended = run("--workdir", workdir, "--mode", "eval", *arguments)
        assert ended.code == 0, ended
        lines = [line for line in ended.out.splitlines() if line.startswith("{")]
        return [json.loads(line) for line in lines], ended.out

    return evaluate


def assigned(evaluator: str, **values) -> list[str]:
    return [f"--config.evals.{evaluator}.{key.replace('__', '.')}={v}" for key, v in values.items()]


def test_several_are_told_apart_and_likelihoods_come_last(evaluate):
    rows, out = evaluate("--evals=validation,test,ngrams")
    assert [row["eval"] for row in rows] == ["ngrams", "test", "validation"]
    assert [row["split"] for row in rows] == ["test", "test", "validation"]
    assert {row["step"] for row in rows} == {30}
    # The limit is that of the evaluations while training.
    assert rows[2]["sequences"] == 64 < rows[1]["sequences"]
    assert len([key for key in rows[0] if key.endswith("_gram_bits_per_token")]) == 5
    assert f"{rows[1]['bits_per_token']:7.4f}  this model (bound, +- " in out
    (alone,), _ = evaluate("--evals=test")
    assert alone == {key: value for key, value in rows[1].items() if key != "eval"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_what_is_measured_before_an_evaluator_fails_stays(
    mode, run, tiny, trained, tmp_path, monkeypatch
):
    def fails(*arguments):
        raise UserError("no n-grams today")

    monkeypatch.setattr(NGramModels, "run", fails)
    own = shutil.copytree(trained, tmp_path / "run")
    (own / "evaluations.jsonl").unlink()
    words = ("--workdir", own, "--mode", mode)
    words += ("--evals=ngrams,test",) if mode == "eval" else ("--config", tiny)
    ended = run(*words, "--config.evals.ngrams.final=True")
    assert ended.code == 2 and "no n-grams today" in ended.err, ended
    kept = runs.evaluated(own, "test")
    assert kept["step"] == 30 and ("command" in kept) == (mode == "eval")
    if mode == "eval":
        printed = json.loads(ended.out.splitlines()[-1])
        assert printed["eval"] == "test" and printed == {key: kept[key] for key in printed}


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_an_evaluator_that_fails_does_not_stop_those_after_it(
    mode, run, tiny, trained, tmp_path, monkeypatch
):
    def fails(*arguments):
        raise UserError("no bound today")

    monkeypatch.setattr(LikelihoodBound, "run", fails)
    own = shutil.copytree(trained, tmp_path / "run")
    (own / "evaluations.jsonl").unlink()
    words = ("--workdir", own, "--mode", mode)
    words += ("--evals=ngrams,test",) if mode == "eval" else ("--config", tiny)
    ended = run(*words, "--config.evals.ngrams.final=True")
    assert ended.code == 2 and "error: evals.test: no bound today" in ended.err, ended
    assert "evaluating step 30: test, ngrams" in ended.out  # the order in which they run
    assert "failed, and ngrams is next: evals.test: no bound today" in ended.out
    assert runs.evaluated(own, "ngrams")["step"] == 30
    if mode == "train":
        assert runs.evaluated(own, "samples")["step"] == 30
        assert "trained to step 30\n  loss curve " in ended.out


def fails_at(monkeypatch, errors: dict[int, Exception]) -> None:
    """Makes likelihoods fail while training, with the error of the step."""
    works = LikelihoodBound.run

    def run(self, experiment, params, context):
        if context.name == "validation" and context.step in errors:
            raise errors[context.step]
        return works(self, experiment, params, context)

    monkeypatch.setattr(LikelihoodBound, "run", run)


@pytest.mark.campaign
def test_training_goes_on_without_an_evaluation(run, tiny, trained, tmp_path, monkeypatch, arrays):
    full = OSError(errno.ENOSPC, "No space left on device", "there")
    errors = {10: UserError("no bound today"), 15: MemoryError("array of 9 TB"), 20: full}
    fails_at(monkeypatch, errors)
    own = tmp_path / "run"
    ended = run("--config", tiny, "--workdir", own, "--config.evals.validation.every=5")
    assert ended.code == 0, ended
    said = "there: No space left on device (errno 28): free some space"
    for step, why in (
        (10, "no bound today"), (15, "there is not enough memory (array of 9 TB)"), (20, said),
    ):  # fmt: skip
        assert f"step {step}  warning: evals.validation: {why}" in ended.err
    assert "step 25  validation: " in ended.err
    last = ended.out[ended.out.index("trained to step 30") :]
    assert f"warning: evals.validation: {said}\n" in last
    assert "Evaluations that failed: 3, the last at step 20." in last
    assert last.endswith(f"--workdir {own} --mode eval --evals validation\n")
    same = arrays(trained)
    assert all((array == same[path]).all() for path, array in arrays(own).items())
    rows = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "validation/bits_per_token" in row]
    assert steps == [5, 25, 30]


@pytest.mark.slow
def test_a_fault_in_an_evaluator_loses_no_step(run, tiny, trained, tmp_path, monkeypatch, arrays):
    own = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyError) as found:
        fails_at(patch, {10: KeyError("a fault")})
        run("--config", tiny, "--workdir", own)
    assert "step 10 is saved" in found.value.__notes__[0]
    assert sorted(int(p.name) for p in (own / "checkpoints").glob("[0-9]*")) == [7, 10]
    ended = run("--config", tiny, "--workdir", own)
    assert ended.code == 0 and "step 10  validation: " in ended.err, ended
    same = arrays(trained)
    assert all((array == same[path]).all() for path, array in arrays(own).items())


def test_all_missing_data_are_named_before_anything_runs(refused, trained, monkeypatch):
    monkeypatch.setattr(NGramModels, "run", lambda *_: pytest.fail("an evaluator ran"))
    kind = dict(name="likelihood", data__name="text")
    words = assigned("a", **kind, data__path="NO/a.txt")
    words += assigned("b", **kind, data__path="NO/b.txt")
    message = refused("--workdir", trained, "--mode=eval", "--evals=ngrams,a,b", *words)
    assert "evals.a: " in message and "NO/a.txt" in message
    assert "evals.b: " in message and "NO/b.txt" in message


def test_missing_data_of_a_new_evaluator_are_none_of_the_run(refused, trained, tiny):
    words = assigned("new", name="likelihood", data__name="text", data__path="NO/a.txt")
    message = refused("--workdir", trained, "--config", tiny, *words)
    assert "evals.new: data.path: no file matches 'NO/a.txt'" in message
    assert "could read its data when it began" not in message


def test_other_data_of_a_run_are_those_of_an_evaluator(refused, trained):
    at = ("--workdir", trained, "--mode", "eval")
    message = refused(*at, "--config.data.name=text", "--config.data.path=other.txt")
    assert "data.name: 'shakespeare' in the workdir, 'text' asked for" in message
    assert "--config.evals.other.data.path=FILE" in message
    assert "evals.other" not in refused(*at, "--config.train.batch_size=16")


def test_an_unknown_evaluator(refused, trained):
    at = ("--workdir", trained, "--mode", "eval")
    message = refused(*at, "--evals=tset")
    assert "'tset'; did you mean 'test'? Known: " in message
    assert "The evaluators of the config are test, validation, ngrams, samples. The" in message
    assert "--evals=test is for --mode eval" in refused("--workdir", trained, "--evals=test")
    message = refused(*at, "--config.evals.test.final=False")
    assert "no evaluator is final: give --evals, of " in message
    message = refused(*at, "--evals=a", *assigned("a", name="likelihood", data__pth="x"))
    assert "evals.a: unknown key in data 'pth'" in message


@pytest.fixture
def texts(trained, tmp_path) -> Path:
    """DIR/held.txt, and DIR/whole.txt, a corpus that ends with it."""
    held = "To be, or not to be:\nthat is the question.\n" * 40
    (tmp_path / "held.txt").write_text(held[:-7])
    (tmp_path / "whole.txt").write_text("What is it?\n" * 50 + held[:-7])
    return tmp_path


def test_other_data_is_evaluated_as_the_test_split_of_a_run_of_its_own(evaluate, trained, texts):
    """The same parameters and symbols: only where the text lies differs, to the last digit."""
    size = len((texts / "held.txt").read_text())
    (found,), _ = evaluate(
        "--evals=other",
        *assigned("other", name="likelihood", data__name="text", batch_size=64, draws=2),
        *assigned("other", data__path=texts / "held.txt", split="all"),
    )
    assert found["tokens"] == size and found["split"] == "all"
    own = texts / "own"
    shutil.copytree(trained, own)
    content = json.loads((own / "config.json").read_text())
    content["config"]["data"] |= {"name": "text", "path": str(texts / "whole.txt")}
    content["config"]["data"] |= {"validation": 0.1, "test": float(size)}
    (own / "config.json").write_text(json.dumps(content))
    (expected,), _ = evaluate("--config.evals.test.draws=2", workdir=own)
    assert found == expected | {"split": "all"}


def test_other_data_keeps_the_symbols_of_the_run(refused, trained, texts):
    """A character that training never saw has none."""
    (texts / "held.txt").write_text("nine: 9" * 20)
    words = assigned("other", name="likelihood", data__name="text", split="all")
    message = refused(
        *("--workdir", trained, "--mode", "eval", "--evals=other", *words),
        f"--config.evals.other.data.path={texts / 'held.txt'}",
    )
    assert "'9' at offset 6 is not in the alphabet" in message


def test_a_run_whose_config_has_one_eval_section(evaluate, trained, tmp_path):
    """Written before there were evaluators by name: it is evaluated as it was."""
    old = tmp_path / "run"
    shutil.copytree(trained, old)
    content = json.loads((old / "config.json").read_text())
    evals = content["config"].pop("evals")
    bound = {k: v for k, v in evals["test"].items() if k not in ("name", "final", "data")}
    content["config"]["eval"] = bound | {"every": 10, "limit": 64, "ngram_order": 0}
    (old / "config.json").write_text(json.dumps(content))
    assert evaluate(workdir=old)[0] == evaluate()[0]


@pytest.mark.slow
def test_samples_are_drawn_and_judged_while_a_run_trains(run, tiny, tmp_path):
    workdir = tmp_path / "run"
    words = ("train.num_steps=6", "log.every=2", "optim.warmup_steps=1", "sample.judge=self")
    words += ("evals.samples.every=3", "evals.validation.every=0", "evals.test.final=False")
    ended = run("--config", tiny, "--workdir", workdir, *(f"--config.{word}" for word in words))
    assert ended.code == 0, ended
    rows = [row for row in runs.rows(workdir) if "samples/judge_bits_per_token" in row]
    assert [row["step"] for row in rows] == [3, 6]
    assert not any(isinstance(value, str) for row in rows for value in row.values())
    written = sorted(path.name for path in (workdir / "samples").glob("*.txt"))
    assert written == ["step_00000003.txt", "step_00000006-2.txt", "step_00000006.txt"]
    assert "step 3  2 samples of 16 characters from step 3" in ended.err
    assert "held out" not in ended.err and "trained to step 6\n" in ended.out
    kept = runs.evaluated(workdir, "samples")
    assert kept["step"] == 6 and kept["judge"] == "self" and kept["judge_bits_per_token"] > 0
