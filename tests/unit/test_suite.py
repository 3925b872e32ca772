"""Evaluators together: which run when, what they share, and what a new one may rely on."""

import contextlib
import dataclasses
import errno
import os
import types
from typing import ClassVar

import jax
import pytest

from md4_jax.config.evaluators import sizes_of_all
from md4_jax.data.sequences import SplitSize
from md4_jax.data.tokenizer_base import UnknownCharacter
from md4_jax.evals import ngrams
from md4_jax.evals.context import first_alone, numbers_of
from md4_jax.evals.frechet import FrechetDistance
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.ngrams import NGramModels
from md4_jax.evals.suite import Suite, failure_text
from md4_jax.protocols import UserError
from md4_jax.runtime import distributed, errors


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


TOKENS = types.SimpleNamespace(vocab_size=2, unit="token")


def suite_of(evals, corpus=None, **network):
    config = {"network": network}
    experiment = types.SimpleNamespace(
        evals=evals, rewarded=None, config=config,
        network=types.SimpleNamespace(classifies=network.get("name") == "classifier"),
        sample=types.SimpleNamespace(guidance=1.0),
    )  # fmt: skip
    return Suite(experiment, "WORKDIR", corpus)


@pytest.mark.parametrize("dropout, is_refused", [(0.0, True), (0.2, False)])
def test_a_network_that_needs_a_class_reads_no_data_without_labels(dropout, is_refused):
    """Its vector for "no class" was never trained. Models of n-grams need no class."""
    both = {"": Text(test=range(9)), "none": Text(test=range(9))}
    both[""].has_labels, both["none"].has_labels = lambda split: True, lambda split: False
    opened = types.SimpleNamespace(opened=lambda key, corpus_of: {}, needs_data=False)
    evals = {
        "own": LikelihoodBound(None, split="test"),
        "other": LikelihoodBound(None, split="test", data={"key": "none"}),
        "sets": opened,
        "ngrams": NGramModels(data={"key": "none"}),
    }
    suite = suite_of(
        evals, lambda changes: both[changes.get("key", "")], classes=3, label_dropout=dropout
    )
    for name in evals:
        if is_refused and name in ("other", "sets"):
            with pytest.raises(UserError, match=f"evals.{name} reads data without labels, but"):
                suite.sizes([name])
        else:
            suite.sizes([name])
    classifier = suite_of(
        evals, lambda changes: both["none"], name="classifier", classes=3, label_dropout=0.0
    )
    with pytest.raises(UserError, match="evals.own reads .* a classifier is compared with them"):
        classifier.sizes(["own"])


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


@dataclasses.dataclass(frozen=True)
class Fails(Counts):
    """An evaluator that cannot run."""

    error: Exception = None
    alone: bool = False

    def run(self, experiment, params, context):
        with first_alone() if self.alone else contextlib.nullcontext():
            raise self.error


def test_what_fails_leaves_the_others_their_results():
    one, other = UserError("no judge"), UserError("evals.d: no text")
    evals = {"a": Fails(error=one), "b": Counts(), "d": Fails(error=other), "c": Counts()}
    suite, said, found = suite_of(evals), [], []
    assert suite.in_order(["c", "a", "b"]) == ["a", "b", "c"]
    with pytest.raises(UserError) as raised:
        found.extend(suite.run(evals, 1.5, 7, said.append))
    assert [name for name, _ in found] == ["b", "c"]
    assert found[1][1]["earlier"] == 1
    assert str(raised.value) == "2 evaluators failed:\nevals.a: no judge\nevals.d: no text"
    assert said == [
        "failed, and b is next: evals.a: no judge", "b at 7",
        "failed, and c is next: evals.d: no text", "c at 7",
    ]  # fmt: skip
    # One that was asked for alone: its own error.
    with pytest.raises(UserError, match="^no judge$"):
        list(suite.run(["a"], 1.5, 7, said.append))


def test_a_fault_of_the_program_stays_one():
    evals = {
        "a": Fails(error=UserError("no judge")),
        "b": Fails(error=ValueError("x")),
        "c": Counts(),
    }
    found = []
    with pytest.raises(ValueError, match="^x\n2 evaluators failed") as raised:
        found.extend(suite_of(evals).run(evals, 1.5, 7, lambda text: None))
    assert [name for name, _ in found] == ["c"]
    assert raised.value.__notes__ == [
        "2 evaluators failed:\nevals.a: no judge\nevals.b: ValueError: x"
    ]


