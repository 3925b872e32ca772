"""A sweep trains its runs in one process, and each is as it would be alone."""

import pytest

pytestmark = pytest.mark.slow
KEYS = ("--config.train.num_steps=4", "--config.log.every=2", "--config.sample.num=1")


@pytest.mark.campaign
def test_two_runs_and_no_run_twice(run, rows, tiny, tmp_path):
    sweep = ("sweep", tmp_path / "both", "--config", tiny, "--vary", "train.seed=5,6", *KEYS)
    ended = run(*sweep)
    assert ended.code == 0, ended
    assert (
        run("--config", tiny, "--workdir", tmp_path / "alone", "--config.train.seed=6", *KEYS).code
        == 0
    )
    kept = {seed: rows(tmp_path / "both" / f"seed={seed}") for seed in (5, 6)}
    for row in (alone := rows(tmp_path / "alone")):
        row.pop("tokens_per_second", None)
    other = [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in kept[6]]
    assert other == alone and len(alone) >= 2
    assert kept[5] != kept[6]
    table = ended.out.split("\n\n")[-1]
    assert all(f"seed={seed} " in table for seed in (5, 6)) and "4 of 4" in table
    again = run(*sweep)
    assert again.code == 0 and "4 of 4" in again.out
    assert {seed: rows(tmp_path / "both" / f"seed={seed}") for seed in (5, 6)} == kept


@pytest.mark.campaign
def test_a_run_that_spent_its_seconds_has_ended(run, rows, tiny, tmp_path):
    keys = ("--config.train.num_steps=1000000", "--config.train.seconds=2")
    keys += ("--config.log.every=1", "--config.sample.num=1")
    sweep = ("sweep", tmp_path, "--config", tiny, "--vary", "train.seed=5", *keys)
    assert run(*sweep).code == 0
    kept = rows(tmp_path / "seed=5")
    again = run(*sweep)
    assert again.code == 0 and rows(tmp_path / "seed=5") == kept
    assert f"to continue: md4_jax train {tmp_path}/seed=5" in again.err + again.out
    alone = run("train", tmp_path / "seed=5", "--config.checkpoint.keep=1")
    assert alone.code == 0 and len(rows(tmp_path / "seed=5")) > len(kept)
    # What it has taken by itself counts too: to the sweep it has ended.
    taken = rows(tmp_path / "seed=5")
    assert run(*sweep).code == 0 and rows(tmp_path / "seed=5") == taken
