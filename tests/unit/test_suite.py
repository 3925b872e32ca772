"""Evaluators together: which run when, what they share, and what a new one may rely on."""

import dataclasses
import types
from typing import ClassVar

import pytest

from md4_jax.evals import ngrams
from md4_jax.evals.context import numbers_of
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.ngrams import NGramModels
from md4_jax.evals.suite import Suite
from md4_jax.protocols import UserError


@dataclasses.dataclass(frozen=True)
class Counts:
    """An evaluator of a user's own: the step, and how many ran before it."""

    every: int = 0
    final: bool = True

    needs_data: ClassVar[bool] = False

    def run(self, experiment, params, context):
        context.say(f"{context.name} at {context.step}")
        built = context.programs.setdefault("built", []) or context.programs["built"]
        built.append(context.name)
        return {"params": params, "earlier": len(context.earlier), "built": len(built)}


class Text:
    """A corpus that remembers what was asked of it."""

    def __init__(self, **splits):
        self.splits, self.asked = splits, []

    def stream(self, split):
        return self.splits[split]

    def sizes(self, splits):
        self.asked += splits
        missing = [split for split in splits if split not in self.splits]
        if missing:
            raise UserError(f"the {missing[0]} split has 0 tokens")
        return {split: len(self.splits[split]) for split in splits}

    def check_stride(self, stride):
        if stride:
            raise UserError("single examples have no stride")


def suite_of(evals, corpus=None):
    return Suite(types.SimpleNamespace(evals=evals, rewarded=None), "WORKDIR", corpus)


def test_which_run_after_a_step_and_at_the_end():
    suite = suite_of(
        {"a": Counts(every=3), "b": Counts(every=2, final=False), "c": Counts(final=False)}
    )
    assert [suite.due(step) for step in (0, 1, 2, 3, 6)] == [[], [], ["b"], ["a"], ["a", "b"]]
    assert suite.final() == ["a"]


def test_evaluators_see_what_ran_before_and_what_the_run_has_compiled():
    suite, said = suite_of({"a": Counts(), "b": Counts()}), []
    found = dict(suite.run(["b", "a"], 1.5, 7, said.append))
    assert found == {
        "a": {"params": 1.5, "earlier": 0, "built": 1},
        "b": {"params": 1.5, "earlier": 1, "built": 2},
    }
    assert said == ["a at 7", "b at 7"]
    # Programs stay for the run; results are of one moment.
    assert dict(suite.run(["b"], 1.5, 8, said.append))["b"] == {
        "params": 1.5, "earlier": 0, "built": 3
    }  # fmt: skip


def test_the_sizes_are_of_what_the_evaluators_read():
    own, other = Text(test=[1, 2]), Text(all=[1, 2, 3])
    evals = {
        "a": LikelihoodBound(None),
        "b": NGramModels(split="all", data={"path": "FILE"}),
        "c": Counts(),
    }
    suite = suite_of(evals, lambda changes: other if changes else own)
    assert suite.sizes(["a", "b", "c"]) == {("a", "test"): 2, ("b", "all"): 3}
    assert suite.sizes(["c"]) == {}
    suite = suite_of({"mine": LikelihoodBound(None, split="validation")}, lambda changes: own)
    with pytest.raises(UserError, match="evals.mine: the validation split has 0 tokens"):
        suite.sizes(["mine"])
    suite = suite_of({"mine": LikelihoodBound(None, stride=3)}, lambda changes: own)
    with pytest.raises(UserError, match="evals.mine: single examples have no stride"):
        suite.sizes(["mine"])


def test_n_gram_models_stand_beside_a_bound_of_the_same_text_alone():
    result = {"bits_per_token": 1.25, "bits_per_token_se": 0.01, "exact": False}
    corpus = Text(train=[0, 1] * 50, test=[0, 1] * 9, validation=[1, 0] * 9)
    for bound, beside in (
        (LikelihoodBound(None), True),
        (LikelihoodBound(None, split="validation"), False),
        (LikelihoodBound(None, limit=4), False),
        (LikelihoodBound(None, data={"path": "FILE"}), False),
    ):
        said = []
        experiment = types.SimpleNamespace(
            evals={"test": bound}, domain=types.SimpleNamespace(vocab_size=2)
        )
        context = types.SimpleNamespace(
            corpus=lambda changes: corpus, earlier={"test": result}, say=said.append
        )
        found = NGramModels(order=2).run(experiment, None, context)
        assert ("1.2500  this model (bound, +- 0.0100)" in said[0]) is beside
        where = "on the same text" if beside else "of the test split, all 18 tokens"
        assert said[0].splitlines()[0] == f"bits per token {where}:"
        # One character in two, then no choice at all.
        assert found["split"] == "test" and ngrams.levels(found)[0] == pytest.approx(1.0)
        assert 0 < ngrams.levels(found)[1] < 0.2 and len(ngrams.levels(found)) == 2
    assert ngrams.levels(result) == []


def test_n_gram_models_of_a_part_of_a_text_say_so(monkeypatch):
    """And the model's bound is on all of it. Of 8 training tokens, equally frequent symbols."""
    monkeypatch.setattr(ngrams, "MOST_TOKENS", 8)
    result = {"bits_per_token": 1.25, "bits_per_token_se": 0.01, "exact": False}
    corpus, said = Text(train=[0, 1] * 4 + [1] * 90, test=[0, 1] * 9), []
    experiment = types.SimpleNamespace(
        evals={"test": LikelihoodBound(None)}, domain=types.SimpleNamespace(vocab_size=2)
    )
    context = types.SimpleNamespace(
        corpus=lambda changes: corpus, earlier={"test": result}, say=said.append
    )
    found = NGramModels(order=1).run(experiment, None, context)
    assert ngrams.levels(found) == pytest.approx([1.0])
    heading, bound, model = said[0].splitlines()
    assert heading == "bits per token of the test split, the first 8 of 18 tokens:"
    assert bound.strip() == (
        "1.2500  this model (bound, +- 0.0100, on the test split, all 18 tokens)"
    )
    assert model.strip() == "1.0000  1-gram model"
    assert said[1] == "the n-gram models count the first 8 of 98 tokens of the training split"


def test_n_gram_models_are_fitted_to_the_training_split():
    """Both symbols are equally frequent there: one bit each, whatever the test split has."""
    corpus = Text(train=[0, 1] * 500, test=[1, 1, 1, 0] * 9)
    experiment = types.SimpleNamespace(evals={}, domain=types.SimpleNamespace(vocab_size=2))
    context = types.SimpleNamespace(
        corpus=lambda changes: corpus, earlier={}, say=lambda text: None
    )
    found = NGramModels(order=1).run(experiment, None, context)
    assert ngrams.levels(found)[0] == pytest.approx(1.0, abs=1e-3)


def test_numbers_are_what_a_curve_can_be_drawn_of():
    assert numbers_of({"a": 1, "b": 2.5, "c": True, "d": "text", "e": None}) == {
        "a": 1, "b": 2.5, "c": True
    }  # fmt: skip
