"""A run that is started again after its end shows the results that it has recorded."""

import json
import math
from types import SimpleNamespace

import pytest

from md4_jax.config import ending, runs
from md4_jax.protocols import UserError
from md4_jax.training import report

EVALS = {
    "test": {"name": "likelihood", "draws": 1, "every": 5, "final": True},
    "samples": {"name": "samples", "final": True},
    "mine": {"name": "package.module:Mine", "final": True},
}
BOUND = {"bits_per_token": 2.5, "bits_per_token_se": math.nan}


@pytest.fixture
def end(tmp_path, monkeypatch):
    """Ends a run: (changes of the config, its checkpoint) -> (evaluators that ran, text)."""
    failing, shown = [], {}

    def run(names, params, step, say, earlier):
        shown["earlier"] = dict(earlier)
        for name in names:
            if name in failing:
                raise UserError("not today")
            file = tmp_path / f"{name}.txt"
            file.write_text("a sample")
            yield name, BOUND if name == "test" else {"texts": str(file)}

    def end(evals=EVALS, sample=(), step=30, seconds=1.5, fails=()):
        failing[:] = fails
        shown.clear()
        config = {"evals": evals, "sample": {"steps": 4} | dict(sample)}
        own = SimpleNamespace(config=config, checkpoint=SimpleNamespace(retries=0), domain=None)
        process = SimpleNamespace(learned=dict)
        found = (step, {"process": process}, {"elapsed": seconds})
        monkeypatch.setattr(runs, "averaged_and_host", lambda *_: found)
        monkeypatch.setattr(runs, "best_line", lambda *_: "")
        monkeypatch.setattr(report, "summary", lambda *a: f"summary of {json.dumps(a[-1])}")
        suite = SimpleNamespace(
            final=lambda: list(evals), in_order=list, run=run,
            failures=SimpleNamespace(lines=lambda workdir: ""),
        )  # fmt: skip
        said, before = [], len(report.kept(tmp_path))
        try:
            ending.evaluated_at_end(own, suite, tmp_path, "AGAIN", said.append)
        finally:
            ran = [row["eval"] for row in report.kept(tmp_path)[before:]]
            end.said, end.ran, end.earlier = "\n".join(said), ran, shown.get("earlier")
        return ran

    return end


def test_what_is_recorded_is_not_evaluated_again(end, tmp_path):
    assert end() == ["test", "samples", "mine"] and "before" not in end.said
    assert end() == [] and "evaluating step" not in end.said
    before = "step 30 was evaluated before, with the same settings: test, samples, mine, in "
    assert f"{before}{tmp_path}/evaluations.jsonl\n" in end.said
    assert "to evaluate it again: AGAIN --evals test,samples,mine" in end.said
    assert '  samples: {"eval": "samples", "step": 30, "texts": ' in end.said
    last = json.loads(end.said.split("summary of ")[1])
    assert list(last) == ["test", "samples", "mine"]
    assert last["test"]["bits_per_token"] == 2.5 and math.isnan(last["test"]["bits_per_token_se"])


@pytest.mark.parametrize(
    "changes, runs_again",
    [
        ({"evals": EVALS | {"test": EVALS["test"] | {"draws": 2}}}, ["test"]),
        ({"evals": EVALS | {"test": EVALS["test"] | {"every": 2}}}, []),
        ({"sample": {"steps": 5}}, ["samples", "mine"]),
        ({"step": 31}, list(EVALS)),
        ({"seconds": 1.75}, list(EVALS)),  # the same step, trained again
        ({"evals": EVALS | {"new": {"name": "ngrams"}}}, ["new"]),
    ],
)
def test_what_has_changed_is_evaluated(end, changes, runs_again):
    end()
    assert end(**changes) == runs_again
    if runs_again == ["new"]:  # n-grams are printed beside the bound
        assert end.earlier["test"]["bits_per_token"] == 2.5


def test_samples_that_are_gone_are_drawn_again(end, tmp_path):
    end()
    (tmp_path / "samples.txt").unlink()
    assert end() == ["samples"]


def test_samples_of_a_run_that_was_moved_are_found(end, tmp_path):
    end()
    (tmp_path / "samples").mkdir()
    moved = (tmp_path / "samples.txt").rename(tmp_path / "samples" / "samples.txt")
    assert end() == []
    assert json.loads(end.said.split("summary of ")[1])["samples"]["texts"] == str(moved)


def test_only_what_failed_is_evaluated_again(end):
    with pytest.raises(UserError, match="not today"):
        end(fails=["samples"])
    assert end.ran == ["test"] and "summary of" in end.said
    assert end() == ["samples", "mine"] and '"test"' in end.said.split("summary of ")[1]
