"""Tables of counts in a run: what they count before the first step, and how long that may take."""

import pytest

import md4_jax
from md4_jax.networks import codes
from md4_jax.training import counting

V = 65  # letters of Shakespeare


@pytest.fixture
def words(tiny, tmp_path):
    made = ("--config", tiny, "--workdir", tmp_path / "run", "--config.network.tables=640")
    made += ("--config.train.num_steps=6", "--config.evals.validation.every=0")
    return (*made, "--config.evals.test.limit=8", "--config.sample.num=1")


def counted(workdir) -> tuple[int, int]:
    """Number of sequences, and of the tokens in the table of no neighbours, which has one row."""
    found = md4_jax.load(workdir).params["companion"]
    return int(found["sequences"]), int(codes.decoded(found["counts"][0]).sum())


def test_each_token_of_the_training_text_is_counted(words, run, tmp_path):
    ended = run(*words)
    assert ended.code == 0, ended
    sequences, counts = counted(tmp_path / "run")
    data = next(line for line in ended.out.splitlines() if "data        train" in line)
    told, whole = (int(word.replace(",", "")) for word in data.split() if word[0].isdigit())
    assert sequences == whole == told // 16 > 60_000
    assert counts == pytest.approx(whole * 16, rel=1 / 16)
    assert f"counting {whole * 16:,} tokens" in ended.out
    again = run(*words, "--config.evals.test.limit=16")
    assert again.code == 0 and "counting" not in again.out, again


def test_no_more_tokens_than_asked_for_are_counted(words, run, tmp_path):
    ended = run(*words, "--config.network.tables_tokens=1001")
    assert ended.code == 0, ended
    sequences, counts = counted(tmp_path / "run")
    assert sequences == 63 and counts == pytest.approx(63 * 16, rel=1 / 16)
    assert "counting 1,008 tokens" in ended.out


def test_counting_is_part_of_the_seconds(words, run, monkeypatch):
    monkeypatch.setattr(counting, "filled", lambda experiment, corpus, state: (state, 1e6))
    ended = run(*words, "--config.train.seconds=1000000")
    assert ended.code == 0 and "stopped at step 1 of 6: the budget" in ended.out + ended.err, ended


def test_counting_that_takes_all_seconds_is_an_error(words, refused):
    said = refused(*words, "--config.train.seconds=0.001")
    assert "which is all of train.seconds=0.001: raise that, or lower network.tables_tok" in said
