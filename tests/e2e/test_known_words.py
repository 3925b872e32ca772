"""The share of the words of samples that the training text has."""

import json
import math

import pytest

from md4_jax.evals.known_words import KnownWords, share
from md4_jax.protocols import UserError


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
