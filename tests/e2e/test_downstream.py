"""Continuations as downstream tasks ask for them, and a task of lm_eval without a network."""

from pathlib import Path

import numpy as np
import pytest

import md4_jax
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.model import continuations
from md4_jax.protocols import UserError

TASKS = Path(__file__).with_name("downstream")


@pytest.fixture(scope="module")
def model(trained):
    return md4_jax.load(str(trained))


def chain_rule(model) -> LikelihoodBound:
    return LikelihoodBound(continuations.objective_of(model, "chain_rule"), batch_size=8)


def test_next_symbols_have_probabilities_that_add_up_to_one(model):
    """One of them is greedy: the most likely."""
    symbols = [model.domain.decode([k]) for k in range(model.domain.vocab_size)]
    pairs = [continuations.pair(model, "the", symbol) for symbol in symbols]
    assert all(one.size == 4 and len(one.continuation) == 1 for one in pairs)
    logs, errors = continuations.log_likelihoods(model, pairs, chain_rule(model))
    assert np.exp(logs).sum() == pytest.approx(1.0, abs=1e-5) and not errors.any()
    greedy = continuations.are_greedy(model, pairs, 8)
    np.testing.assert_array_equal(np.flatnonzero(greedy), [np.argmax(logs)])


def test_a_chain_takes_one_token_at_a_time_with_the_later_ones_masked(model):
    (pair,) = pairs = [continuations.pair(model, "to be ", "or not")]
    assert model.domain.decode(pair.context) == "to be"
    assert model.domain.decode(pair.continuation) == " or not"
    (log,), _ = continuations.log_likelihoods(model, pairs, chain_rule(model))
    total, tokens, mask = 0.0, np.concatenate(pair), model.domain.vocab_size
    segments = np.where(np.arange(16) < pair.size, 0, -1)[None]
    for step, token in enumerate(pair.continuation):
        z = np.full((1, 16), mask)
        z[0, : len(pair.context) + step] = tokens[: len(pair.context) + step]
        t = 1.0 - step / len(pair.continuation)
        logits = model.logits(z, t, {"segments": segments})[0, len(pair.context) + step]
        total += logits[token] - np.logaddexp.reduce(logits.astype(np.float64))
    assert log == pytest.approx(total, abs=1e-4)


def test_greedy_continuations_are_those_of_every_step(model):
    """The most likely symbols, one after the other; not with another first or last one."""
    z, segments = np.full((1, 16), model.domain.vocab_size), np.full((1, 16), -1)
    z[0, :3], segments[0, :5] = model.domain.encode("the"), 0
    for place, t in ((3, 1.0), (4, 0.5)):
        z[0, place] = np.argmax(model.logits(z, t, {"segments": segments})[0, place])
    first, last = z[0, 3:5]
    other = (z[0, 3:5] + 1) % model.domain.vocab_size
    ends = [(first, last), (first, other[1]), (other[0], last)]
    pairs = [continuations.Pair(z[0, :3].astype(np.int32), np.int32(end)) for end in ends]
    np.testing.assert_array_equal(continuations.are_greedy(model, pairs, 8), [True, False, False])


def test_a_long_context_loses_its_start(model):
    pair = continuations.pair(model, "x" * 40 + "and so", " on")
    assert pair.size == model.length == 16
    assert model.domain.decode(pair.context).endswith("xand so")
    for words in ("", "n" * 17):
        with pytest.raises(UserError, match=rf"has {len(words)} tokens; it must have 1 to 16"):
            continuations.pair(model, "a", words)


def test_drawn_continuations_end_where_they_should(model):
    options = {"name": "ancestral", "steps": 4, "seed": 3}
    found = continuations.continued(model, ["to be ", "", "x" * 40], 6, options)
    assert [len(text) for text in found] == [6, 6, 6]
    assert found == continuations.continued(model, ["to be ", "", "x" * 40], 6, options)
    assert continuations.before("one two three", ["three", " t"]) == "one"
    assert continuations.before("one", ["x"]) == "one"
    assert continuations.before("one\ntwo", "\n") == "one"


@pytest.mark.filterwarnings("ignore")
def test_tasks_of_lm_eval(model, trained):
    pytest.importorskip("lm_eval", reason="needs lm_eval: pip install 'md4_jax[lm-eval]'")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from md4_jax.model.harness import Harness

    arguments = {"path": str(trained), "likelihood": "chain_rule", "steps": 4}
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    names = ["shakespeare_words", "shakespeare_lines"]
    found = simple_evaluate(
        "md4_jax", model_args=arguments, tasks=names, task_manager=manager, batch_size=4
    )
    assert set(found["results"]) == set(names)
    assert found["results"]["shakespeare_words"]["acc,none"] >= 0.5
    harness = Harness(**arguments)
    ask = lambda *words: type("Request", (), {"args": words})  # noqa: E731
    (whole,) = harness.loglikelihood_rolling([ask("to be or not")])
    (scored,) = model.score("to be or not", objective="any_order", draws=64).nats
    assert whole == pytest.approx(-scored, rel=0.25)
    (text,) = harness.generate_until([ask("to be ", {"until": ["e"], "max_gen_toks": 5})])
    assert len(text) <= 5 and "e" not in text
