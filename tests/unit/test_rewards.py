"""Rewards of the registry, and what a config and Python may ask of them."""

import types

import numpy as np
import pytest
from peer_folders import peer_folder

import md4_jax
from md4_jax.data.pixels import PixelDomain
from md4_jax.evals.rewards import Pattern
from md4_jax.protocols import UserError

LETTERS = types.SimpleNamespace(
    decode=lambda row: "".join("abc "[i] for i in row), encode=None, unit="character"
)


def test_a_pattern_counts_matches_that_do_not_overlap():
    rows = np.array([[0, 0, 0, 3], [0, 1, 0, 1], [2, 2, 2, 2]])
    assert Pattern("a")(rows, LETTERS).tolist() == [3.0, 2.0, 0.0]
    assert Pattern("aa")(rows, LETTERS).tolist() == [1.0, 0.0, 0.0]
    assert Pattern("ab|c")(rows, LETTERS).tolist() == [0.0, 2.0, 4.0]
    assert Pattern(r"\b")(rows, LETTERS).tolist() == [2.0, 2.0, 2.0]


def test_patterns_are_of_texts():
    with pytest.raises(
        UserError, match=r"sample\.reward\.pattern='\(' is not a regular expression"
    ):
        Pattern("(")
    for domain in (types.SimpleNamespace(unit="value"), PixelDomain((8, 8, 1))):
        with pytest.raises(
            UserError, match="'pattern' is only for text, and the data of this run are not"
        ):
            Pattern("a").check(domain)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return md4_jax.load(peer_folder(tmp_path_factory.mktemp("peers"), "mdlm"))


@pytest.mark.slow
def test_python_asks_for_a_reward_and_is_told_what_it_did(model):
    reward = {"name": "pattern", "pattern": "a", "strength": 4.0, "particles": 8, "every": 1}
    plain, found = (model.sample(16, steps=4, **more) for more in ({}, {"reward": reward}))
    assert plain.steered is None
    counts = [text.count("a") for text in found.texts]
    assert found.steered.rewards.tolist() == counts
    assert sum(counts) > sum(text.count("a") for text in plain.texts)
    # Nothing of it is left in the model.
    assert model.sample(16, steps=4).tokens.tolist() == plain.tokens.tolist()


@pytest.mark.campaign
def test_a_judge_gives_the_log_probability_of_the_text(model, tmp_path):
    """Of its own tokens, all but the first; a text of one token has nothing to count."""
    folder = peer_folder(tmp_path, "gpt2")
    judge = md4_jax.load(folder)
    asked = {"name": "judge", "judge": str(folder), "strength": 0.5, "particles": 4, "every": 1}

    def log_probability(text: str) -> float:
        tokens = judge.domain.encode(text)
        logits = np.asarray(judge.logits([tokens]), np.float64)[0]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return sum(logs[place, token] for place, token in enumerate(tokens[1:]))

    with pytest.raises(UserError, match="needs a network that predicts all missing tokens"):
        judge.sample(1, reward=asked)
    found = model.sample(6, steps=4, reward=asked)
    expected = [log_probability(text) for text in found.texts]
    np.testing.assert_allclose(found.steered.rewards, expected, rtol=1e-5)
    plain = model.sample(6, steps=4)
    assert np.mean(expected) > np.mean([log_probability(text) for text in plain.texts])
    short = model.sample(2, steps=1, length=1, reward=asked)
    assert [len(judge.domain.encode(text)) for text in short.texts] == [1, 1]
    assert short.steered.rewards.tolist() == [0.0, 0.0]
    # A text may decode to nothing.
    reward = model.sampling({"reward": asked}).steering
    texts = types.SimpleNamespace(decode=lambda row: "ab" if row[0] else "")
    rewards = reward._replace(domain=texts).rewards(np.array([[0], [1]]))
    assert rewards == pytest.approx([0.0, log_probability("ab")])
    assert reward._replace(domain=texts).rewards(np.zeros((1, 1), int)).tolist() == [0.0]


@pytest.mark.parametrize(
    "reward, said",
    [
        ("pattern", r"reward must be the keys of the section sample\.reward with its name"),
        ({"pattern": "a"}, r"reward must be the keys of the section sample\.reward with its name"),
        ({"name": "none", "particles": 0}, r"sample\.reward\.particles must be at least 1, not 0"),
        ({"name": "pattern", "pattern": 7}, r"sample\.reward\.pattern must be text, not 7"),
        ({"name": "judge"}, r"sample\.reward\.name='judge' needs sample\.reward\.judge: the"),
        (
            {"name": "judge", "judge": "/none"},
            r"sample\.reward\.judge=/none is not the directory of a",
        ),
        ({"name": "judge", "judge": "a", "batch_size": 0}, r"batch_size must be at least 1, not 0"),
        (
            {"name": "rewards_of:Nobody"},
            r"sample\.reward\.name: rewards_of:Nobody: Python does not find",
        ),
    ],
)
def test_wrong_rewards_are_refused_in_python(model, reward, said):
    with pytest.raises(UserError, match=said):
        model.sample(2, steps=4, reward=reward)


def test_a_sample_that_is_watched_has_no_reward(model):
    with pytest.raises(UserError, match=r"cannot be combined with sample\.trace=True"):
        next(model.watch(steps=4, reward={"name": "pattern", "pattern": "a"}))


@pytest.mark.parametrize("key", ["sample.prompt", "sample.template", "sample.reward.name"])
def test_what_only_sample_heeds_is_refused_by_load(key):
    """It would be left out of all samples without a word."""
    with pytest.raises(UserError, match=rf"{key} belongs to single samples: give it to sample"):
        md4_jax.load("anything", {key: "pattern"})
