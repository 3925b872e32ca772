"""Continuations as downstream tasks ask for them, and a task of lm_eval without a network."""

import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import chat_folder, peer_folder, says_a_or_ends

import md4_jax
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.model import continuations
from md4_jax.processes.masking import Masking
from md4_jax.protocols import UserError

BLOCKS = {"objective.block": 6, "data.length": 18}
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


def best(tokens, place: int, t: float) -> int:
    """The most likely symbol of the model below: it depends on all that the network sees."""
    return (
        int(sum((n + 1) * token for n, token in enumerate(tokens)) + 3 * place + round(8 * t)) % 7
    )


def stand_in() -> types.SimpleNamespace:
    """A masked model of 7 symbols without segments."""

    def bind(params, context, keys):
        raise UserError("knows no segments")

    def logits(z, t, context, at):
        return np.eye(7)[[best(*one) for one in zip(z, at, t, strict=True)]]

    network = types.SimpleNamespace(causal=False, bind=bind)
    experiment = types.SimpleNamespace(process=Masking(7), network=network, objective=None)
    return types.SimpleNamespace(
        experiment=experiment, params={"network": {}}, length=8, logits=logits
    )


def test_greedy_continuations_are_those_of_every_step():
    """The most likely symbols one after the other; not with another first or last one."""
    z, mask, pairs = np.array([2, 5, 7, 7, 7]), 7, []
    for step in range(3):
        z[2 + step] = best(z, 2 + step, 1.0 - step / 3)
    assert mask not in z and len(set(z[2:])) > 1
    for changed in ([], [2], [3], [4]):
        other = z.copy()
        other[changed] = (other[changed] + 1) % 7
        pairs.append(continuations.Pair(other[:2].astype(np.int32), other[2:].astype(np.int32)))
    found = continuations.are_greedy(stand_in(), pairs, 3)
    np.testing.assert_array_equal(found, [True, False, False, False])


def greedily(model, contexts: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yields logits [N, V] of the next token, of which the most likely one is then shown."""
    own, block, mask = model.experiment, model.experiment.objective.block, model.domain.vocab_size
    denoiser, given = own.network.denoiser(model.params, {}), contexts.shape[1]
    z = np.full((len(contexts), model.length), mask)
    z[:, :given] = contexts

    @jax.jit
    def read(z, masked):
        t = jnp.full((len(z), model.length // block), own.process.schedule.inverse(masked))
        return denoiser.unembed(denoiser.blocks.features(z, t, jnp.minimum(z, mask - 1), block))

    for place in range(given, given + size):
        begin = place // block * block
        masked = (z[0, max(begin, given) : begin + block] == mask).mean()
        logits = np.asarray(read(z, masked))[:, place]
        z[:, place] = np.argmax(logits, axis=-1)
        yield logits


@pytest.mark.parametrize(
    "name, told",
    [("sdar", {"mask_token_id": 123}), ("bd3lm", {"time_conditioning": True}), ("nemotron", {})],
)
@pytest.mark.cases(2)
def test_a_block_is_greedy_given_the_blocks_before_it_and_no_later_ones(name, told, tmp_path):
    """Contexts and continuations begin and end within blocks; the times are those of blocks."""
    model = md4_jax.load(peer_folder(tmp_path, name, **told), BLOCKS)
    rng = np.random.default_rng(0)
    contexts = rng.integers(0, model.domain.vocab_size, (4, 9)).astype(np.int32)
    expected = list(greedily(model, contexts, 7))
    best = np.argmax(expected, axis=-1).T.astype(np.int32)
    other = best.copy()
    other[np.arange(4), [0, 2, 4, 6]] ^= 1
    pairs = [continuations.Pair(*both) for both in zip(contexts, best, strict=True)]
    wrong = [continuations.Pair(*both) for both in zip(contexts, other, strict=True)]
    assert continuations.are_greedy(model, pairs + wrong, 4).tolist() == [True] * 4 + [False] * 4
    for step, logits in enumerate(expected):
        found = continuations._logits_in_blocks(model, pairs, step, 18, 6)
        np.testing.assert_allclose(found, logits, atol=1e-4)
    with pytest.raises(
        UserError, match="chain_rule masks all .* trained on blocks of 6 tokens, which"
    ):
        continuations.objective_of(model, "chain_rule")


def test_a_long_context_loses_its_start(model):
    pair = continuations.pair(model, "x" * 40 + "and so", " on")
    assert pair.size == model.length == 16
    assert model.domain.decode(pair.context).endswith("xand so")
    for words in ("", "n" * 17):
        with pytest.raises(
            UserError, match=rf"has {len(words)} tokens, but must have at least 1 and at most 16"
        ):
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
    pytest.importorskip("lm_eval", reason="needs lm_eval: pip install -e '.[lm-eval]'")
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


@pytest.mark.filterwarnings("ignore")
def test_a_chat_model_gets_its_template_from_lm_eval(tmp_path):
    """With --apply_chat_template each request is a turn, and its answer ends with the turn."""
    pytest.importorskip("lm_eval", reason="needs lm_eval: pip install -e '.[lm-eval]'")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import md4_jax.model.harness  # noqa: F401

    folder = chat_folder(tmp_path)
    says_a_or_ends(folder)
    found = simple_evaluate(
        "md4_jax",
        model_args={"path": str(folder), "steps": 4, "draws": 2},
        tasks=["shakespeare_lines", "shakespeare_words"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        apply_chat_template=True,
        log_samples=True,
    )
    for row in found["samples"]["shakespeare_lines"]:
        (context, _), (answer,) = row["arguments"][0], row["resps"][0]
        asked = row["doc"]["context"].strip()
        turn = "<|role|>assistant<|said|>\n\n"
        assert context == f"<|start|><|role|>user<|said|>\n\n{asked}<|eot_id|>{turn}"
        assert set(answer) <= {"a"} and len(answer) <= 6
    assert set(found["results"]) == {"shakespeare_lines", "shakespeare_words"}


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(
        SystemExit, match=r"^error: .* need lm_eval: pip install -e '\.\[lm-eval\]'$"
    ):
        runpy.run_module("md4_jax.model.harness", run_name="__main__")
