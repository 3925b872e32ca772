"""A learning rate that follows seconds: it ends with the budget, however many steps that was."""

import itertools
import types

import pytest

from md4_jax.training import notices

pytestmark = pytest.mark.slow


@pytest.fixture
def one_second_a_look(monkeypatch):
    """A clock that advances by a second whenever it is read, which is once a step."""
    ticks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(notices, "time", clock)


def rates(rows, workdir) -> dict[int, float]:
    return {row["step"]: row["learning_rate"] for row in rows(workdir) if "learning_rate" in row}


@pytest.mark.campaign
def test_a_budget_ends_the_learning_rate_too(one_second_a_look, run, tiny, tmp_path, rows):
    """Half of the seconds in one command and half in the next: 20 seconds for 30 steps at most."""
    words = ("--config", tiny, "--workdir", tmp_path, "--config.log.every=1")
    words += ("--config.optim.clock=seconds", "--config.optim.decay=linear")
    words += ("--config.checkpoint.every=100", "--config.evals.validation.every=0")
    first = run(*words, "--config.train.seconds=10")
    assert first.code == 0 and "has reached its end too" in first.out + first.err, first
    half = rates(rows, tmp_path)
    assert 8 <= max(half) <= 10 and half[max(half)] < 0.25 * max(half.values())
    second = run(*words, "--config.train.seconds=20")
    assert second.code == 0, second
    whole = rates(rows, tmp_path)
    # The seconds of the first command count: about ten steps more, back at half of the rate.
    assert 16 <= max(whole) <= 20
    after = whole[max(half) + 1] / max(whole.values())
    assert 0.35 < after < 0.6 and whole[max(whole)] < 0.15 * max(whole.values())
    third = run(*words, "--config.train.seconds=20")
    assert third.code == 0 and rates(rows, tmp_path) == whole, third


def test_seconds_need_a_budget_and_a_decay(refused, tiny, tmp_path):
    words = ("--config", tiny, "--workdir", tmp_path / "run", "--config.optim.clock=seconds")
    assert "optim.clock='seconds' needs train.seconds" in refused(*words)
    budget = "--config.train.seconds=10"
    assert "which end with the time limit" in refused(
        *words, budget, "--config.optim.decay=constant"
    )
    assert "optim.clock must be one of steps, seconds" in refused(
        *words[:-1], "--config.optim.clock=minutes"
    )
