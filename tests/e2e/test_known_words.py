"""The share of the words of samples that the training text has."""

import json
import math
import types
from typing import NamedTuple

import numpy as np
import pytest

from md4_jax.data.tokenizers import Characters
from md4_jax.evals import known_words
from md4_jax.evals.known_words import KnownWords, own_words, share
from md4_jax.options import SampleOptions
from md4_jax.protocols import UserError


class SomeExperiment(NamedTuple):
    """What the evaluator reads of an experiment."""

    domain: types.SimpleNamespace
    sample: SampleOptions = SampleOptions()
    config: dict = {"sample": {"name": "ancestral"}}  # noqa: RUF012


def test_the_share_is_a_ratio_of_sums():
    texts = [["a", "b"], ["c", "a", "a"]]
    ratio, error, words = share(texts, {"a"})
    # Deviations of the texts: 1 - 0.6 * 2 and 2 - 0.6 * 3.
    assert (ratio, words) == (0.6, 5) and error == pytest.approx(math.sqrt(2 * 2 * 0.2**2) / 5)
    assert share([["a"]], {"a"})[0] == 1.0 and math.isnan(share([["a"]], {"a"})[1])
    assert share([[]], {"a"})[2] == 0


def test_impossible_options_are_refused():
    with pytest.raises(UserError, match="num must not be negative, not -1"):
        KnownWords(num=-1)


@pytest.mark.parametrize(
    "given, expected",
    [
        (
            "............",
            ["bb", "c", "dd"],
        ),  # neither the first word nor the last, which may be cut
        ("##..........", ["bb", "c", "dd"]),
        ("###.........", ["bb", "c", "dd"]),  # a given space is no part of a word
        ("####........", ["c", "dd"]),
        ("......#.....", ["bb", "dd"]),
        ("......####..", ["bb"]),
        ("############", []),
    ],
)
def test_a_word_of_which_a_part_is_given_is_not_the_models(given, expected):
    letters = Characters(" abcde")
    tokens, given = np.array(letters.encode("aa bb c dd e")), np.array([x == "#" for x in given])
    assert own_words(letters.decode, tokens, given) == expected
    assert own_words(letters.decode, tokens[:0], given[:0]) == []


def test_the_words_of_prompts_do_not_count_and_their_samples_do(monkeypatch):
    """Two prompts with two samples each, which begin with words that the text has."""
    letters = Characters(" abx")
    row = np.array(letters.encode("ab ab ab xx b"))
    given = np.arange(len(row)) < 6
    drawn = types.SimpleNamespace(
        tokens=np.stack([row] * 4),
        prompt_mask=np.stack([given] * 4),
        lengths=np.full(4, len(row)),
    )
    monkeypatch.setattr(known_words, "drawn_samples", lambda *_: drawn)
    monkeypatch.setattr(known_words.writers, "of_samples", lambda drawn: {"samples": 4})
    experiment = SomeExperiment(types.SimpleNamespace(decode=letters.decode))
    said = []
    corpus = types.SimpleNamespace(
        domain=experiment.domain, stream=lambda split: np.array(letters.encode("ab ab"))
    )
    context = types.SimpleNamespace(
        corpus=lambda changes: corpus, programs={}, say=said.append, name="words"
    )
    found = KnownWords(num=2).run(experiment, None, context)
    assert (found["known_words"], found["words"]) == (0.5, 8)
    assert "8 words of 4 samples are words of the training text" in said[0]


def test_too_few_words_are_named():
    """Samples without words, a split without words, and a single sample, which has no error."""
    said = known_words._line((math.nan, math.nan, 0), 1, "test", 0.5)
    assert said.startswith("there are no words to count in 1 sample, since") and "nan" not in said
    assert said.endswith("; of test 50.0%")
    said = known_words._line((0.5, 0.125, 8), 2, "test", math.nan)
    assert said.startswith("50.0% +- 12.5% of 8 words of 2 samples are words of the training text")
    assert said.endswith("; test has no words")
    said = known_words._line((1.0, math.nan, 1), 1, "test", 1.0)
    assert said == (
        "100.0% of 1 word of 1 sample are words of the training text "
        "(too few for a standard error); of test 100.0%"
    )


@pytest.mark.campaign
def test_samples_are_compared_with_the_training_text(run, tmp_path, tiny):
    """The training text has two words; of the test text half of the words are others."""
    for name, word in (("train", "ab ba "), ("test", "ab bb ")):
        (tmp_path / name).write_text(word * 900)
    words = ("--config", tiny, "--workdir", tmp_path / "run")
    keys = (
        "data.name=text", f"data.path={tmp_path}/train", "train.num_steps=2",
        "optim.warmup_steps=1", "evals.validation.every=0", "sample.num=3",
    )  # fmt: skip
    assert run(*words, *(f"--config.{key}" for key in keys)).code == 0
    ended = run(
        *("--workdir", tmp_path / "run", "--mode", "eval", "--evals", "known_words"),
        *("--config.evals.known_words.name=known_words", "--config.evals.known_words.num=5"),
        f"--config.evals.known_words.data.path={tmp_path}/test",
    )
    assert ended.code == 0, ended
    found = json.loads(ended.out.splitlines()[-1])
    assert found["samples"] == 5 and 0 <= found["known_words"] <= 1
    assert f"{found['words']} words of 5 samples are words of the training text" in ended.out
    assert found["split_known_words"] == pytest.approx(0.5, abs=0.01)