def test_of_several_processes_a_failure_ends_all(monkeypatch):
    """One alone may fail, while the others wait for it in a program of that evaluator."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    evals = {"a": Fails(error=UserError("no judge")), "b": Counts()}
    with pytest.raises(UserError, match="^no judge$"):
        list(suite_of(evals).run(evals, 1.5, 7, lambda text: pytest.fail(text)))


def test_what_the_first_process_does_alone_may_fail(monkeypatch):
    """Such as a file of samples: no other process waits for it."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "max_over_processes", lambda number: number)
    full, said = OSError(errno.ENOSPC, "No space left on device", "FILE"), []
    evals = {"a": Fails(error=full, alone=True), "b": Counts()}
    run, forgiven = suite_of(evals).run, []
    found = run(evals, 1.5, 7, said.append, lambda *failed: forgiven.append(failed))
    assert [name for name, _ in found] == ["b"] and forgiven == [("a", full)]
    with pytest.raises(UserError, match="evals.a: FILE: No space left on device"):
        list(run(evals, 1.5, 7, said.append))


def test_the_others_learn_what_the_first_process_alone_failed_in(monkeypatch):
    """Each ends with an error of the same evaluator, marked as one of all processes."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    numbers = iter([1, 0, 1])
    monkeypatch.setattr(distributed, "max_over_processes", lambda number: next(numbers))
    evals, found, said = {"a": Counts(), "b": Counts()}, [], []
    with pytest.raises(UserError) as raised:
        found.extend(suite_of(evals).run(evals, 1.5, 7, said.append))
    told = "evals.a failed in another process, which says why"
    assert str(raised.value) == told and [name for name, _ in found] == ["b"]
    assert said[1] == f"failed, and b is next: {told}"
    with pytest.raises(UserError, match=f"^{told}$"):
        list(suite_of(evals).run(["a"], 1.5, 7, said.append))


@pytest.mark.parametrize("number", [0, 1])
def test_which_errors_end_all_processes_together(number, monkeypatch):
    """They leave by the ordinary exit, at which each waits for the others."""
    monkeypatch.setattr(distributed, "max_over_processes", lambda own: max(own, number))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("at once") if number else None)
    failed = UserError("one") if number else None
    error = distributed.agreed(failed, "evals.a")
    assert error is failed
    if error is not None:
        try:
            raise UserError("converted") from error
        except UserError as converted:
            error = converted
    with pytest.raises(SystemExit, match="^2$"):
        distributed.leave(2, error)


def test_what_is_no_fault_of_the_program():
    memory = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to")
    nameless, fault = OSError("read timed out"), jax.errors.JaxRuntimeError("INTERNAL: x")
    evals = {str(n): Fails(error=error) for n, error in enumerate((memory, nameless, fault))}
    forgiven = {}
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: x"):
        list(suite_of(evals).run(evals, 1.5, 7, lambda text: None, forgiven.__setitem__))
    assert forgiven == {"0": memory, "1": nameless}
    assert failure_text("0", memory).startswith("evals.0: there is not enough memory (RESOURCE_EXH")
    assert failure_text("1", nameless) == "evals.1: OSError: read timed out"


@dataclasses.dataclass(frozen=True)
class Exhausting(Fails):
    """An evaluator whose sequences do not fit into memory."""

    batch_size: int = 8
    length: int = 9000

    def length_of(self, experiment):
        return ("length", self.length) if self.length else ("", 64)


@pytest.mark.parametrize(
    "sizes, said",
    [
        ({}, "reduce evals.a.length=9000 or evals.a.batch_size=8, or the size of the network"),
        ({"batch_size": 1}, "reduce evals.a.length=9000, or the size of the network"),
        ({"length": 0}, "reduce evals.a.batch_size=8, or the size of the network"),
        ({"batch_size": 1, "length": 0}, "reduce train.batch_size, evals.NAME.batch_size or"),
    ],
)
def test_too_little_memory_names_the_sizes_of_the_evaluator(sizes, said, tmp_path):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    run = suite_of({"a": Exhausting(error=error, **sizes)}).run(["a"], 1.5, 7, print)
    with pytest.raises(UserError) as raised, errors.said(tmp_path):
        list(run)
    assert str(raised.value).startswith(f"there is not enough memory ({error}): {said}")


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


def test_unknown_characters_are_described_once():
    """A text often lacks the same characters in its validation and test split."""

    def sizes(names):
        [name] = names
        if name == "d":
            raise UserError("evals.d: no file")
        if name != "a":
            said = f"the {name} split, b.txt: the character 'x' is unknown"
            try:
                raise UserError(said) from UnknownCharacter(said)
            except UserError as error:
                raise UserError(f"evals.{name}: {said}") from error
        return {("a", "test"): 3}

    suite = types.SimpleNamespace(sizes=sizes)
    assert sizes_of_all(suite, ["a"]) == {("a", "test"): 3}
    said = r"evals.b: the b split, b.txt: the character 'x' is unknown"
    with pytest.raises(UserError, match=f"^{said}$"):
        sizes_of_all(suite, ["a", "b"])
    with pytest.raises(UserError) as found:
        sizes_of_all(suite, ["b", "d", "c", "e"])
    also = "Unknown characters are also in the texts of evals.c, evals.e"
    assert found.value.messages == ("evals.d: no file", f"{said}. {also}")


def test_samples_get_no_labels_of_images_that_have_none():
    """An evaluator's own data may lack the labels that the data of the run have."""
    labelled, bare = Text(train=range(9)), Text(train=range(9))
    labelled.has_labels, bare.has_labels = lambda split: True, lambda split: False
    evals = {
        "own": FrechetDistance(labels=True),
        "other": FrechetDistance(labels=True, data={"labels": False}),
        "plain": FrechetDistance(data={"labels": False}),
    }
    size = SplitSize(9, 9)
    labelled.sizes = bare.sizes = lambda splits: dict.fromkeys(splits, size)
    suite = suite_of(evals, lambda changes: bare if changes else labelled)
    assert suite.sizes(["own", "plain"]) == {("own", "train"): size, ("plain", "train"): size}
    with pytest.raises(UserError, match="evals.other.labels=True gives .* of the train split of"):
        suite.sizes(["other"])


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
        experiment = types.SimpleNamespace(evals={"test": bound}, domain=TOKENS)
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
    experiment = types.SimpleNamespace(evals={"test": LikelihoodBound(None)}, domain=TOKENS)
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


