"""A run that diverged goes back: later checkpoints are kept aside, and its bad data left out."""

import json

import pytest

from md4_jax.data import loader

pytestmark = pytest.mark.slow


def saved(folder) -> list[int]:
    return sorted(int(p.name.split("-")[0]) for p in folder.iterdir() if p.is_dir())


def taken(monkeypatch) -> list[int]:
    """The positions to which the training data are set."""
    positions, set_state = [], loader.TrainIterator.set_state

    def noting(self, state):
        positions.append(state["sequences"])
        set_state(self, state)

    monkeypatch.setattr(loader.TrainIterator, "set_state", noting)
    return positions


def test_back_to_a_step_at_another_rate(copy, run, refused, rows, snapshot, monkeypatch):
    words = ("--workdir", copy, "--config.optim.learning_rate=0.005")
    assert "optim.learning_rate: 0.01 in the workdir, 0.005 asked for" in refused(*words)
    before = snapshot(copy)
    assert (
        "no checkpoint of step 22 (--back): it has checkpoints of the steps [21, 28, 30]"
        in refused(*words, "--back", "22")
    )
    assert "train.seed" in refused(*words, "--back", "21", "--config.train.seed=1")
    assert {k: v for k, v in snapshot(copy).items() if k in before} == before
    positions = taken(monkeypatch)
    ended = run(*words, "--back", "21")
    assert ended.code == 0, ended
    assert "resuming from step 21\n" in ended.out
    # 30 steps of 8 were taken; a window of 3 steps may have run after the last row.
    assert positions == [(30 + 3) * 8]
    assert saved(copy / "abandoned_checkpoints") == [28, 30]
    assert saved(copy / "checkpoints") == [21, 28, 30]
    (log,) = (copy / "abandoned_checkpoints").glob("metrics-*")
    assert json.loads(log.read_text().splitlines()[-1])["step"] == 30
    rates = {row["step"]: row["learning_rate"] for row in rows(copy) if "learning_rate" in row}
    assert rates[21] > rates[24] and sorted(rates) == list(range(3, 31, 3))
    # The same command only goes on; without a checkpoint after 21 it takes the same data.
    for step in ("28", "30"):
        (copy / "checkpoints" / step).rename(copy / f"lost-{step}")
    again = run(*words, "--back", "21")
    assert again.code == 0 and positions == [264, 264], again
    assert saved(copy / "abandoned_checkpoints") == [28, 30]


@pytest.mark.campaign
def test_killed_while_it_goes_back(copy, run, monkeypatch):
    """The next command finishes it, whatever it is."""
    move, moved = "md4_jax.training.back.move", []

    def killed(path, target):
        moved.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(move, killed)
    words = ("--workdir", copy, "--config.optim.learning_rate=0.005")
    assert run(*words, "--back", "21").code == 130 and moved
    monkeypatch.undo()
    positions = taken(monkeypatch)
    ended = run("--workdir", copy)
    assert ended.code == 0 and "resuming from step 21\n" in ended.out, ended
    assert positions == [264] and saved(copy / "abandoned_checkpoints") == [28, 30]


@pytest.mark.parametrize(
    "words, said",
    [
        (("--back", "best"), "--back best needs checkpoint.best, the name of the evaluator"),
        (("--back", "best"), "--config.checkpoint.best=validation, also in training"),
        (("--back", "best"), "one of the steps [21, 28, 30], such as --back 30"),
        (("--back", "x"), "--back must be a step or best, not 'x'"),
        (("--back", "21", "--mode", "eval"), "--back=21 is for --mode train"),
    ],
)
def test_a_return_that_cannot_be(words, said, trained, refused):
    assert said in refused("--workdir", trained, *words)