def test_n_gram_models_of_images_count_values_of_pixels(monkeypatch):
    """The unit is the domain's, as in the line of the bound."""
    monkeypatch.setattr(ngrams, "MOST_TOKENS", 8)
    corpus, said = Text(train=[0, 1] * 5, test=[0, 1] * 4), []
    domain = types.SimpleNamespace(vocab_size=2, unit="dimension")
    experiment = types.SimpleNamespace(evals={"test": LikelihoodBound(None)}, domain=domain)
    result = {"bits_per_token": 1.25, "bits_per_token_se": 0.01, "exact": False}
    for earlier, heading in (
        ({}, "bits per dimension of the test split, all 8 dimensions:"),
        ({"test": result}, "bits per dimension on the same data:"),
    ):
        said.clear()
        context = types.SimpleNamespace(
            corpus=lambda changes: corpus, earlier=earlier, say=said.append
        )
        NGramModels(order=1).run(experiment, None, context)
        assert said[0].splitlines()[0] == heading
        assert said[1].startswith("the n-gram models count the first 8 of 10 dimensions of")


def test_n_gram_models_are_fitted_to_the_training_split():
    """Both symbols are equally frequent there: one bit each, whatever the test split has."""
    corpus = Text(train=[0, 1] * 500, test=[1, 1, 1, 0] * 9)
    experiment = types.SimpleNamespace(evals={}, domain=TOKENS)
    context = types.SimpleNamespace(
        corpus=lambda changes: corpus, earlier={}, say=lambda text: None
    )
    found = NGramModels(order=1).run(experiment, None, context)
    assert ngrams.levels(found)[0] == pytest.approx(1.0, abs=1e-3)


def test_numbers_are_what_a_curve_can_be_drawn_of():
    assert numbers_of({"a": 1, "b": 2.5, "c": True, "d": "text", "e": None}) == {
        "a": 1, "b": 2.5, "c": True
    }  # fmt: skip
